"""A compiled step as JSON and as tables: does it fit, how long is a step, where time and memory go."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from slicewise.catalog import chips
from slicewise.compile.schedule import CORE
from slicewise.costs.units import count, duration, quantity
from slicewise.report import training
from slicewise.report.console import say
from slicewise.report.jsonable import SCHEMA, jsonable
from slicewise.report.tables import table
from slicewise.report.timeline import track_name

if TYPE_CHECKING:
    from slicewise.compile.analysis import CompiledStep
    from slicewise.compile.beside import Comparison, Line
    from slicewise.compile.memory import Buffer

GIB = 2**30
PROGRAMS = {
    "update": "a training step",
    "init": "the first state",
    "evaluate": "an evaluation step",
    "prefill": "a prefill",
    "decode": "a decode step",
}
# The compiler says temporaries, and counts arguments too.
_REQUIRED = re.compile(r"required for HLO temporaries \(([\d.]+)([KMGT])\) exceeds .*\(([\d.]+)([KMGT])\)")
_USED = re.compile(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT])")


# --- words and numbers that tables, pages and JSON share -------------------------------------------------------------


def heading(step: "CompiledStep") -> str:
    """Such as 'llama3-8b on 2 x v5p 4x4x8 (256 chips): a training step, 1,048,576 tokens'."""
    r = step.request
    return (
        f"{r.config.model.model} on {training.place(r.cluster)} ({count(r.cluster.chips)} chips):"
        f" {PROGRAMS[r.program]}, {count(step.estimate.tokens)} tokens"
    )


def verdict(step: "CompiledStep") -> str:
    """Whether it fits, and how much of a device's memory it takes."""
    limit = step.memory.limit_bytes
    if step.fits:
        total = step.memory.total_bytes
        return f"It fits: {size(total)} of the {size(limit)} of a device ({total / limit:.1%})."
    if step.out_of_memory:
        return f"It does not fit: {refusal(step.out_of_memory)}"
    total = step.memory.total_bytes
    return (
        f"It does not fit: it needs {size(total)} a device, {size(total - limit)} more than the {size(limit)}"
        " there are."
    )


def refusal(message: str) -> str:
    """The compiler's out-of-memory message as a sentence."""
    if found := _REQUIRED.search(message) or _USED.search(message):
        return f"it needs {_gib(*found.group(1, 2))} a device, and {_gib(*found.group(3, 4))} are there."
    text = message.splitlines()[0].rpartition("Hbm")[2] if "Hbm" in message else message.splitlines()[0]
    return text.partition(":")[2].strip() or message.splitlines()[0]


def _gib(number: str, prefix: str) -> str:
    return size(float(number) * 1024 ** ("KMGT".index(prefix) + 1))


def size(bytes_: float) -> str:
    """Bytes in powers of two: '15.75 GiB', '3.2 MiB'."""
    for scale, unit in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(bytes_) >= scale:
            value = bytes_ / scale
            return f"{value:.2f} {unit}" if value < 100 else f"{value:.1f} {unit}"
    return f"{bytes_:.0f} B"


def depth(step: "CompiledStep") -> str:
    """How far it was compiled, and so whose numbers these are."""
    if step.request.depth == "schedule":
        return (
            "Depth: schedule. Order, collectives and memory are the compiler's; the time of an operation is"
            " ours, from rates fitted to full compiles (--depth full asks the compiler)."
        )
    return (
        "Depth: full. Order, collectives and memory are the compiler's, and so are the cycles of its operations;"
        " kernels and transfers are ours."
    )


def quantization(step: "CompiledStep") -> str | None:
    """What to know where products in 8 bits save no time on the chip."""
    name = step.request.config.quantization
    if name == "none":
        return None
    return chips.saves_bytes_only(step.request.cluster.chip, name)


def cost_of_compiling(step: "CompiledStep") -> str:
    spent = f"{step.cpu_s:.0f} CPU seconds, {step.wall_s:.0f} s, {step.peak_rss_bytes / 1e9:.2f} GB"
    return f"From the cache; compiling took {spent}." if step.from_cache else f"Compiling took {spent}."


