"""What each instruction of a scheduled program occupies, and for how long: the replay's view of one."""

import re
from dataclasses import dataclass, replace

from slicewise.compile import cost
from slicewise.compile.collectives import OPS, Collective, Layout, collective, first_group, of_group
from slicewise.compile.hlo import HOST, Array, Computation, Instruction, Module
from slicewise.compile.schedule import COPY, DCN, FROM_HOST, SPARSECORE, TO_HOST, Work, is_start
from slicewise.compile.schedule import HOST as HOST_COPIES
from slicewise.costs.device import Device

_DCN_PAIR = re.compile(r"\{(\d+)\d{5}->(\d+)\d{5}\}")  # slices from 1, and devices within them
_DCN_OPS = {
    "ALL_REDUCE": "all-reduce", "REDUCE_SCATTER": "reduce-scatter", "ALL_GATHER": "all-gather",
    "ALL_TO_ALL": "all-to-all", "ONE_TO_ONE": "collective-permute", "PERMUTE": "collective-permute",
}  # fmt: skip
_DCN_ROUNDS = {"ALL_REDUCE": 2}  # of (n-1)/n of what enters; others one


@dataclass(frozen=True)
class Describer:
    """Callable as schedule.Describe, for programs of one layout."""

    layout: Layout
    device: Device

    def __call__(self, module: Module, computation: Computation, i: Instruction) -> Work | None:
        if i.opcode in cost.FREE:
            return None
        if i.opcode in ("send", "recv"):
            return self._dcn(computation, i)
        if i.opcode == "async-start":
            return self._async(module, computation, i, i, i.operands) if i.operands else None
        if i.opcode == "async-update":
            start = computation.instructions[i.operands[0]]
            return self._async(module, computation, i, start, i.operands[1:])
        if i.opcode.startswith("copy-start"):
            return self._copy(i, is_start=True)
        if i.opcode.startswith(OPS):
            return _work(collective(i, _bytes(computation, i.operands), self.layout, self.device), i)
        if i.opcode == "fusion" and (inner := self._fused_collective(module, i)):
            return inner
        if i.opcode == "copy" and _crosses_to_host(i.shape, computation, i):
            return self._copy(i, is_start=False)
        price = cost.op_cost(module, computation, i, self.device)
        if price.seconds == 0:
            return None
        return Work(
            price.kind, price.seconds, flops=price.flops, bytes_=price.hbm_bytes, estimated=price.estimated
        )

    def _fused_collective(self, module: Module, i: Instruction) -> Work | None:
        """A fusion that starts a collective, or that is one: an all-reduce of which a device keeps its part."""
        if "kCustom" not in i.attributes:
            return None
        inner = module.computations[i.called[0]]
        found = next((j for j in inner.instructions.values() if j.opcode in OPS), None)
        if found is None:
            return None
        if not is_start(module, i) and any(
            j.opcode in ("convolution", "dot", "fusion") for j in inner.instructions.values()
        ):
            return None  # a product that carries a collective on
        entering = sum(a.bytes for name in found.operands for a in inner.shape_of(name))
        known = collective(found, entering, self.layout, self.device)
        if found.opcode == "all-reduce" and not is_start(module, i):
            kept = sum(a.bytes for a in i.shape)
            if kept * 1.5 < entering:
                known = of_group("reduce-scatter", first_group(found), entering, self.layout, self.device)
        return _work(known, i, starts=is_start(module, i))

    def _async(
        self,
        module: Module,
        computation: Computation,
        i: Instruction,
        start: Instruction,
        operands: tuple[str, ...],
    ) -> Work:
        """Something on another unit: a collective or a gather on the SparseCores, a copy to or from a memory."""
        inner = module.computations[start.called[0]]
        offloaded = "sparsecore" in start.attribute("async_execution_thread")
        entering = sum(a.bytes for name in operands for a in computation.shape_of(name)) or sum(
            a.bytes for p in inner.parameters for a in p.shape
        )
        found = _collective_in(module, inner)
        if found is not None:
            work = _work(collective(found, entering, self.layout, self.device), i, starts=True)
            return _with(work, SPARSECORE) if offloaded else work
        made = inner.root.shape
        moved = _moved(inner, made, entering)
        if any(a.space == HOST for a in (*made, *(a for p in inner.parameters for a in p.shape), *i.shape)):
            return self._host(moved, to=any(a.space == HOST for a in made))
        if offloaded:
            seconds = 2 * moved / (self.device.hbm_bytes_per_s * self.device.kernels.gather_efficiency)
            return Work("offloaded", seconds, (SPARSECORE,), "sparsecore", moved, is_start=True)
        return Work("copy", moved / self._hbm_bytes_per_s, (COPY,), "copies", moved, is_start=True)

    def _copy(self, i: Instruction, *, is_start: bool) -> Work:
        moved = i.shape[0].bytes
        if any(a.space == HOST for a in i.shape):
            work = self._host(moved, to=i.shape[0].space == HOST)
            return replace(work, is_start=is_start)
        return Work("copy", moved / self._hbm_bytes_per_s, (COPY,), "copies", moved, is_start=True)

    @property
    def _hbm_bytes_per_s(self) -> float:
        return self.device.hbm_bytes_per_s * cost.rates()[self.device.name].hbm_efficiency

    def _host(self, moved: float, *, to: bool) -> Work:
        link = TO_HOST if to else FROM_HOST
        rate = cost.rates()[self.device.name].host_bytes_per_s or self.device.host_bytes_per_s
        seconds = moved / rate
        return Work("host copy", seconds, (link,), HOST_COPIES, moved, is_start=True)

    def _dcn(self, computation: Computation, i: Instruction) -> Work:
        """A transfer of the multislice runtime. What leaves counts; a receipt ends with what was sent before it."""
        if i.opcode == "recv":
            return Work("collective", 0.0, (DCN,), self._dcn_label(i), 0.0, is_start=True)
        kind = (re.search(r'_xla_megascale_transfer_type="(\w+)"', i.attributes) or ["", ""])[1]
        slices = self.layout.cluster.num_slices
        moved = i.shape[0].bytes * _DCN_ROUNDS.get(kind, 1) * (slices - 1) / slices
        if kind in ("ALL_GATHER", "ONE_TO_ONE", "PERMUTE"):
            moved = i.shape[0].bytes * (slices - 1 if kind == "ALL_GATHER" else 1)
        seconds = moved / self.device.dcn_bytes_per_s
        op = _DCN_OPS.get(kind, "all-reduce")
        return Work("collective", seconds, (DCN,), self._dcn_label(i), moved, is_start=True, op=op)

    def _dcn_label(self, i: Instruction) -> str:
        """The mesh axes that join slices, of a transfer from one to one those that join the two. It names slices, and
        not partitions."""
        crossing = _first_of_each_slice(self.layout)
        pairs = [(int(a) - 1, int(b) - 1) for a, b in _DCN_PAIR.findall(i.attributes)]
        if "ONE_TO_ONE" in i.attributes and (apart := [pair for pair in pairs if pair[0] != pair[1]]):
            crossing = [crossing[slice_] for slice_ in apart[0]]
        return f"dcn {' x '.join(self.layout.axes(crossing)) or 'data'}"


