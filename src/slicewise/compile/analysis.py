"""From what the compiler left to what a person asks: does it fit, how long is a step, where does the time go."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from slicewise.compile import hlo
from slicewise.compile.collectives import Layout
from slicewise.compile.compiler import Compiled, Request
from slicewise.compile.hiding import Hiding, hiding
from slicewise.compile.memory import Memory, memory_of
from slicewise.compile.places import places
from slicewise.compile.schedule import COPY, HOST, SPARSECORE, Replay, Totals, replay
from slicewise.compile.work import Describer
from slicewise.costs.adapters import with_adapters
from slicewise.costs.device import Device, device_of
from slicewise.costs.flops import model_flops
from slicewise.costs.shapes import model_shape
from slicewise.costs.step import StepEstimate
from slicewise.errors import ExitCode, UserError
from slicewise.interop.huggingface import load_spec

_WAITS = {HOST: "host copies", COPY: "copies between memories", SPARSECORE: "sparsecore"}


@dataclass(frozen=True)
class Communication:
    """Collectives over one set of mesh axes, of one device and one step."""

    axes: str  # 'fsdp', 'dcn data'
    bytes_: float
    seconds: float
    exposed_s: float

    @property
    def overlapped_s(self) -> float:
        return max(0.0, self.seconds - self.exposed_s)


@dataclass(frozen=True)
class Exposed:
    """Collectives of one kind and place that the core waits for, of one step."""

    op: str
    part: str  # of the model
    of_pass: str
    is_synchronous: bool
    seconds: float

    @property
    def text(self) -> str:
        """Such as 'all-reduce of mlp, backward: synchronous'."""
        why = "synchronous" if self.is_synchronous else "asynchronous, but needed before it ends"
        return f"{self.op} of {self.part}, {self.of_pass}: {why}"


@dataclass(frozen=True)
class CompiledStep:
    """A compiled program, read. ``estimate`` is the record that plan and measurement give too."""

    request: Request
    estimate: StepEstimate
    memory: Memory
    module: hlo.Module
    places: Mapping[str, tuple[str, str]]  # of every instruction, by name: (part of the model, pass)
    replay: Replay
    seconds: Mapping[tuple[str, str], float]  # of the core, by (part of the model, pass)
    communication: tuple[Communication, ...]  # the longest first
    hiding: tuple[Hiding, ...]
    flops: Mapping[str, float]  # of one device, by pass
    cpu_s: float  # that compiling took
    wall_s: float
    peak_rss_bytes: float
    from_cache: bool
    out_of_memory: str | None  # the compiler's message

    @property
    def fits(self) -> bool:
        return self.out_of_memory is None and self.memory.fits

    @property
    def hideable_s(self) -> float:
        """Of the communication, what a schedule of this program could hide (compile/hiding.py)."""
        return sum(h.could_s for h in self.hiding)

    @property
    def hidden_share(self) -> float | None:
        """Of that, what this schedule does hide; None where there is none."""
        return sum(h.hidden_s for h in self.hiding) / self.hideable_s if self.hideable_s else None

    @property
    def exposed(self) -> tuple[Exposed, ...]:
        """The longest first."""
        sums: dict[tuple[str, str, str, bool], float] = {}
        ops = {name: op for h in self.hiding for name, op in h.ops.items()}
        for (name, is_synchronous), seconds in self.replay.totals.waited.items():
            if name in ops:
                key = (ops[name], *self.places[name], is_synchronous)
                sums[key] = sums.get(key, 0.0) + seconds
        found = [Exposed(*key, seconds) for key, seconds in sums.items()]
        return tuple(sorted(found, key=lambda e: -e.seconds))

    @property
    def hardware_utilisation(self) -> float:
        """Share of the bf16 peak spent on all FLOPs of the program, recomputed ones too."""
        peak = self.estimate.peak_flops_per_s / self.estimate.devices
        return sum(self.flops.values()) / (self.estimate.step_time_s * peak)


def analyse(compiled: Compiled) -> CompiledStep:
    """Reads what ``compiled`` holds. Raises ValueError for a dump of an unknown form, UserError for a damaged one."""
    request = compiled.request
    device = device_of(request.cluster.chip)
    try:
        text, buffers, ranges = map(compiled.text, ("scheduled.hlo", "buffers.txt", "live_ranges.txt"))
    except (OSError, EOFError, zlib.error) as e:
        raise UserError(
            f"what is kept of this program in {compiled.directory} is damaged: {e};"
            " delete that folder and ask again.",
            code=ExitCode.INTERNAL,
        ) from e
    module = hlo.parse(text)
    layout = Layout(request.cluster, compiled.facts["mesh"], np.array(compiled.facts["devices"]))
    describe = Describer(layout, device)
    played = replay(module, describe)
    memory = memory_of(module, buffers, ranges, device.hbm_bytes)
    where = places(module, request.program)
    seconds: dict[tuple[str, str], float] = {}
    flops: dict[str, float] = {}
    for (_, name), spent in played.totals.seconds.items():
        seconds[where[name]] = seconds.get(where[name], 0.0) + spent
    for name, done in played.totals.flops.items():
        flops[where[name][1]] = flops.get(where[name][1], 0.0) + done
    return CompiledStep(
        request=request,
        estimate=_estimate(request, device, played, memory, where),
        memory=memory,
        module=module,
        places=where,
        replay=played,
        seconds=seconds,
        communication=_communication(played.totals),
        hiding=hiding(module, describe, played.totals.waited),
        flops={name: done for name, done in flops.items() if done},
        cpu_s=compiled.facts["cpu_s"],
        wall_s=compiled.facts["wall_s"],
        peak_rss_bytes=compiled.facts["peak_rss_bytes"],
        from_cache=compiled.from_cache,
        out_of_memory=compiled.out_of_memory,
    )


def _communication(totals: Totals) -> tuple[Communication, ...]:
    rows = [
        Communication(axes, totals.communication_bytes[axes], spent, totals.exposed.get(axes, 0.0))
        for axes, spent in totals.communication.items()
        if axes not in _WAITS
    ]
    return tuple(sorted(rows, key=lambda c: -c.seconds))


def _estimate(
    request: Request,
    device: Device,
    played: Replay,
    memory: Memory,
    where: Mapping[str, tuple[str, str]],
) -> StepEstimate:
    config, cluster, totals = request.config, request.cluster, played.totals
    shape = with_adapters(model_shape(load_spec(config.model.model)), config.adapters)
    seq, batch = config.data.sequence_length, config.data.global_batch_size
    tokens = {"decode": batch, "init": 0}.get(request.program, batch * seq)
    compute: dict[str, float] = {}
    for (kind, name), spent in totals.seconds.items():
        named = _compute_name(kind, *where[name])
        compute[named] = compute.get(named, 0.0) + spent
    axes = [a for a in totals.communication if a not in _WAITS]
    share = 1.0 if request.program == "update" else 1 / 3  # without a backward pass
    return StepEstimate(
        source="compile",
        step_time_s=played.seconds,
        compute_s=compute,
        exposed_s={a: totals.exposed.get(a, 0.0) for a in axes},
        communication_s={a: totals.communication[a] for a in axes},
        other_s={named: totals.exposed.get(label, 0.0) for label, named in _WAITS.items()},
        hbm_bytes=memory.hbm_bytes,
        host_bytes=memory.host_bytes,
        hbm_limit_bytes=memory.limit_bytes,
        tokens=tokens,
        devices=cluster.devices,
        model_flops=share * model_flops(shape, tokens, seq),
        peak_flops_per_s=device.flops_per_s * cluster.devices,
    )


def _compute_name(kind: str, part: str, of_pass: str) -> str:
    """The name that costs.step gives to this kind of work."""
    if of_pass == "update":
        return "optimizer"
    if part in ("output", "embedding"):
        return "output"
    if kind == "attention":
        return "attention"
    if kind in ("matmul", "grouped matmul"):
        return "matmul"
    return "routing" if part == "experts" else "memory"
