"""Plotly figures as plain dicts, so that only a page needs plotly. Colours are names that page.js knows."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from slicewise.costs.units import PREFIXES
from slicewise.report.page import Figure

GIB = 2**30
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
COMPUTE = ("@blue", "@blue2", "@blue3", "@blue5", "@blue4", "@blue6")
EXPOSED = ("@orange", "@orange2", "@orange4", "@orange3", "@orange5", "@yellow", "@red")
OTHER = ("@grey", "@grey2", "@grey3")
CATEGORIES = ("@blue", "@orange", "@green", "@purple", "@teal", "@pink", "@yellow", "@red", "@grey")


def layout(height: int, **more: Any) -> dict[str, Any]:
    """What all charts share; axes get a grid and no box."""
    axis = {"gridcolor": "@grid", "zerolinecolor": "@grid", "linecolor": "@line", "automargin": True}
    for name in ("xaxis", "yaxis"):
        mine = {**axis, **more.get(name, {})}
        if isinstance(title := mine.get("title"), str):
            mine["title"] = {"text": title, "standoff": 8, "font": {"size": 12, "color": "@muted"}}
        more[name] = mine
    return {
        "height": height,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "@text", "size": 13, "family": FONT},
        "margin": {"l": 10, "r": 16, "t": 10, "b": 10},
        "legend": {"orientation": "h", "x": 0, "xref": "container", "y": 0, "yref": "container",
                   "yanchor": "bottom", "font": {"size": 12}, "traceorder": "normal",
                   "itemsizing": "constant"},
        "hoverlabel": {"bgcolor": "@card", "bordercolor": "@line", "font": {"color": "@text"}},
        **more,
    }  # fmt: skip


def log_axis(title: str, low: float, high: float) -> dict[str, Any]:
    """A logarithmic axis from ``low`` to ``high`` with ticks at 1, 2, 5 (at 1 only over many decades)."""
    steps = (1, 2, 5) if high / low < 2000 else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high]
    return {
        "type": "log",
        "title": title,
        "range": [math.log10(low), math.log10(high)],
        "tickvals": ticks,
        "ticktext": [_tick(t) for t in ticks],
    }


def _tick(value: float) -> str:
    scale, prefix = next(((s, p) for s, p in PREFIXES if value >= 0.999 * s), (1.0, ""))
    return f"{value / scale:g}{prefix}"


def step_bars(
    names: Sequence[str], parts: Sequence[Mapping[str, float]], ends: Sequence[str], *, unit: str = "s"
) -> Figure:
    """Time of a step by part, one stacked bar a layout, the first on top; ``ends`` stand at their ends."""
    found = dict.fromkeys(key for part in parts for key, value in part.items() if value > 0)
    keys = sorted(found, key=_step_kind)
    totals = [sum(part.values()) for part in parts]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": key,
            "y": list(names),
            "x": [part.get(key, 0.0) for part in parts],
            "marker": {"color": color},
            "hovertemplate": f"{key}: %{{x:.3g}} {unit}<extra></extra>",
        }
        for key, color in zip(keys, _step_colors(keys), strict=True)
    ]
    notes = [
        {"x": total, "y": name, "text": end, "xanchor": "left", "xshift": 6, "showarrow": False,
         "font": {"size": 12, "color": "@muted"}}
        for total, name, end in zip(totals, names, ends, strict=True)
    ]  # fmt: skip
    return {
        "data": traces,
        "layout": layout(
            120 + 44 * len(names),
            barmode="stack",
            bargap=0.35,
            xaxis={"title": f"{unit} a step", "range": [0, 1.22 * max(totals)]},
            yaxis={"autorange": "reversed", "gridcolor": "rgba(0,0,0,0)", "ticksuffix": "  "},
            annotations=notes,
        ),
    }


def _step_kind(key: str) -> int:
    """0 for compute, 1 for exposed communication, 2 for waiting."""
    if key.endswith(" exposed"):
        return 1
    return 0 if key in ("matmul", "attention", "memory", "routing", "output", "optimizer") else 2


def _step_colors(keys: Sequence[str]) -> list[str]:
    """Blue for compute, orange for exposed communication, grey for waiting."""
    used = [0, 0, 0]
    colors = []
    for key in keys:
        kind = _step_kind(key)
        family = (COMPUTE, EXPOSED, OTHER)[kind]
        colors.append(family[used[kind] % len(family)])
        used[kind] += 1
    return colors


def memory_waterfall(
    parts: Mapping[str, float], limit_bytes: float, usable_bytes: float | None, *, of: str = "device"
) -> Figure:
    """Bytes of one device (or chip) added up to what is in use, against what a program can have; in GiB.

    ``usable_bytes`` is what a plan goes up to, None where nothing is planned.
    """
    named = {name: value / GIB for name, value in parts.items() if value > 0}
    total, limit = sum(named.values()), limit_bytes / GIB
    usable = limit if usable_bytes is None else usable_bytes / GIB
    values = [*named.values(), total]
    fits = total <= usable
    planned = [] if usable_bytes is None else [usable]
    return {
        "data": [
            {
                "type": "waterfall",
                "x": [*named, "in use"],
                "y": [*named.values(), 0],
                "measure": ["relative"] * len(named) + ["total"],
                "text": [f"{v:.1f}" if v >= 0.05 else f"{v:.2f}" for v in values],
                "textposition": "outside",
                "cliponaxis": False,
                "connector": {"line": {"color": "@line", "width": 1}},
                "increasing": {"marker": {"color": "@blue2"}},
                "totals": {"marker": {"color": "@blue5" if fits else "@red"}},
                "hovertemplate": "%{x}: %{text} GiB<extra></extra>",
            }
        ],
        "layout": layout(
            440,
            showlegend=False,
            yaxis={"title": f"GiB a {of}", "range": [0, 1.12 * max(total, limit)]},
            xaxis={"gridcolor": "rgba(0,0,0,0)"},
            shapes=[level(limit, "solid"), *(level(y, "dot") for y in planned)],
            annotations=[
                level_note(limit, f"a program can have {limit:.1f}", "bottom"),
                *(level_note(y, f"planned to {y:.1f}", "top") for y in planned),
            ],
        ),
    }


def level(y: float, dash: str) -> dict[str, Any]:
    line = {"color": "@muted", "width": 1.5, "dash": dash}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line}


def level_note(y: float, text: str, anchor: str) -> dict[str, Any]:
    return {
        "xref": "paper", "x": 0, "xanchor": "left", "y": y, "yanchor": anchor, "text": text,
        "showarrow": False, "font": {"size": 12, "color": "@muted"},
    }  # fmt: skip


def roofline(
    points: Sequence[tuple[str, float, float, float]], flops_per_s: float, bytes_per_s: float
) -> Figure:
    """(name, FLOP per byte, FLOP/s, share of the time) under the roof of one device."""
    ridge = flops_per_s / bytes_per_s
    low = min([ridge, *(p[1] for p in points)]) / 4
    high = max([ridge, *(p[1] for p in points)]) * 4
    tera = 1e12
    roof = {
        "type": "scatter",
        "mode": "lines",
        "name": "roof",
        "x": [low, ridge, high],
        "y": [low * bytes_per_s / tera, flops_per_s / tera, flops_per_s / tera],
        "line": {"color": "@muted", "width": 2},
        "hoverinfo": "skip",
        "showlegend": False,
    }
    traces = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": f"{name} ({share:.0%})",
            "x": [intensity],
            "y": [rate / tera],
            "marker": {"color": color, "size": 9 + 22 * math.sqrt(share), "opacity": 0.85,
                       "line": {"color": "@card", "width": 1}},
            "hovertemplate": f"{name}<br>%{{x:.4g}} FLOP/B, %{{y:.4g}} TFLOP/s<extra></extra>",
        }
        for (name, intensity, rate, share), color in zip(points, _colors(len(points)), strict=True)
    ]  # fmt: skip
    lowest = min([low * bytes_per_s, *(p[2] for p in points)]) / tera
    return {
        "data": [roof, *traces],
        "layout": layout(
            440,
            xaxis=log_axis("FLOP per byte of device memory", low, high),
            yaxis=log_axis("TFLOP/s a device", lowest / 1.5, 2.2 * flops_per_s / tera),
            annotations=[
                {"x": math.log10(high), "y": math.log10(flops_per_s / tera), "xanchor": "right",
                 "yanchor": "bottom",
                 "text": f"peak {flops_per_s / tera:,.0f} TFLOP/s", "showarrow": False,
                 "font": {"size": 12, "color": "@muted"}},
                {"x": math.log10(ridge), "yref": "paper", "y": 0, "yanchor": "bottom", "xanchor": "left",
                 "text": f"ridge at {ridge:,.0f}", "showarrow": False, "xshift": 4,
                 "font": {"size": 12, "color": "@muted"}},
            ],
            shapes=[{"type": "line", "x0": ridge, "x1": ridge, "y0": lowest / 1.5, "y1": flops_per_s / tera,
                     "line": {"color": "@muted", "width": 1, "dash": "dot"}}],
        ),
    }  # fmt: skip


def _colors(count: int) -> list[str]:
    return [CATEGORIES[k % len(CATEGORIES)] for k in range(count)]


def scaling(
    slices: Sequence[int], tokens_per_s: Sequence[float], mfu: Sequence[float], chosen: int
) -> Figure:
    """Tokens/s over the number of slices, beside what perfect scaling from the first would give."""
    ideal = [tokens_per_s[0] * n / slices[0] for n in slices]
    shared = {"type": "scatter", "x": list(slices)}
    return {
        "data": [
            {**shared, "mode": "lines", "name": f"perfect from {slices[0]}", "y": ideal, "hoverinfo": "skip",
             "line": {"color": "@line", "dash": "dot", "width": 2}},
            {**shared, "mode": "lines+markers+text", "name": "predicted", "y": list(tokens_per_s),
             "text": [f"{m:.0%}" for m in mfu], "textposition": "bottom right",
             "textfont": {"color": "@muted", "size": 12},
             "line": {"color": "@blue", "width": 2.5},
             "marker": {"size": [13 if n == chosen else 8 for n in slices], "color": "@blue"},
             "cliponaxis": False,
             "hovertemplate": "%{x} slices: %{y:.4s} tokens/s, MFU %{text}<extra></extra>"},
        ],
        "layout": layout(
            380,
            xaxis={"type": "log", "title": "slices (MFU beside each point)", "tickvals": list(slices),
                   "ticktext": [str(n) for n in slices]},
            yaxis=log_axis("tokens/s", 0.7 * min(tokens_per_s), 1.4 * max(ideal)),
        ),
    }  # fmt: skip


def cost_and_days(points: Sequence[tuple[str, float, float]]) -> Figure:
    """(name, days, price) of every cluster that reaches a goal; the first is the choice."""
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "markers",
                "x": [p[1] for p in points],
                "y": [p[2] for p in points],
                "text": [p[0] for p in points],
                "marker": {
                    "size": [15] + [9] * (len(points) - 1),
                    "color": ["@orange"] + ["@blue"] * (len(points) - 1),
                    "opacity": 0.85,
                },
                "hovertemplate": "%{text}<br>%{x:.3g} days, %{y:,.0f}<extra></extra>",
            }
        ],
        "layout": layout(
            380,
            showlegend=False,
            xaxis={"title": "days", "rangemode": "tozero"},
            yaxis={"title": "cost", "rangemode": "tozero", "tickformat": "~s"},
        ),
    }


def frontier(points: Sequence[tuple[float, float, str, str]], best: int, limit_ms: float | None) -> Figure:
    """(ms a token, tokens/s a chip, quantization, what) by rising latency; a line at the one asked for."""
    kinds = list(dict.fromkeys(p[2] for p in points))
    colors = dict(zip(kinds, _colors(len(kinds)), strict=True))
    path = {
        "type": "scatter", "mode": "lines", "x": [p[0] for p in points], "y": [p[1] for p in points],
        "line": {"color": "@line", "width": 2}, "hoverinfo": "skip", "showlegend": False,
    }  # fmt: skip
    traces = []
    for kind in kinds:
        mine = [(k, p) for k, p in enumerate(points) if p[2] == kind]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": kind,
                "x": [p[0] for _, p in mine],
                "y": [p[1] for _, p in mine],
                "text": [p[3] for _, p in mine],
                "marker": {"size": [16 if k == best else 9 for k, _ in mine], "color": colors[kind]},
                "hovertemplate": "%{text}<br>%{x:.3g} ms a token, %{y:.4g} tokens/s a chip<extra></extra>",
            }
        )
    times = [p[0] for p in points] + ([limit_ms] if limit_ms else [])
    asked = [] if limit_ms is None else [(limit_ms, f"asked: {limit_ms:g} ms")]
    return {
        "data": [path, *traces],
        "layout": layout(
            380,
            xaxis=log_axis("ms a token", 0.8 * min(times), 1.25 * max(times)),
            yaxis={
                "title": "tokens/s a chip, prefill paid for",
                "range": [0, 1.1 * max(p[1] for p in points)],
            },
            shapes=[_upright(x) for x, _ in asked],
            annotations=[_upright_note(x, text, "right") for x, text in asked],
        ),
    }


def _upright(x: float) -> dict[str, Any]:
    line = {"color": "@muted", "width": 1.5, "dash": "dot"}
    return {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": x, "x1": x, "line": line}


def _upright_note(x: float, text: str, anchor: str) -> dict[str, Any]:
    """Beside a line on a logarithmic axis, at its top."""
    return {
        "x": math.log10(x), "yref": "paper", "y": 1, "yanchor": "top", "xanchor": anchor, "showarrow": False,
        "xshift": 6 if anchor == "left" else -6, "text": text, "font": {"size": 12, "color": "@muted"},
    }  # fmt: skip


def wall_time(minutes: Sequence[float], shares: Mapping[str, Sequence[float]], chosen: float) -> Figure:
    """Shares of the wall time that are no new training, stacked, over the interval between checkpoints."""
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "one",
            "name": name,
            "x": list(minutes),
            "y": [100 * v for v in values],
            "line": {"width": 1, "color": color},
            "hovertemplate": f"%{{x:.3g}} min: {name} %{{y:.2f}} %<extra></extra>",
        }
        for (name, values), color in zip(shares.items(), ("@grey", "@blue2", "@orange"), strict=True)
    ]
    return {
        "data": traces,
        "layout": layout(
            380,
            xaxis=log_axis("minutes between checkpoints", min(minutes), max(minutes)),
            yaxis={"title": "% of the wall time", "rangemode": "tozero"},
            shapes=[_upright(chosen)],
            annotations=[_upright_note(chosen, f"chosen: {chosen:.3g} min", "left")],
        ),
    }
