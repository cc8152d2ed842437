"""The pages of --html: a training plan, a serving plan, a goodput plan."""

from collections.abc import Sequence
from itertools import groupby

from slicewise.costs.device import device_of
from slicewise.costs.units import count, duration, quantity
from slicewise.plan import goodput_plan
from slicewise.plan.goodput_plan import GoodputPlan
from slicewise.plan.operations import Operation, operations
from slicewise.plan.search import Candidate
from slicewise.plan.serving import Plan as ServingPlan
from slicewise.plan.serving_point import MEMORY_SHARE
from slicewise.plan.training import ScalingPoint, TrainingPlan
from slicewise.report import charts
from slicewise.report import training as words
from slicewise.report.page import Card, Chart, Grid, Point, Prose, Tile, render

GIB = 2**30
BARS = 5  # layouts in the step-time chart
ROWS = 20
DOTS = 9


def training(plan: TrainingPlan, curve: Sequence[ScalingPoint] = (), *, now: Candidate | None = None) -> str:
    """The page of a training plan and its scaling; ``now`` is what a config asks for, shown beside it."""
    r, best = plan.result, plan.best
    w, c = r.workload, r.cluster
    e = best.estimate
    tiles = [
        Tile(duration(e.step_time_s), "a step"),
        Tile(quantity(e.tokens_per_s), "tokens/s"),
        Tile(f"{e.mfu:.1%}", "of peak (MFU)"),
        Tile(f"{e.hbm_total_bytes / GIB:.1f} GiB", f"a device, of {e.hbm_limit_bytes / GIB:.1f}"),
    ]
    run_s, cost = plan.run_s(best), plan.cost(best)
    if run_s is not None:
        tiles.append(Tile(duration(run_s), f"for {quantity(plan.run_tokens or 0)} tokens"))
    if cost is not None:
        tiles.append(Tile(f"{cost:,.0f}", f"at {c.chip.price_per_chip_hour:g} a chip-hour"))
    cards: list[Card] = [_steps(plan, now), _memory(plan), _roofline(plan)]
    if len(curve) > 1:
        cards.append(_scaling(plan, curve))
    if len([o for o in plan.offers if o.cost is not None]) > 1:
        cards.append(_offers(plan))
    cards += [_ranking(plan), _parts(plan, now), _why(plan)]
    return render(
        f"{w.shape.name} on {words.place(c)}",
        f"{count(c.chips)} chips, {count(w.tokens)} tokens a step in {count(w.global_batch)} sequences of"
        f" {count(w.seq)}. {count(r.considered)} layouts and recipes priced, {count(r.fitting)} fit.",
        tiles,
        cards,
    )


def _steps(plan: TrainingPlan, now: Candidate | None) -> Chart:
    shown = [(f"#{k}  {_mesh(c)}", c) for k, c in enumerate(plan.result.ranked[:BARS], 1)]
    if now is not None:
        shown.insert(0, (f"config  {_mesh(now)}", now))
    estimates = [c.estimate for _, c in shown]
    scale, unit = words.time_unit(estimates)
    figure = charts.step_bars(
        [name for name, _ in shown],
        [{name: value / scale for name, value in words.step_parts(e).items()} for e in estimates],
        [f"{duration(e.step_time_s)}, {e.mfu:.1%}" for e in estimates],
        unit=unit,
    )
    note = "Blue computes, orange is communication that compute does not hide, grey waits. MFU at the end."
    return Chart("Where a step goes", note, figure, wide=True)


def _mesh(c: Candidate) -> str:
    dcn = words.axes(c.layout.dcn)
    return words.axes(c.layout.ici) + (f"  |  {dcn}" if c.cluster.num_slices > 1 else "")


def _memory(plan: TrainingPlan) -> Chart:
    e = plan.best.estimate
    figure = charts.memory_waterfall(
        e.hbm_bytes, e.hbm_limit_bytes, (1 - plan.result.margin) * e.hbm_limit_bytes
    )
    note = f"Of the first choice at its peak; remat {words.recipe(plan.best)}."
    if e.host_bytes:
        note += f" Another {e.host_bytes / GIB:.1f} GiB a device lie on the host."
    return Chart("Device memory", note, figure)