def source_of(buffer: "Buffer") -> str:
    """The line that makes a buffer, or the argument that it is; before it a saved activation's name."""
    place = buffer.source or _short(buffer.op_name)
    return f"{buffer.tensor}, {place}" if buffer.tensor else place


def _short(op_name: str) -> str:
    """The end of an op_name: what a person can find again."""
    return op_name if len(op_name) <= 44 else "..." + op_name[-41:]


def passes(step: "CompiledStep") -> list[str]:
    """The passes with time in them, in the order in which a step goes through them."""
    order = ("forward", "recomputed", "backward", "update")
    found = {name for _, name in step.seconds}
    return [name for name in order if name in found] + sorted(found - set(order))


def parts(step: "CompiledStep") -> list[str]:
    """The parts of the model, the one with the most time first."""
    total: dict[str, float] = {}
    for (part, _), seconds in step.seconds.items():
        total[part] = total.get(part, 0.0) + seconds
    return sorted(total, key=lambda part: -total[part])


def kinds(step: "CompiledStep") -> dict[str, float]:
    """Seconds of the core by kind of operation, the longest first."""
    total: dict[str, float] = {}
    for (kind, _), seconds in step.replay.totals.seconds.items():
        total[kind] = total.get(kind, 0.0) + seconds
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def waits(step: "CompiledStep") -> dict[str, float]:
    """Seconds that the core waits, by what for."""
    e = step.estimate
    return {
        **{f"{axis} exposed": s for axis, s in e.exposed_s.items() if s},
        **{k: s for k, s in e.other_s.items() if s},
    }


def busy(step: "CompiledStep") -> str:
    """Shares of a step in which the core computes and each resource beside it works."""
    known = step.replay.totals.busy
    shares = [
        f"{'core' if resource == CORE else track_name(resource)} {seconds / step.replay.seconds:.1%}"
        for resource, seconds in sorted(known.items(), key=lambda item: (item[0] != CORE, item[0]))
    ]
    return f"Busy of a step: {', '.join(shares)}."


def executed_flops(step: "CompiledStep") -> float:
    """Of one device and one step, recomputed ones too."""
    return sum(step.flops.values())


def useful_flops(step: "CompiledStep") -> float:
    """That the model needs, of one device and one step."""
    return step.estimate.model_flops / step.estimate.devices


# --- JSON ------------------------------------------------------------------------------------------------------------


def document(step: "CompiledStep", comparison: "Comparison") -> dict[str, Any]:
    r, m, totals = step.request, step.memory, step.replay.totals
    return {
        "kind": "compiled step",
        "schema": SCHEMA,
        "model": r.config.model.model,
        "cluster": jsonable(r.cluster),
        "program": r.program,
        "depth": r.depth,
        "fits": step.fits,
        "verdict": verdict(step),
        "compiler_message": step.out_of_memory,
        "estimate": jsonable(step.estimate),
        "hardware_utilisation": step.hardware_utilisation,
        "memory": {
            "hbm_bytes": jsonable(m.hbm_bytes),
            "total_bytes": m.total_bytes,
            "limit_bytes": m.limit_bytes,
            "host_bytes": m.host_bytes,
            "saved_bytes": jsonable(m.saved),
            "largest": jsonable(m.largest),
        },
        "seconds": [
            {"part": part, "pass": name, "seconds": s} for (part, name), s in sorted(step.seconds.items())
        ],
        "kinds_s": kinds(step),
        "communication": [{**jsonable(c), "overlapped_s": c.overlapped_s} for c in step.communication],
        "host_transfers": {
            "bytes": totals.host_bytes,
            "seconds": totals.communication.get("host", 0.0),
            "exposed_s": totals.exposed.get("host", 0.0),
        },
        "busy_s": jsonable(totals.busy),
        "flops": {
            "useful": useful_flops(step),
            "executed": executed_flops(step),
            "by_pass": jsonable(step.flops),
        },
        "compiling": {
            "cpu_s": step.cpu_s,
            "wall_s": step.wall_s,
            "peak_rss_bytes": step.peak_rss_bytes,
            "from_cache": step.from_cache,
        },
        "plan": jsonable(comparison.planned) if comparison.planned else None,
        "plan_reason": comparison.reason,
        "differences": [{**jsonable(line), "difference": line.difference} for line in comparison.lines],
    }


