"""The process that compiles kernels by themselves: a request a line on standard input, an answer a line on standard
output; the listings of their bundles go where LIBTPU_INIT_ARGS say.
"""

import json
import sys
from typing import Any

from slicewise.compile.child import die_with_parent


def main() -> None:
    die_with_parent()
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    import jax
    from jax.experimental import topologies

    from slicewise.kernels.alone import alone
    from slicewise.kernels.tuned import Key

    name = sys.argv[1]
    device = topologies.get_topology_desc(platform="tpu", topology_name=name).devices[0]
    mesh = jax.make_mesh((1,), ("x",), devices=[device])
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        key = Key(**request["key"])
        options = {"xla_tpu_scoped_vmem_limit_kib": key.vmem_limit_kib} if key.vmem_limit_kib else {}
        error = ""
        try:
            # Without the mesh: what attention knows of its mask is computed here and now.
            program = alone(key, request["values"], request["part"], max_logit=request["max_logit"])
            with jax.set_mesh(mesh):
                lowered = jax.jit(program.function).lower(*program.operands)
                lowered.compile(compiler_options=options)
        except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as e:
            said = str(e).strip().splitlines() or [type(e).__name__]
            error = " ".join(said[:2])  # the sizes are in the second line
        print(json.dumps({"error": error}), file=answers, flush=True)


if __name__ == "__main__":
    main()