def _roofline(plan: TrainingPlan) -> Chart:
    device = device_of(plan.best.cluster.chip)
    peak = device.peak_flops_per_s(plan.best.recipe.precision)
    points = merged(operations(plan.result.workload, plan.best))
    figure = charts.roofline(points, peak, device.hbm_bytes_per_s)
    note = (
        "Forward products of one microbatch on one device, as the cost model expects them;"
        " area and %: of their time."
    )
    return Chart("Roofline", note, figure)


def merged(every: tuple[Operation, ...]) -> list[tuple[str, float, float, float]]:
    """(name, intensity, FLOP/s, share), the largest first; products of one shape are one point, named after
    the first of them. At most DOTS, for the rest takes hardly any time."""

    def key(o: Operation) -> tuple[float, int]:
        return round(o.intensity, 6), round(o.flops)

    points = []
    for _, group in groupby(sorted(every, key=key), key):
        same = list(group)
        name = same[0].name if len(same) == 1 else f"{same[0].name} + {len(same) - 1}"
        points.append((name, same[0].intensity, same[0].flops_per_s, sum(o.share for o in same)))
    return sorted(points, key=lambda p: -p[3])[:DOTS]


def _scaling(plan: TrainingPlan, curve: Sequence[ScalingPoint]) -> Chart:
    n = plan.result.cluster.num_slices
    figure = charts.scaling(
        [p.num_slices for p in curve],
        [p.candidate.estimate.tokens_per_s for p in curve],
        [p.candidate.estimate.mfu for p in curve],
        n,
    )
    note = (
        f"The best layout on each number of {plan.result.cluster.slice.name} slices; the global batch stays."
    )
    return Chart("Scaling over slices", note, figure)


def _offers(plan: TrainingPlan) -> Chart:
    points = [
        (words.place(o.candidate.cluster), o.run_s / 86400, o.cost)
        for o in plan.offers
        if o.cost is not None
    ]  # fmt: skip
    return Chart("Clusters that reach the goal", "The choice is orange.", charts.cost_and_days(points))


def _ranking(plan: TrainingPlan) -> Grid:
    run = plan.run_tokens is not None
    columns = ["#", "ICI axes", "DCN axes", "remat", "batch", "step", "tokens/s", "MFU", "GiB",
               *(["days", "cost"] if run else []), "exposed, s"]  # fmt: skip
    rows = []
    for k, c in enumerate(plan.result.ranked[:ROWS], 1):
        e = c.estimate
        row = [
            str(k), words.axes(c.layout.ici), words.axes(c.layout.dcn), words.recipe(c), words.batch(c),
            duration(e.step_time_s), quantity(e.tokens_per_s), f"{e.mfu:.1%}",
            f"{e.hbm_total_bytes / GIB:.1f}",
        ]  # fmt: skip
        if run:
            cost = plan.cost(c)
            row += [f"{(plan.run_s(c) or 0) / 86400:.1f}", "no price" if cost is None else quantity(cost)]
        rows.append([*row, words.exposed(e)])
    note = (
        "Batch: sequences of a device in one microbatch x microbatches. GiB: of a device. Exposed: by axis."
    )
    return Grid("Layouts, fastest first", note, columns, rows, words=4, texts=("exposed, s",))


def _parts(plan: TrainingPlan, now: Candidate | None) -> Grid:
    shown = list(plan.result.ranked[:BARS])
    names = [f"#{k}" for k in range(1, len(shown) + 1)]
    if now is not None:
        shown, names = [now, *shown], ["config", *names]
    rows = words.parts_table([c.estimate for c in shown])
    return Grid("Time of a step and memory of a device", "", ["", *names], rows, marked=None)


def _why(plan: TrainingPlan) -> Prose:
    reasons = plan.reasons
    lists = [
        ("The first choice", [Point(q.text, q.holds) for q in reasons.winner]),
        ("Between slices", [Point(text) for text in reasons.multislice]),
        ("Decision table", [Point(reasons.table)] if reasons.table else []),
        ("Not chosen", [Point(v.text) for v in reasons.rejected]),
    ]
    return Prose("Why", [reasons.winner_text], [(title, points) for title, points in lists if points])