def _first_of_each_slice(layout: Layout) -> list[int]:
    """The partitions at one place of every slice."""
    place = layout.places[0, 1:]
    same = (layout.places[:, 1:] == place).all(axis=1)
    return [int(p) for p in same.nonzero()[0]]


def _moved(inner: Computation, made: tuple[Array, ...], entering: float) -> float:
    """Bytes that a copy moves: an update, a slice, or all."""
    root = inner.root
    if root.opcode == "dynamic-update-slice":
        return sum(a.bytes for a in inner.shape_of(root.operands[1]))
    return min(entering, sum(a.bytes for a in made)) or entering


def _collective_in(module: Module, computation: Computation) -> Instruction | None:
    for j in computation.instructions.values():
        if j.opcode.startswith(OPS):
            return j
        for name in j.called:
            if name in module.computations and (found := _collective_in(module, module.computations[name])):
                return found
    return None


def _work(known: Collective, i: Instruction, *, starts: bool | None = None) -> Work:
    begins = i.opcode.endswith("-start") if starts is None else starts
    return Work(
        "collective", known.seconds, known.resources, known.label, known.bytes_, is_start=begins, op=known.op
    )


def _with(work: Work, resource: str) -> Work:
    return replace(work, resources=(*work.resources, resource))


def _bytes(computation: Computation, names: tuple[str, ...]) -> float:
    return sum(a.bytes for name in names for a in computation.shape_of(name))


def _crosses_to_host(shape: tuple[Array, ...], computation: Computation, i: Instruction) -> bool:
    return any(
        a.space == HOST for a in (*shape, *(a for name in i.operands for a in computation.shape_of(name)))
    )
