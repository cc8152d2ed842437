"""Figures of a compiled step: its timeline, and its memory along the schedule."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from slicewise.compile.schedule import COPY, CORE, HOST, SPARSECORE
from slicewise.report import charts, timeline
from slicewise.report.page import Figure

if TYPE_CHECKING:
    from slicewise.compile.analysis import CompiledStep

GIB = 2**30
CLOSE = 5e-4  # share of a step: bars of one kind that are closer than this are drawn as one
PARTS, EXPOSED = "parts", "exposed"
BESIDE = (COPY, HOST, SPARSECORE)  # labels that are no mesh axes
Bar = tuple[str, str, float, float, str]  # row, kind, start, end (ns), text


def timeline_chart(step: "CompiledStep") -> Figure:
    """A row for the parts of the model, one for what the core waits for, and one for each resource beside it."""
    bars = _bars(step)
    rows = [PARTS, EXPOSED, *timeline.tracks(step)[4:]]
    total_s = step.replay.seconds
    scale, unit = next(
        u for u in ((1e9, "s"), (1e6, "ms"), (1e3, "us")) if 1e9 * total_s >= u[0] or u[1] == "us"
    )
    kinds = list(dict.fromkeys(kind for _, kind, *_ in bars))
    colors = dict(zip(kinds, _colors(kinds), strict=True))
    traces = []
    for kind in kinds:
        mine = [b for b in bars if b[1] == kind]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": kind,
                "y": [b[0] for b in mine],
                "base": [round(b[2] / scale, 6) for b in mine],
                "x": [round((b[3] - b[2]) / scale, 6) for b in mine],
                "text": [b[4] for b in mine],
                "textposition": "none",
                "marker": {"color": colors[kind], "line": {"width": 0}},
                "hovertemplate": f"%{{text}}<br>%{{x:.4g}} {unit} from %{{base:.4g}} {unit}<extra></extra>",
            }
        )
    return {
        "data": traces,
        "layout": charts.layout(
            150 + 34 * len(rows),
            barmode="overlay",
            bargap=0.25,
            xaxis={
                "title": f"{unit}; drag to zoom in, double click to zoom out",
                "range": [0, 1e9 * total_s / scale],
            },
            yaxis={
                "categoryorder": "array",
                "categoryarray": rows,
                "autorange": "reversed",
                "gridcolor": "rgba(0,0,0,0)",
                "ticksuffix": "  ",
            },
        ),
    }


def _bars(step: "CompiledStep") -> list[Bar]:
    bars: list[Bar] = []
    gap_ns = CLOSE * 1e9 * step.replay.seconds
    for s in timeline.slices(step):
        if s.track == timeline.LAYERS and not s.holds_others:
            kind = "further rounds" if s.name.endswith(timeline.ALIKE) else s.name
            bars.append((PARTS, kind, s.start_ns, s.end_ns, s.name))
    spans = sorted(
        (s for s in step.replay.spans if s.work.label and s.track != timeline.LOOPS),
        key=lambda s: (s.track, s.work.label, s.start_s),
    )
    for (track, label), run in groupby(spans, key=lambda s: (s.track, s.work.label)):
        row = EXPOSED if track == CORE else timeline.track_name(track)
        for start, end, count in _joined(
            [(1e9 * s.start_s, 1e9 * (s.start_s + s.seconds)) for s in run], gap_ns
        ):
            text = f"{label}, {count} transfers" if count > 1 else label
            bars.append((row, label if label in BESIDE else f"over {label}", start, end, text))
    return bars


def _joined(intervals: Sequence[tuple[float, float]], gap: float) -> list[tuple[float, float, int]]:
    """Intervals in the order of their starts, those closer than ``gap`` as one: (start, end, how many)."""
    joined: list[tuple[float, float, int]] = []
    for start, end in intervals:
        if joined and start - joined[-1][1] < gap:
            before = joined[-1]
            joined[-1] = before[0], max(before[1], end), before[2] + 1
        else:
            joined.append((start, end, 1))
    return joined


def _colors(kinds: Sequence[str]) -> list[str]:
    """Families by what is done: blue forward, green backward, teal recomputed, orange transfers."""
    families = {
        "forward": ("@blue", "@blue2", "@blue3", "@blue4", "@blue5", "@blue6"),
        "backward": ("@green", "@teal", "@purple", "@pink"),
        "recomputed": ("@yellow", "@red"),
        "over": charts.EXPOSED,
        "further": ("@grey3",),
    }
    used: dict[str, int] = {}
    colors = []
    for kind in kinds:
        family = families.get(kind.split()[0], charts.OTHER)
        position = used.get(kind.split()[0], 0)
        used[kind.split()[0]] = position + 1
        colors.append(family[position % len(family)])
    return colors


def memory_chart(step: "CompiledStep") -> Figure:
    """Bytes of a device at each instruction of the schedule, loops once."""
    held = [b / GIB for _, b in step.memory.over_schedule]
    limit = step.memory.limit_bytes / GIB
    line = {
        "type": "scatter",
        "mode": "lines",
        "x": list(range(len(held))),
        "y": [round(b, 5) for b in held],
        "text": [name for name, _ in step.memory.over_schedule],
        "line": {"color": "@blue", "width": 1.5, "shape": "hv"},
        "fill": "tozeroy",
        "hovertemplate": "%{text}: %{y:.3f} GiB<extra></extra>",
    }
    return {
        "data": [line],
        "layout": charts.layout(
            380,
            showlegend=False,
            xaxis={"title": "instruction of the schedule"},
            yaxis={"title": "GiB a device", "range": [0, 1.12 * max([limit, *held])]},
            shapes=[charts.level(limit, "solid")],
            annotations=[charts.level_note(limit, f"a program can have {limit:.1f}", "bottom")],
        ),
    }
