import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.report import charts

POSITIVE = st.floats(1e-3, 1e12)


@given(low=POSITIVE, factor=st.floats(1.2, 1e6))
def test_a_logarithmic_axis_has_ticks_inside_its_range_only(low, factor):
    axis = charts.log_axis("x", low, low * factor)
    assert len(axis["tickvals"]) == len(axis["ticktext"]) <= 30
    assert all(low <= t <= low * factor for t in axis["tickvals"])
    assert axis["range"][1] - axis["range"][0] == pytest.approx(math.log10(factor))
    if factor > 11:
        assert axis["tickvals"]


def test_ticks_are_short():
    assert charts.log_axis("x", 1.2, 2100)["ticktext"] == [
        "2", "5", "10", "20", "50", "100", "200", "500", "1k", "2k",
    ]  # fmt: skip
    assert charts.log_axis("x", 1e6, 3e6)["ticktext"] == ["1M", "2M"]
    assert charts.log_axis("x", 0.4, 2100)["ticktext"] == ["1", "10", "100", "1k"]  # many decades


def test_step_bars_group_compute_before_communication_before_waiting():
    parts = [
        {"slowest slice": 1.0, "matmul": 5.0, "fsdp exposed": 1.0},
        {"tensor exposed": 2.0, "attention": 1.0, "matmul": 4.0, "routing": 0.0},
    ]
    figure = charts.step_bars(["a", "b"], parts, ["7 s", "7 s"])
    names = [trace["name"] for trace in figure["data"]]
    assert names == ["matmul", "attention", "fsdp exposed", "tensor exposed", "slowest slice"]
    colors = [trace["marker"]["color"] for trace in figure["data"]]
    assert len(set(colors)) == len(colors)
    assert [sum(t["x"][k] for t in figure["data"]) for k in (0, 1)] == [7.0, 7.0]
    assert figure["layout"]["xaxis"]["title"]["text"] == "s a step"


def test_a_waterfall_ends_at_what_is_in_use():
    bar = charts.memory_waterfall({"weights": 2**30, "none": 0.0, "logits": 3 * 2**30}, 8 * 2**30, 7 * 2**30)
    trace = bar["data"][0]
    assert trace["x"] == ["weights", "logits", "in use"]
    assert trace["measure"] == ["relative", "relative", "total"]
    assert trace["text"] == ["1.0", "3.0", "4.0"]
    assert trace["totals"]["marker"]["color"] != "@red"


def test_what_does_not_fit_is_red():
    bar = charts.memory_waterfall({"weights": 9 * 2**30}, 8 * 2**30, 7 * 2**30)
    assert bar["data"][0]["totals"]["marker"]["color"] == "@red"


def test_every_figure_keeps_its_colours_to_the_themes():
    from importlib import resources

    script = (resources.files("slicewise.report") / "assets" / "page.js").read_text()
    light, dark = script.split("dark: {")[0], script.split("dark: {")[1]
    used = {c for c in (*charts.COMPUTE, *charts.EXPOSED, *charts.OTHER, *charts.CATEGORIES)}
    used |= {"@text", "@muted", "@grid", "@card", "@line"}
    for color in used:
        assert f" {color[1:]}: " in light
        assert f" {color[1:]}: " in dark
