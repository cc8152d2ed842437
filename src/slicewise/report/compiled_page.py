"""The page of a compiled step: timeline, memory over the schedule, where time and memory go, the plan beside it."""

from typing import TYPE_CHECKING

from slicewise.costs.units import duration, quantity
from slicewise.report import charts, compiled_charts
from slicewise.report import compiled as words
from slicewise.report import training as training_words
from slicewise.report.page import Card, Chart, Grid, Point, Prose, Tile, render

if TYPE_CHECKING:
    from slicewise.compile.analysis import CompiledStep
    from slicewise.compile.beside import Comparison


def page(step: "CompiledStep", comparison: "Comparison") -> str:
    """Of a program that does not fit, only what it holds in memory. Raises UserError without plotly."""
    m = step.memory
    tiles = [Tile(f"{words.size(m.total_bytes)}", f"a device, of {words.size(m.limit_bytes)}")]
    cards: list[Card] = []
    if step.out_of_memory is None:
        e = step.estimate
        tiles = [
            Tile(duration(e.step_time_s), "a step"),
            Tile(quantity(e.tokens_per_s), "tokens/s"),
            Tile(f"{e.mfu:.1%}", "of peak (MFU)"),
            Tile(f"{step.hardware_utilisation:.1%}", "of peak with recomputation"),
            *tiles,
        ]
        cards += [_timeline(step), _step(step, comparison)]
    cards += [_memory(step), _over_schedule(step)]
    if step.out_of_memory is None:
        cards += [_parts(step), _communication(step), _flops(step)]
    cards.append(_buffers(step))
    if comparison.lines and step.out_of_memory is None:
        cards.append(_differences(comparison))
    cards.append(_how(step, comparison))
    return render(words.heading(step), words.verdict(step), tiles, cards)


def _timeline(step: "CompiledStep") -> Chart:
    note = (
        "Of one device. The first rounds of a loop are drawn one by one, the others as one grey bar; exposed is what"
        " the core waits for."
    )
    return Chart("Predicted timeline", note, compiled_charts.timeline_chart(step), wide=True)


def _step(step: "CompiledStep", comparison: "Comparison") -> Chart:
    shown = [("compiled", step.estimate)]
    if comparison.planned:
        shown.append(("planned", comparison.planned))
    estimates = [e for _, e in shown]
    scale, unit = training_words.time_unit(estimates)
    figure = charts.step_bars(
        [name for name, _ in shown],
        [{k: v / scale for k, v in training_words.step_parts(e).items()} for e in estimates],
        [f"{duration(e.step_time_s)}, {e.mfu:.1%}" for e in estimates],
        unit=unit,
    )
    note = "Blue computes, orange is communication that compute does not hide, grey waits. MFU at the end."
    return Chart("Where a step goes", note, figure, wide=True)


def _memory(step: "CompiledStep") -> Chart:
    m = step.memory
    named = dict(sorted(m.hbm_bytes.items(), key=lambda item: -item[1]))
    note = "At its peak, by what it is for."
    if m.host_bytes:
        note += f" Another {words.size(m.host_bytes)} a device lie on the host."
    return Chart("Device memory", note, charts.memory_waterfall(named, m.limit_bytes, None))


def _over_schedule(step: "CompiledStep") -> Chart:
    note = "As the instructions of the step come; bodies of loops once."
    return Chart("Memory over the schedule", note, compiled_charts.memory_chart(step))


def _parts(step: "CompiledStep") -> Grid:
    columns = ["part", *words.passes(step), "in all", "of a step"]
    rows = words.time_rows(step)
    total = step.estimate.step_time_s
    empty = [""] * len(words.passes(step))
    rows += [[name, *empty, duration(s), f"{s / total:.1%}"] for name, s in words.waits(step).items()]
    return Grid("Time of the core by part and pass", words.depth(step), columns, rows, marked=None)


def _communication(step: "CompiledStep") -> Grid:
    columns = ["over", "sent", "time", "overlapped", "exposed"]
    rows = words.communication_rows(step) or [["nothing", "-", "-", "-", "-"]]
    return Grid(
        "Communication of a device",
        f"Of one step, by mesh axes. {words.busy(step)}",
        columns,
        rows,
        marked=None,
    )


def _flops(step: "CompiledStep") -> Grid:
    columns = ["FLOPs", "a step", "of the executed"]
    return Grid("FLOPs of a device", "", columns, words.flops_rows(step), marked=None)


def _buffers(step: "CompiledStep") -> Grid:
    columns = ["component", "made by", "shape", "size"]
    rows = words.buffer_rows(step.memory.largest)
    return Grid("Largest buffers", "At the peak.", columns, rows, words=3, marked=None)


def _differences(comparison: "Comparison") -> Grid:
    columns = ["what", "planned", "compiled", "difference", ""]
    rows = [words.line_row(line) for line in comparison.lines]
    return Grid("Planned and compiled", words.largest(comparison), columns, rows, marked=0)


def _how(step: "CompiledStep", comparison: "Comparison") -> Prose:
    said = [words.depth(step), words.cost_of_compiling(step)]
    said += [comparison.reason] if comparison.reason else []
    message = [Point(line) for line in (step.out_of_memory or "").splitlines() if line.strip()]
    return Prose("How this was found", said, [("What the compiler says", message)] if message else [])