# --- tables ----------------------------------------------------------------------------------------------------------


def show(out: Console, step: "CompiledStep", comparison: "Comparison") -> None:
    """Everything, the answer first."""
    say(out, heading(step), "bold")
    say(out, verdict(step), "" if step.fits else "bold red")
    if step.out_of_memory is None:
        say(out, speed(step))
    if note := quantization(step):
        say(out, note)
    say(out, depth(step), "dim")
    say(out, cost_of_compiling(step), "dim")
    sections = [
        ("Memory of a device", memory_table(step)),
        ("Largest buffers", buffers_table(step.memory.largest)),
    ]
    if step.out_of_memory is None:
        sections += [
            ("Time of the core by part and pass", time_table(step)),
            ("Communication of a device", communication_table(step)),
            ("FLOPs of a device", flops_table(step)),
        ]
    for title, made in sections:
        say(out, "")
        say(out, title, "bold")
        out.print(made)
        if title.startswith("Communication"):
            say(out, busy(step), "dim")
    if step.out_of_memory is None:
        say(out, "")
        beside(out, step, comparison)


def speed(step: "CompiledStep") -> str:
    e = step.estimate
    return (
        f"Predicted: {duration(e.step_time_s)} a step, {quantity(e.tokens_per_s)} tokens/s, MFU {e.mfu:.1%},"
        f" hardware utilisation {step.hardware_utilisation:.1%}."
    )


def memory_table(step: "CompiledStep") -> Table:
    m = step.memory
    made = table("component", "size", "of a device")
    for name, held in sorted(m.hbm_bytes.items(), key=lambda item: -item[1]):
        if held:
            made.add_row(name, size(held), f"{held / m.limit_bytes:.1%}")
        if name == "saved activations" and m.saved.keys() - {"unnamed"}:
            for tensor, kept in sorted(m.saved.items(), key=lambda item: -item[1]):
                made.add_row(f"  {tensor}", size(kept), f"{kept / m.limit_bytes:.1%}")
    made.add_section()
    made.add_row("in all", size(m.total_bytes), f"{m.total_bytes / m.limit_bytes:.1%}")
    made.add_row("a program can have", size(m.limit_bytes), "")
    if m.host_bytes:
        made.add_row("on the host, apart", size(m.host_bytes), "")
    return made


def buffers_table(buffers: "Sequence[Buffer]") -> Table:
    made = table("component", "made by", "shape", "size", words=3)
    for row in buffer_rows(buffers):
        made.add_row(*row)
    return made


def buffer_rows(buffers: "Sequence[Buffer]") -> list[list[str]]:
    return [[b.component, source_of(b), b.shape.partition("{")[0], size(b.bytes)] for b in buffers]


def time_table(step: "CompiledStep") -> Table:
    """Rows are parts of the model, columns passes; then what the core waits for."""
    columns = passes(step)
    total = step.estimate.step_time_s
    made = table("part", *columns, "in all", "of a step")
    for row in time_rows(step):
        made.add_row(*row)
    if waits(step):
        made.add_section()
    for name, seconds in waits(step).items():
        made.add_row(name, *[""] * len(columns), duration(seconds), f"{seconds / total:.1%}")
    made.add_section()
    made.add_row("a step", *[""] * len(columns), duration(total), "")
    return made


