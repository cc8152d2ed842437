"""The process that compiles: reads a request from standard input, leaves what the compiler dumps in a directory.

    python -m slicewise.compile.child DIRECTORY < request.json

A process of its own, because the compiler takes its settings from the environment, can crash, and is stopped once the
schedule is there when no more is wanted. It writes facts.json before it compiles and outcome.json at its end.
"""

import ctypes
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

from slicewise.errors import UserError

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """However the parent ends, this process does not outlive it: the kernel kills it (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:  # it ended before
            sys.exit(1)


def main() -> None:
    die_with_parent()  # before the imports below, which take seconds
    import jax

    directory, request = Path(sys.argv[1]), json.load(sys.stdin)
    try:
        compile_program(request, directory)
        outcome: dict[str, Any] = {"error": None}
    except UserError as e:
        outcome = {"error": str(e), "kind": "user"}
    except MemoryError as e:  # of this machine, while the step was traced
        advice = "lower sequence_length or global_batch_size."
        outcome = {"error": f"this machine has no memory to trace the step: {e}; {advice}", "kind": "user"}
    except jax.errors.JaxRuntimeError as e:
        outcome = {"error": str(e), "kind": "compiler"}
    (directory / "outcome.json").write_text(json.dumps(outcome))


def compile_program(request: dict[str, Any], directory: Path) -> None:
    import jax

    from slicewise.catalog import slices
    from slicewise.compile.compiler import EXECUTABLE
    from slicewise.compile.programs import build_program
    from slicewise.compile.target import absent_devices
    from slicewise.config import RunConfig
    from slicewise.interop.huggingface import load_spec
    from slicewise.parallel.cluster import by_slice
    from slicewise.parallel.mesh import build_mesh
    from slicewise.train import choices, executable

    cluster = slices.cluster(request["slice"], request["num_slices"])
    config = RunConfig(**request["config"])
    mesh = build_mesh(config, by_slice(absent_devices(cluster)))
    if request["program"] == "restore":
        (directory / "arrays.json").write_text(json.dumps(held_arrays(config, mesh)))
        return
    program = build_program(request["program"], config, mesh)
    with jax.set_mesh(mesh):
        lowered = program.function.lower(*program.abstract_arguments)
    if request["program"] == "update":
        spec = load_spec(config.model.model)
        choices.check_kernels(choices.expected_kernels(config, spec, mesh), lowered.as_text())
    facts = {
        "module": f"jit_{program.function.__name__}",
        "mesh": dict(mesh.shape),
        "devices": [place(device) for device in mesh.devices.flat],
    }
    part = directory / "facts.json.part"
    part.write_text(json.dumps(facts))
    part.replace(directory / "facts.json")  # the process that watches must not read half of it
    compiled = lowered.compile()
    if request["serialize"]:
        (directory / EXECUTABLE).write_bytes(executable.dumps(compiled, config, mesh))


def held_arrays(config: Any, mesh: Any) -> dict[str, Any]:
    """The fields of compile.state_layout's records, for each array of the state."""
    import jax

    from slicewise.train.step import build_train_step

    state = build_train_step(config, mesh).abstract_state
    arrays = [
        held_array(jax.tree_util.keystr(path, simple=True, separator="."), leaf, mesh)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    ]
    return {"arrays": arrays, "hosts": len({d.process_index for d in mesh.devices.flat})}


def held_array(name: str, leaf: Any, mesh: Any) -> dict[str, Any]:
    part = leaf.sharding.shard_shape(leaf.shape)
    parts_of_host: dict[int, set] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        where = tuple((s.start, s.stop) for s in index)
        parts_of_host.setdefault(device.process_index, set()).add(where)
    spec = [*leaf.sharding.spec, *[None] * (len(leaf.shape) - len(leaf.sharding.spec))]
    part_bytes = math.prod(part) * leaf.dtype.itemsize
    parts = math.prod(whole // piece for whole, piece in zip(leaf.shape, part, strict=True) if piece)
    return {
        "name": name,
        "dtype": leaf.dtype.name,
        "shape": leaf.shape,
        "axes": [tuple(a for a in axes_of(dim) if mesh.shape[a] > 1) for dim in spec],
        "part": part,
        "copies": mesh.devices.size // parts,
        "on_host": leaf.sharding.memory_kind == "pinned_host",
        "bytes_": math.prod(leaf.shape) * leaf.dtype.itemsize,
        "part_bytes": part_bytes,
        "host_bytes": part_bytes * max(map(len, parts_of_host.values())),
    }


def axes_of(dim: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if dim is None else (dim,) if isinstance(dim, str) else tuple(dim)


def place(device: Any) -> list[int]:
    """Where a device is: its slice, the coordinates of its chip, its number on the chip."""
    return [int(getattr(device, "slice_index", 0) or 0), *map(int, device.coords), int(device.core_on_chip)]


if __name__ == "__main__":
    main()
