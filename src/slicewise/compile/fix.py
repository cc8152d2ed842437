"""The cheapest change that makes a step fit: proposed by the planner's prices, proved by compiling it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from slicewise.catalog.slices import Cluster
from slicewise.compile.analysis import CompiledStep, analyse
from slicewise.compile.compiler import CompileFailed, Request, compile_request
from slicewise.config import RunConfig, with_overrides
from slicewise.costs.shapes import model_shape
from slicewise.errors import ExitCode, UserError
from slicewise.interop.huggingface import load_spec
from slicewise.plan.run_config import priced

REMAT = ("save_dot_with_context_except_mlp", "save_qkv_proj", "save_out_proj", "full")
OFFLOADED = '{decoder_layer_input = "offload"}'


@dataclass(frozen=True)
class Fix:
    """Keys to change, as overrides, and what the change is expected to cost."""

    overrides: tuple[str, ...]
    planned_s: float
    step: CompiledStep | None = None  # once compiled
    problem: str = ""  # why it was not

    @property
    def fits(self) -> bool:
        return self.step is not None and self.step.fits


def proposals(config: RunConfig, cluster: Cluster) -> list[Fix]:
    """Single changes of ``config`` that the planner expects to lower memory, the fastest step first.

    Remat policies that keep less, layer inputs on the host, gradients in parts of the batch, optimiser state in few
    bits or on the host, and more sharding of the parameters. The global batch stays what it is.
    """
    shape = model_shape(load_spec(config.model.model))
    now = priced(config, shape, cluster).estimate
    nowhere = ("remat_tensors={}",) if config.model.remat_tensors else ()
    changes: list[tuple[str, ...]] = [(f"remat_policy={name}", *nowhere) for name in REMAT]
    changes.append(("remat_policy=custom", f"remat_tensors={OFFLOADED}"))
    steps = config.optimizer.gradient_accumulation_steps
    changes += [(f"gradient_accumulation_steps={steps * n}",) for n in (2, 4, 8)]
    changes += [
        ("remat_policy=full", *nowhere, f"gradient_accumulation_steps={steps * n}") for n in (2, 4, 8)
    ]
    changes += [("optimizer_state_dtype=bfloat16",), ("optimizer_state_memory=host",)]
    if config.parallelism.ici_data_parallelism != 1:
        changes.append(("ici_data_parallelism=1", "ici_fsdp_parallelism=-1"))
    found = []
    for change in changes:
        try:
            changed = with_overrides(config, change)
            estimate = priced(changed, shape, cluster).estimate
        except UserError:
            continue
        if changed != config and estimate.hbm_total_bytes < now.hbm_total_bytes:
            found.append(Fix(change, estimate.step_time_s))
    return sorted(found, key=lambda f: f.planned_s)


def fixed(
    config: RunConfig,
    cluster: Cluster,
    *,
    tried: Callable[[Fix], None] = lambda fix: None,
    timeout_s: float = 3600.0,
    memory_limit_bytes: float | None = None,
) -> Fix | None:
    """The first of ``proposals`` that fits when it is compiled; None when none of them does."""
    for fix in proposals(config, cluster):
        request = Request(with_overrides(config, fix.overrides), cluster)
        try:
            limits = {"timeout_s": timeout_s, "memory_limit_bytes": memory_limit_bytes}
            step = analyse(compile_request(request, **limits))  # type: ignore[arg-type]
        except UserError as e:
            if e.code != ExitCode.USER and not isinstance(e, CompileFailed):
                raise  # this machine's fault, and so every change's
            tried(replace(fix, problem=str(e).splitlines()[0]))
            continue
        done = Fix(fix.overrides, fix.planned_s, step)
        tried(done)
        if done.fits:
            return done
    return None
