"""Records as text for a terminal: a table for what is compared, lines for what is explained."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from slicewise.costs.units import count, duration, quantity
from slicewise.report.console import say

if TYPE_CHECKING:
    from slicewise.plan.goodput_plan import GoodputPlan
    from slicewise.plan.serving import Plan as ServingPlan
    from slicewise.plan.sharded_matmul import ShardedMatmul


class Plain(Table):
    """Shows each cell as it is: no brackets are taken for markup, such as those of 'slicewise[compile]'."""

    def add_row(self, *cells: RenderableType | None, **how: Any) -> None:
        super().add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), **how)


def table(*columns: str, words: int = 1) -> Table:
    """A plain table; the first ``words`` columns hold words, the others numbers."""
    made = Plain(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for k, column in enumerate(columns):
        made.add_column(column, justify="left" if k < words else "right", no_wrap=k >= words)
    return made


def lines(out: Console, texts: Sequence[str]) -> None:
    """The first line is the heading."""
    for k, text in enumerate(texts):
        say(out, text, "bold" if k == 0 else "")


def sharded_matmul(out: Console, record: "ShardedMatmul", shown: int = 8) -> None:
    heading, *explained = record.explain(shown=0)
    say(out, heading, "bold")
    made = table("strategy", "sent", "math", "collectives", "overlapped", "not overlapped")
    for s in record.strategies[:shown]:
        times = (s.time.math_s, s.time.comms_s, s.time.lower_s, s.time.upper_s)
        made.add_row(s.name, quantity(s.comms_bytes, "B"), *map(duration, times))
    out.print(made)
    lines(out, ["", *explained])


def serving(out: Console, plan: "ServingPlan") -> None:
    lines(out, plan.reasons())
    say(out, "")
    made = table("slice", "topology", "weights, cache", "batch", "a token", "tokens/s a chip", "bound by",
                 "memory", "per M tokens", words=3)  # fmt: skip
    for p in plan.frontier:
        price = p.price_per_million_tokens
        limit = p.slice.chips * p.slice.chip.usable_hbm_bytes
        q = p.quantization
        made.add_row(
            p.slice.accelerator_type,
            p.slice.name,
            f"{q.weights}, {q.cache}",
            str(p.batch),
            duration(p.step_s),
            count(p.tokens_per_s_per_chip),
            p.bound,
            f"{p.used_bytes / limit:.0%}",
            quantity(price) if price is not None else "-",
            style="bold" if p is plan.best else None,
        )
    say(out, "Points that no other beats in both latency and tokens a chip:")
    out.print(made)


def goodput(out: Console, plan: "GoodputPlan") -> None:
    lines(out, plan.explain())
    if not plan.offers:
        return
    say(out, "")
    made = table("offer", "a chip-hour", "interruptions/day", "checkpoint every", "goodput", "wall time",
                 "cost", "a useful chip-hour")  # fmt: skip
    for r in plan.offers:
        made.add_row(
            r.offer.name,
            f"{r.offer.price_per_chip_hour:g}",
            f"{r.goodput.failures_per_day:.3g}",
            duration(r.goodput.interval_s),
            f"{r.goodput.goodput:.1%}",
            duration(r.wall_s),
            f"{r.price:,.0f}",
            quantity(r.price_per_useful_chip_hour),
        )
    out.print(made)
