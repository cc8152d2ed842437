"""Every legal way to split a model's training over a cluster, as arrays with one entry a layout."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from slicewise.catalog.slices import Slice
from slicewise.costs import pipeline, torus
from slicewise.costs.batch import BLOCK
from slicewise.costs.device import Device
from slicewise.costs.layout import WEIGHT_AXES, Degrees, Layout, Number, place_degrees
from slicewise.costs.network import Network
from slicewise.costs.shapes import ModelShape

MIN_CONTEXT_TOKENS = 2048  # of a sequence on one device: below it the blocks of attention kernels shrink
MAX_TENSOR = 64
FROM_LATENT = ("query_proj", "key_proj", "value_proj")  # what latents are multiplied by, where there are any
MICROBATCHES = tuple(2**k for k in range(11))  # of one step: accumulated, or in flight through the pipeline


@dataclass(frozen=True)
class Limits:
    """What the model and the batch allow each axis to be."""

    heads: int
    widths: tuple[int, ...]  # dims that the tensor axis divides
    experts: int
    layers: int  # equal ones, or groups of them, that a pipeline divides
    embed: tuple[int, ...]  # dims that fully sharded data parallelism divides, d_model first
    seq: int
    global_batch: int

    def shards(self, ways: Number) -> Number:
        """Whether weights can be divided in ``ways``: with more than one column of d_model a part, as the TPU compiler
        crashes on one (libtpu 0.0.50)."""
        divides = np.logical_and.reduce([dim % ways == 0 for dim in self.embed])
        return divides & ((ways == 1) | (ways < self.embed[0]))

    def allows(self, axis: str, degree: int) -> bool:
        if axis == "tensor":
            divides = all(w % degree == 0 for w in self.widths)
            return degree <= MAX_TENSOR and self.heads % degree == 0 and divides
        if axis == "context":  # two chunks a device balance the causal mask
            return degree == 1 or self.seq % (2 * degree) == 0
        if axis == "expert":
            return self.experts % degree == 0
        if axis == "pipeline":
            return self.layers % degree == 0
        return self.global_batch % degree == 0

    def tries(self, axis: str, degree: int) -> bool:
        """Whether a search looks at the degree, which is allowed: shorter parts of sequences never pay, and attention
        kernels take whole blocks of both chunks of a device."""
        if axis != "context" or degree == 1:
            return True
        return self.seq // degree >= MIN_CONTEXT_TOKENS and self.seq % (2 * BLOCK * degree) == 0


def limits_of(shape: ModelShape, seq: int, global_batch: int) -> Limits:
    """The tensor axis divides the heads of keys (so those of queries) and every hidden width; experts of all sparse
    layers count alike."""
    widths = {m.d_in for layer in shape.layers for m in layer.matmuls if m.sharding == "row"}
    heads = functools.reduce(np.gcd, (layer.attention.kv_heads for layer in shape.layers))
    experts = max(layer.experts if layer.active else 1 for layer in shape.layers)
    into_heads = {m.d_in for layer in shape.layers for m in layer.matmuls if m.name in FROM_LATENT}
    embed = (shape.d_model, *sorted(into_heads - {shape.d_model}))
    return Limits(int(heads), tuple(sorted(widths)), experts, shape.staged_groups, embed, seq, global_batch)


@functools.cache
def divisors(n: int) -> tuple[int, ...]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def factorisations(n: int, axes: tuple[str, ...], limits: Limits) -> Iterator[tuple[int, ...]]:
    """Degrees of ``axes`` whose product is ``n``, each allowed by ``limits`` and worth a try; the batch is checked
    later."""
    if len(axes) == 1:
        if limits.allows(axes[0], n) and limits.tries(axes[0], n):
            yield (n,)
        return
    for degree in divisors(n):
        if limits.allows(axes[0], degree) and limits.tries(axes[0], degree):
            for rest in factorisations(n // degree, axes[1:], limits):
                yield (degree, *rest)


ICI_ORDER = ("tensor", "context", "expert", "pipeline", "fsdp", "data")  # the most constrained first
DCN_AXES = ("pipeline", "fsdp", "data")


DCN_PIPELINES = (1, 2, 4, 8)  # depths tried between slices; deeper ones lose to data replicas by their bubble


@dataclass(frozen=True)
class Table:
    """Layouts as columns. ``ici_id`` names equal ICI degrees, ``twin`` layouts that differ in ``micro``
    only."""

    ici: np.ndarray  # [n, 6] in the order of ICI_ORDER
    dcn: np.ndarray  # [n, 3] in the order of DCN_AXES
    micro: np.ndarray  # [n] microbatches of a step
    repeats: np.ndarray  # [n] rounds of a pipeline
    once: np.ndarray  # [n] whether a pipeline keeps the weights that it gathers
    ici_id: np.ndarray  # [n]
    twin: np.ndarray  # [n]

    def __len__(self) -> int:
        return len(self.micro)

    def take(self, which: np.ndarray) -> "Table":
        return Table(*(column[which] for column in self.columns))

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        return (self.ici, self.dcn, self.micro, self.repeats, self.once, self.ici_id, self.twin)

    @property
    def staged(self) -> np.ndarray:
        """Whether the layout is a pipeline."""
        return self.ici[:, ICI_ORDER.index("pipeline")] * self.dcn[:, DCN_AXES.index("pipeline")] > 1

    def layout(self, global_batch: int) -> Layout:
        """One Layout whose fields are arrays."""
        ici = Degrees(**{axis: self.ici[:, k] for k, axis in enumerate(ICI_ORDER)})
        dcn = Degrees(**{axis: self.dcn[:, k] for k, axis in enumerate(DCN_AXES)})
        staged = self.staged
        steps, parts = np.where(staged, 1, self.micro), np.where(staged, self.micro, 1)
        return Layout(ici, dcn, global_batch, steps, parts, self.repeats, self.once)

    def row(self, k: int, global_batch: int) -> Layout:
        """Layout ``k`` with plain integers."""
        ici = {axis: int(v) for axis, v in zip(ICI_ORDER, self.ici[k], strict=True)}
        dcn = {axis: int(v) for axis, v in zip(DCN_AXES, self.dcn[k], strict=True)}
        micro = int(self.micro[k])
        staged = bool(self.staged[k])
        steps, parts = (1, micro) if staged else (micro, 1)
        return Layout(
            Degrees(**ici),
            Degrees(**dcn),
            global_batch,
            steps,
            parts,
            int(self.repeats[k]),
            bool(self.once[k]),
        )


@functools.lru_cache(maxsize=64)
def ici_rows(devices: int, limits: Limits) -> np.ndarray:
    """Degrees [n, 6] of every way to split a slice of ``devices``."""
    rows = list(factorisations(devices, ICI_ORDER, limits))
    return np.array(rows, dtype=np.int64).reshape(-1, len(ICI_ORDER))


def dcn_rows(num_slices: int, limits: Limits, *, fsdp: bool) -> np.ndarray:
    """Degrees [n, 3] of every way to split the slices: those with an FSDP axis, or those without.

    Tensor, context and expert axes stay inside a slice: what they move per token is too much for the network.
    """
    rows = [
        row
        for row in factorisations(num_slices, DCN_AXES, limits)
        if row[0] in DCN_PIPELINES and (row[1] > 1) == fsdp
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, len(DCN_AXES))


def combine(ici: np.ndarray, ids: np.ndarray, dcn: np.ndarray, limits: Limits) -> Table:
    """Every pair of ``ici`` (named ``ids``) and ``dcn`` rows whose data shards get whole sequences, with
    every count of microbatches (a power of two, of a pipeline times its stages) that leaves whole sequences.

    A pipeline makes as many rounds as costs.pipeline.rounds says. Where weights are sharded, one that gathers them
    once a step and one that does so for each microbatch are two layouts.
    """
    batch = limits.global_batch
    shards = ici[:, [ICI_ORDER.index(a) for a in ("data", "fsdp", "expert")]].prod(1)[:, None] * dcn[
        None, :, 1:
    ].prod(2)
    stages = ici[:, ICI_ORDER.index("pipeline")][:, None] * dcn[None, :, 0]
    ways = ici[:, [ICI_ORDER.index(a) for a in WEIGHT_AXES]].prod(1)[:, None] * dcn[None, :, :2].prod(2)
    a, b = np.nonzero((batch % shards == 0) & (limits.layers % stages == 0) & limits.shards(ways))
    sequences = batch // shards[a, b]
    micro = np.array(MICROBATCHES)[None, :] * stages[a, b][:, None]
    pair, step = np.nonzero(sequences[:, None] % micro == 0)
    gathers = ici[:, [ICI_ORDER.index(a) for a in ("fsdp", "expert", "context")]].prod(1)[a] * dcn[b, 1]
    spread = (stages[a, b] > 1) & (gathers > 1)
    again = np.flatnonzero(spread[pair])
    once = np.concatenate([np.ones(len(pair), bool), np.zeros(len(again), bool)])
    pair, step = np.concatenate([pair, pair[again]]), np.concatenate([step, step[again]])
    micro, depth = micro[pair, step], stages[a, b][pair]
    return Table(ici[a[pair]], dcn[b[pair]], micro, _rounds(depth, micro, limits), once, ids[a[pair]], pair)


def _rounds(stages: np.ndarray, micro: np.ndarray, limits: Limits) -> np.ndarray:
    """Of every layout; 1 where it is no pipeline."""
    found = np.ones(len(stages), dtype=np.int64)
    for depth, count in {*zip(stages.tolist(), micro.tolist(), strict=True)}:
        if depth > 1:
            found[(stages == depth) & (micro == count)] = pipeline.rounds(depth, count, limits.layers)
    return found


def joined(first: Table, second: Table) -> Table:
    """Both tables as one."""
    offset = int(first.twin.max()) + 1 if len(first) else 0
    second = replace(second, twin=second.twin + offset)
    return Table(*(np.concatenate(pair) for pair in zip(first.columns, second.columns, strict=True)))


@dataclass(frozen=True)
class Placements:
    """Where each row of ICI degrees lands on a slice: per row and axis (order of `torus.ORDER`)."""

    links: np.ndarray
    hops: np.ndarray
    joins: np.ndarray
    legal: np.ndarray  # rows that the slice can hold

    def network(self, ids: np.ndarray, device: Device) -> Network:
        """The links of layouts whose ICI rows are ``ids``, as arrays."""
        columns = [
            dict(zip(torus.ORDER, values[ids].T, strict=True))
            for values in (self.links, self.hops, self.joins)
        ]
        return Network(device, *columns)


@functools.lru_cache(maxsize=64)
def placed_rows(slice_: Slice, limits: Limits) -> tuple[np.ndarray, Placements]:
    """The rows of a slice and where each lands: a free search asks again for every number of slices."""
    ici = ici_rows(slice_.devices, limits)
    return ici, placements(ici, slice_)


def placements(ici: np.ndarray, slice_: Slice) -> Placements:
    """Lays every row of ``ici`` out on ``slice_``."""
    links, hops = np.ones(ici.shape), np.ones(ici.shape)
    joins = np.zeros(ici.shape, dtype=bool)
    legal = np.ones(len(ici), dtype=bool)
    order = [ICI_ORDER.index(axis) for axis in torus.ORDER]
    for k, degrees in enumerate(ici[:, order].tolist()):
        placed = place_degrees(slice_, tuple(degrees))
        if placed is None:
            legal[k] = False
            continue
        links[k] = [a.links for a in placed]
        hops[k] = [a.hops for a in placed]
        joins[k] = [a.crosses_core for a in placed]
    return Placements(links, hops, joins, legal)
