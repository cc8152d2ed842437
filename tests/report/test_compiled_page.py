"""The page of a compiled step in a real browser. Total time: eight seconds with Chromium, one without."""

import html
import re

import pytest

from slicewise.compile.beside import beside_plan
from slicewise.report import compiled_charts, compiled_page


@pytest.fixture
def page(compiled_step):
    def of(name):
        step = compiled_step(name)
        return compiled_page.page(step, beside_plan(step.request, step.estimate))

    return of


def titles(text):
    return re.findall(r"<h2>(.*?)</h2>", text.partition("<script>")[0])


WHOLE = ["Predicted timeline", "Where a step goes", "Device memory", "Memory over the schedule",
         "Time of the core by part and pass", "Communication of a device", "FLOPs of a device",
         "Largest buffers", "Planned and compiled", "How this was found"]  # fmt: skip


def test_the_page_of_a_step_draws_everything(tmp_path, browser, page):
    file = tmp_path / "page.html"
    file.write_text(page("tiny_v5p_two_slices"), encoding="utf-8")
    seen = browser.look(file)
    assert seen.console == ()
    assert titles(seen.dom) == WHOLE
    body = seen.dom.partition("<script>")[0]
    drawn = re.findall(r'id="chart\d+"[^>]*>(.*?)<script type="application/json"', body, re.S)
    assert len(drawn) == 4
    assert all(re.search(r'<path class="(point|js-line|js-fill)|<g class="point', chart) for chart in drawn)
    text = html.unescape(seen.dom)
    for expected in ("demo-tiny on 2 x v5p 2x2x1", "DCN", "Host link, out", "ICI x+", "forward attention",
                     "lie on the host", "The largest difference: "):  # fmt: skip
        assert expected in text


def test_what_does_not_fit_shows_its_memory_and_the_compilers_words(page):
    text = page("too_large_v5e")
    assert titles(text) == [
        "Device memory",
        "Memory over the schedule",
        "Largest buffers",
        "How this was found",
    ]
    assert "It does not fit: " in text
    assert "Ran out of memory" in text


def test_a_program_that_is_not_planned_says_why(page):
    text = page("tiny_v5e_decode")
    assert "Planned and compiled" not in titles(text)
    assert "The planner prices training steps, and no decode." in text


def test_the_timeline_has_a_row_for_each_resource_and_bars_within_the_step(compiled_step):
    step = compiled_step("tiny_v5p_two_slices")
    figure = compiled_charts.timeline_chart(step)
    rows = figure["layout"]["yaxis"]["categoryarray"]
    assert rows[:2] == ["parts", "exposed"]
    assert {"DCN", "Host link, out", "Host link, in"} <= set(rows)
    end = figure["layout"]["xaxis"]["range"][1]
    for trace in figure["data"]:
        assert set(trace["y"]) <= set(rows)
        assert all(
            0 <= base <= base + x <= 1.05 * end for base, x in zip(trace["base"], trace["x"], strict=True)
        )


def test_bars_that_nearly_touch_are_one():
    joined = compiled_charts._joined([(0, 1), (1.5, 2), (5, 6), (5.5, 5.8)], 1)
    assert joined == [(0, 2, 2), (5, 6, 2)]


def test_the_memory_chart_reaches_the_limit_and_the_peak(compiled_step):
    step = compiled_step("too_large_v5e")
    figure = compiled_charts.memory_chart(step)
    peak = max(held for _, held in step.memory.over_schedule)
    assert max(figure["data"][0]["y"]) == pytest.approx(peak / 2**30, abs=1e-4)
    assert figure["layout"]["shapes"][0]["y0"] == pytest.approx(15.75, abs=0.01)
    assert figure["layout"]["yaxis"]["range"][1] > peak / 2**30
