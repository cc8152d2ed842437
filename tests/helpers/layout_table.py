"""The table of layouts that tests/train/test_layouts.py runs: made from the planner's own rules, without JAX.

A layout is a model, one to three axes, and the options below. Legal is what the planner's check allows.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from slicewise.catalog import slices
from slicewise.catalog.model import Experts, LatentAttention, ModelSpec
from slicewise.costs.layout import AXES, CONTEXT_EXCHANGES, Degrees, Layout, Recipe
from slicewise.costs.pipeline import settled
from slicewise.costs.shapes import model_shape
from slicewise.errors import UserError
from slicewise.plan.check import check_layout, check_recipe

ROWS, TOKENS, DEVICES = 16, 16, 8
LATENT = LatentAttention(kv_lora_rank=16, q_lora_rank=24, nope_head_dim=8, rope_head_dim=4, v_head_dim=8)
MODELS = (
    ModelSpec(
        name="dense", source="test", layers=4, d_model=32, heads=16, kv_heads=8, head_dim=2, d_ff=64, vocab=96,
        sliding_window=6, global_every=2, attention_sinks=True, attention_softcap=3.0, position="learned",
        max_context=16,
    ),
    ModelSpec(
        name="moe", source="test", layers=4, d_model=32, heads=16, kv_heads=8, head_dim=2, d_ff=64, vocab=96,
        experts=Experts(experts=8, per_token=2, d_ff=16),
    ),
    ModelSpec(
        name="mla", source="test", layers=4, d_model=32, heads=8, kv_heads=8, head_dim=12, d_ff=64, vocab=96,
        latent_attention=LATENT, prediction_layers=1,
    ),
    ModelSpec(  # the covering table has it where the expert axis is and no token is dropped, else the one above
        name="mla-moe", source="test", layers=5, d_model=32, heads=8, kv_heads=8, head_dim=12, d_ff=64, vocab=96,
        latent_attention=LATENT,
        experts=Experts(
            experts=8, per_token=3, d_ff=16, shared_d_ff=16, first_dense_layers=1, score="sigmoid",
            score_scale=2.5, groups=4, groups_per_token=2, balancing_bias=True,
        ),
    ),
)  # fmt: skip
# Options: what only rows with a certain axis, or only mixtures of experts have is "" in the others.
STRATEGIES = CONTEXT_EXCHANGES
SCHEDULES = ("gpipe", "circular")
GATHERS = ("step", "microbatch")
# Tight is dropless as well, in parts that are too small for one exchange.
FACTORS = {"dropless": 1.25, "tight": 0.5, "capacity": 1.0}
DISPATCHES = tuple(FACTORS)


@dataclass(frozen=True)
class Row:
    spec: ModelSpec
    axes: tuple[str, ...]
    strategy: str = ""
    schedule: str = ""
    gather: str = ""
    dispatch: str = ""
    steps: int = 1  # of gradient accumulation
    across: str = ""  # the axis that two slices divide as well; "" = there is one slice

    @property
    def family(self) -> str:
        """The kind of model: dense, moe or mla."""
        return self.spec.name.partition("-")[0]

    @property
    def options(self) -> tuple[str, ...]:
        accumulation = "accumulated" if self.steps > 1 else "at once"
        found = (self.strategy, self.schedule, self.gather, self.dispatch, accumulation)
        return tuple(option for option in found if option)

    @property
    def name(self) -> str:
        ici, dcn = self.degrees
        axes = [f"{axis}{ici[axis]}" + f"x{dcn.get(axis, 1)}" * (axis in dcn) for axis in self.axes]
        options = [option for option in self.options if option != "at once"]
        return "-".join([self.spec.name, *axes, *options])

    @functools.cached_property
    def cost(self) -> float:
        """About that of compiling it, relative to a dense model on one device."""
        model = {"dense": 1, "moe": 1.8, "mla": 2.1, "mla-moe": 2.8}[self.spec.name]
        options = {"gpipe": 0.45, "circular": 0.75, "all_gather": 0.3, "ulysses": 0.3, "ring": 1.1}
        extra = sum(options.get(option, 0) for option in self.options)
        return model * (1 + extra + 0.3 * (self.steps > 1) + 0.4 * ("expert" in self.axes))

    @functools.cached_property
    def degrees(self) -> tuple[dict[str, int], dict[str, int]]:
        """Over ICI and over DCN: of the splits of most devices the first that the planner allows."""
        return self._over_networks(next((s for s in self._splits() if not self._refused(s)), self._smallest))

    @property
    def refusal(self) -> str:
        """What the planner says against the row, whatever its degrees; "" where it is legal."""
        return "" if any(not self._refused(s) for s in self._splits()) else self._refused(self._smallest)

    @property
    def keys(self) -> dict[str, Any]:
        """Of a run's config."""
        found = {f"{n}_{a}_parallelism": 1 for n in ("ici", "dcn") for a in AXES}
        for network, degrees in zip(("ici", "dcn"), self.degrees, strict=True):
            found |= {f"{network}_{axis}_parallelism": degree for axis, degree in degrees.items()}
        found |= {"context_strategy": self.strategy} if self.strategy else {}
        found |= {"pipeline_gather": self.gather, "pipeline_repeats": self._repeats} if self.schedule else {}
        if self.dispatch:
            kind = "capacity" if self.dispatch == "capacity" else "dropless"
            found |= {"moe_dispatch": kind, "capacity_factor": FACTORS[self.dispatch]}
        found |= {"gradient_accumulation_steps": self.steps, "compute_dtype": "float32"}
        return found | {"global_batch_size": ROWS, "sequence_length": TOKENS}

    @property
    def _repeats(self) -> int:
        return 2 if self.schedule == "circular" else 1

    @property
    def _smallest(self) -> tuple[int, ...]:
        return (2,) * len(self.axes)

    def _splits(self) -> list[tuple[int, ...]]:
        # The rounds of a ring are unrolled: in many the compiler would spend most of the time.
        degrees = (4, 2) if self.strategy == "ring" else (4, 2, 8)
        every = [s for s in itertools.product(degrees, repeat=len(self.axes)) if math.prod(s) <= DEVICES]
        return sorted(every, key=math.prod, reverse=True)

    def _over_networks(self, split: tuple[int, ...]) -> tuple[dict[str, int], dict[str, int]]:
        ici = dict(zip(self.axes, split, strict=True))
        if not self.across:
            return ici, {}
        return ici | {self.across: ici[self.across] // 2}, {self.across: 2}

    def _refused(self, split: tuple[int, ...]) -> str:
        return _refused(replace(self, across=""), split)


@functools.cache
def _refused(row: Row, split: tuple[int, ...]) -> str:
    degrees = Degrees(**dict(zip(row.axes, split, strict=True)))
    layout, shape = Layout(degrees, Degrees(), ROWS, row.steps), model_shape(row.spec)
    factor = FACTORS["capacity"] if row.dispatch == "capacity" else None
    recipe = Recipe(context_exchange=row.strategy or "all_gather", expert_capacity_factor=factor)
    try:
        parts = settled(
            row.spec.name, row.spec.staged_groups, stages=degrees.pipeline, batch=ROWS, steps=row.steps, asked=0,
            shards=layout.data_shards // degrees.context, repeats=row._repeats,
        )  # fmt: skip
        layout = replace(layout, pipeline_microbatches=parts, pipeline_repeats=row._repeats)
        check_layout(shape, slices.cluster("v5e-8", 1), layout, TOKENS)
        check_recipe(shape, layout, recipe, TOKENS)
    except UserError as e:
        return str(e)
    return ""


def of_axes(spec: ModelSpec, axes: tuple[str, ...]) -> Iterator[Row]:
    """The rows of one model and these axes: every combination of options."""
    of_context = STRATEGIES if "context" in axes else ("",)
    schedules = SCHEDULES if "pipeline" in axes else ("",)
    gathers = GATHERS if "pipeline" in axes else ("",)
    dispatches = DISPATCHES if spec.experts else ("",)
    options = (of_context, schedules, gathers, dispatches, (1, 2), ("", *axes))
    return (Row(spec, axes, *values) for values in itertools.product(*options))


@functools.cache
def every_row(most_axes: int) -> tuple[Row, ...]:
    """Of all models, for one to ``most_axes`` axes; legal or not."""
    return tuple(
        row
        for spec in MODELS
        for count in range(1, most_axes + 1)
        for axes in itertools.combinations(AXES, count)
        for row in of_axes(spec, axes)
    )


def full_table() -> tuple[Row, ...]:
    """Every axis alone and every pairing with every combination of options; dispatches and, of a pairing, the axis
    over DCN take turns."""
    found: dict[Any, list[Row]] = {}
    for row in every_row(2):
        if not row.refusal:
            found.setdefault(replace(row, dispatch="", across="dcn" if row.across else ""), []).append(row)
    return tuple(rows[k % len(rows)] for k, rows in enumerate(found.values()))


def needs(row: Row) -> set[tuple[str, ...]]:
    """What a table that has this row no longer lacks: with this kind of model each axis alone, and each pairing; and
    each option with this kind of model and with each axis."""
    model = row.family
    found: set[tuple[str, ...]] = {(model, *pair) for pair in itertools.combinations(row.axes, 2)}
    if len(row.axes) == 1:
        found.add((model, *row.axes, "alone"))
    found |= {*itertools.product((model, *row.axes), row.options)}
    found |= {(axis, "dcn" if axis == row.across else "ici") for axis in row.axes}
    return found | {(model, "dcn" if row.across else "ici")}


@functools.cache
def covering_table() -> tuple[Row, ...]:
    """Few legal rows that lack nothing that any legal row has: one that adds much, and compiles fast, goes first."""
    few = (row for row in every_row(3) if row.spec.name != "mla-moe" or row.dispatch != "capacity")
    few = (row for row in few if row.spec.name != "mla-moe" or "expert" in row.axes)
    left = {row: needs(row) for row in few if not row.refusal}
    chosen: list[Row] = []
    while left:
        best = max(left, key=lambda row: len(left[row]) / row.cost**0.5)
        added = left[best]
        chosen.append(best)
        left = {row: lacking - added for row, lacking in left.items() if lacking - added}
    return tuple(chosen)


def pairings(rows: Iterable[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Every axis, and every two axes, that some row has."""
    return {pair for axes in rows for n in (1, 2) for pair in itertools.combinations(sorted(axes), n)}