def time_rows(step: "CompiledStep") -> list[list[str]]:
    rows = []
    for part in parts(step):
        mine = [step.seconds.get((part, name), 0.0) for name in passes(step)]
        shown = [duration(s) if s else "-" for s in (*mine, sum(mine))]
        rows.append([part, *shown, f"{sum(mine) / step.estimate.step_time_s:.1%}"])
    return rows


def communication_table(step: "CompiledStep") -> Table:
    made = table("over", "sent", "time", "overlapped", "exposed")
    for row in communication_rows(step):
        made.add_row(*row)
    if not made.rows:
        made.add_row("nothing", "-", "-", "-", "-")
    return made


def communication_rows(step: "CompiledStep") -> list[list[str]]:
    rows = [
        [c.axes, quantity(c.bytes_, "B"), *map(duration, (c.seconds, c.overlapped_s, c.exposed_s))]
        for c in step.communication
    ]
    t = step.replay.totals
    if t.host_bytes:
        spent, exposed = t.communication.get("host", 0.0), t.exposed.get("host", 0.0)
        times = map(duration, (spent, max(0.0, spent - exposed), exposed))
        rows.append(["host transfers", quantity(t.host_bytes, "B"), *times])
    return rows


def flops_table(step: "CompiledStep") -> Table:
    made = table("FLOPs", "a step", "of the executed")
    for row in flops_rows(step):
        made.add_row(*row)
    return made


def flops_rows(step: "CompiledStep") -> list[list[str]]:
    executed = executed_flops(step)
    rows = [
        ["useful (the model's)", quantity(useful_flops(step)), _share(useful_flops(step), executed)],
        ["executed", quantity(executed), ""],
    ]
    for name in ("forward", "backward", "recomputed", "update"):
        if step.flops.get(name):
            rows.append([f"  {name}", quantity(step.flops[name]), _share(step.flops[name], executed)])
    return rows


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


# --- beside the plan -------------------------------------------------------------------------------------------------


def beside(out: Console, step: "CompiledStep", comparison: "Comparison") -> None:
    say(out, "Beside the plan of the same config", "bold")
    if comparison.planned is None:
        say(out, comparison.reason)
        return
    made = table("", "planned", "compiled", "compiled / planned")
    for row in beside_rows(step, comparison):
        made.add_row(*row)
    out.print(made)
    say(out, "")
    say(out, largest(comparison))
    made = table("what", "planned", "compiled", "difference", "", words=1)
    unit = ""
    for line in comparison.lines:
        if unit and line.unit != unit:
            made.add_section()
        unit = line.unit
        made.add_row(*line_row(line))
    out.print(made)


def beside_rows(step: "CompiledStep", comparison: "Comparison") -> list[list[str]]:
    p, e = comparison.planned, step.estimate
    assert p is not None
    pairs = (
        ("a step", duration, p.step_time_s, e.step_time_s),
        ("tokens/s", quantity, p.tokens_per_s, e.tokens_per_s),
        ("MFU", lambda v: f"{v:.1%}", p.mfu, e.mfu),
        ("memory of a device", size, p.hbm_total_bytes, e.hbm_total_bytes),
    )
    return [[name, said(a), said(b), f"{b / a:.2f}"] for name, said, a, b in pairs]


def largest(comparison: "Comparison") -> str:
    """The line that explains most of the difference in time."""
    line = next((l for l in comparison.lines if l.unit == "s"), None)
    if line is None:
        return "Planned and compiled times are the same."
    more = "longer" if line.difference > 0 else "shorter"
    said = "which the planner does not price" if line.planned is None else f"planned {duration(line.planned)}"
    return (
        f"The largest difference: {line.name} takes {duration(abs(line.difference))} {more} in the program"
        f" ({duration(line.compiled)}, {said})."
    )


def line_row(line: "Line") -> list[str]:
    said = duration if line.unit == "s" else size
    before = "not priced" if line.planned is None else said(line.planned)
    sign = "+" if line.difference > 0 else "-"
    return [line.name, before, said(line.compiled), f"{sign}{said(abs(line.difference))}", line.note]