def serving(plan: ServingPlan) -> str:
    best, w = plan.best, plan.workload
    limit = "" if w.latency_s is None else f", a token within {duration(w.latency_s)}"
    tiles = [
        Tile(duration(best.step_s), f"a token at batch {best.batch}"),
        Tile(count(best.tokens_per_s_per_chip), "tokens/s a chip"),
        Tile(best.slice.accelerator_type, f"{best.slice.name}, {best.quantization.name}"),
        Tile(duration(best.prefill_s), "to prefill a prompt"),
        Tile(":".join(map(str, plan.disaggregated)), "prefill : decode slices"),
    ]
    if best.price_per_million_tokens is not None:
        tiles.append(Tile(quantity(best.price_per_million_tokens), "per million output tokens"))
    marked = plan.frontier.index(best) if best in plan.frontier else None
    points = [
        (1e3 * p.step_s, p.tokens_per_s_per_chip, p.quantization.name,
         f"{p.slice.accelerator_type} ({p.slice.name}), batch {p.batch}")
        for p in plan.frontier
    ]  # fmt: skip
    limit_ms = None if w.latency_s is None else 1e3 * w.latency_s
    usable = plan.chip.usable_hbm_bytes
    share = {"weights": best.weight_bytes / best.slice.chips,
             "caches": best.batch * best.cache_bytes / best.slice.chips}  # fmt: skip
    rows = [
        [p.slice.accelerator_type, p.slice.name, p.quantization.name, str(p.batch), duration(p.step_s),
         count(p.tokens_per_s_per_chip), p.bound,
         "-" if p.price_per_million_tokens is None else quantity(p.price_per_million_tokens)]
        for p in plan.frontier
    ]  # fmt: skip
    columns = [
        "slice",
        "topology",
        "quantization",
        "batch",
        "a token",
        "tokens/s a chip",
        "bound by",
        "per M tokens",
    ]
    return render(
        f"Serving {plan.model.name} on {plan.chip.name}",
        f"Prompts of {count(w.prompt)} and answers of {count(w.output)} tokens{limit}.",
        tiles,
        [
            Chart("Latency against throughput", "Points that no other beats in both.",
                  charts.frontier(points, -1 if marked is None else marked, limit_ms)),
            Chart("Memory of a chip", "Of the best point, with full caches.",
                  charts.memory_waterfall(share, usable, MEMORY_SHARE * usable, of="chip")),
            Grid("The frontier", "By rising latency.", columns, rows, words=3, marked=marked),
            Prose("Why", [], [("The best point", [Point(line) for line in plan.reasons()])]),
        ],
    )  # fmt: skip


def goodput(plan: GoodputPlan) -> str:
    g, c = plan.chosen, plan.cluster
    tiles = [
        Tile(f"{g.goodput:.1%}", "goodput"),
        Tile(duration(g.interval_s), "between checkpoints"),
        Tile(f"{g.failures_per_day:.3g}", "interruptions a day"),
    ]
    if plan.checkpoint_every is not None:
        tiles.append(Tile(count(plan.checkpoint_every), "steps (checkpoint_every)"))
    cards: list[Card] = []
    if points := goodput_plan.curve(plan):
        shares = {
            "restarting": [p.restarting for p in points],
            "lost": [p.lost for p in points],
            "checkpointing": [p.checkpointing for p in points],
        }
        figure = charts.wall_time([p.interval_s / 60 for p in points], shares, g.interval_s / 60)
        cards.append(
            Chart("Time that is no new training", "Stacked shares of the wall time.", figure, wide=True)
        )
    if plan.offers:
        columns = [
            "offer",
            "a chip-hour",
            "interruptions a day",
            "checkpoint every",
            "goodput",
            "wall time",
            "cost",
        ]
        rows = [
            [r.offer.name, f"{r.offer.price_per_chip_hour:g}", f"{r.goodput.failures_per_day:.3g}",
             duration(r.goodput.interval_s), f"{r.goodput.goodput:.1%}", duration(r.wall_s),
             f"{r.price:,.0f}"]
            for r in plan.offers
        ]  # fmt: skip
        cards.append(
            Grid("Offers, cheapest first", "Each at its best interval unless one was given.", columns, rows)
        )
    cards.append(Prose("Why", [], [("The choice", [Point(line) for line in plan.explain()])]))
    return render(
        f"Goodput on {words.place(c)}",
        f"{count(c.chips)} chips on {count(c.hosts)} hosts.",
        tiles,
        cards,
    )
