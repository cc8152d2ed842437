"""Pages in a real browser. Total time: about fifteen seconds with Chromium, one without."""

import html
import re
import struct
import sys
import zlib

import pytest

from slicewise.catalog import chips, model, slices
from slicewise.costs.shapes import model_shape
from slicewise.errors import UserError
from slicewise.plan import run_config, serving, training
from slicewise.plan.goodput import Offer
from slicewise.plan.goodput_plan import Faults, plan_goodput
from slicewise.plan.offers import Goal
from slicewise.plan.serving_point import Workload
from slicewise.report import page, pages

LLAMA = model_shape(model.load("llama3-8b"))
WORK = training.workload(LLAMA, 8192, 2**22)


@pytest.fixture(scope="module")
def plan():
    return training.plan_cluster(WORK, slices.cluster("v5p:4x4x4", 2), run_tokens=1e12)


@pytest.fixture
def shown(tmp_path, browser):
    """Shows a page."""

    def show(text):
        file = tmp_path / "page.html"
        file.write_text(text, encoding="utf-8")
        return browser.look(file)

    return show


def check(seen, titles):
    """No message at all, every card there, every chart drawn."""
    assert seen.console == ()
    body = seen.dom.partition("<script>")[0]
    assert re.findall(r"<h2>(.*?)</h2>", body) == titles
    charts = re.findall(
        r'<div class="chart[^"]*" id="chart\d+"[^>]*>(.*?)<script type="application/json"', body, re.S
    )
    assert charts
    for chart in charts:
        assert 'class="main-svg"' in chart
        assert re.search(r'<path class="(point|js-line|js-fill)|<g class="point', chart)


def test_the_page_of_a_training_plan_draws_everything(shown, plan):
    seen = shown(pages.training(plan, training.scaling(plan)))
    check(seen, ["Where a step goes", "Device memory", "Roofline", "Scaling over slices",
                 "Layouts, fastest first", "Time of a step and memory of a device", "Why"])  # fmt: skip
    text = html.unescape(seen.dom)
    for expected in (
        "llama3-8b on 2 x v5p 4x4x4", "s a step", "GiB a device",
        "FLOP per byte of device memory", "TFLOP/s a device", "tokens/s", plan.reasons.winner_text,
        *(v.text for v in plan.reasons.rejected), *plan.reasons.multislice,
    ):  # fmt: skip
        assert expected in text


def test_a_config_stands_beside_the_plan(plan):
    now = plan.result.ranked[1]
    text = pages.training(plan, now=now)
    assert "config  data" in text or "config  fsdp" in text or "config  tensor" in text
    assert "<th>config</th>" not in text  # numbers stand right
    assert 'class="number">config</th>' in text
    assert run_config.changes(now, plan.best)


def test_a_free_search_shows_what_it_chose_from(shown):
    clusters = training.clusters([chips.load("v5p")], topology=None, num_slices=1, max_chips=64)
    found = training.plan_free(WORK, clusters, Goal(1e12))
    seen = shown(pages.training(found))
    assert seen.console == ()
    assert "Clusters that reach the goal" in seen.dom


def test_the_page_of_a_serving_plan_draws_everything(shown):
    found = serving.serve(model.load("llama3.1-8b"), chips.load("v5e"), Workload(8192, 512, 0.03))
    seen = shown(pages.serving(found))
    check(seen, ["Latency against throughput", "Memory of a chip", "The frontier", "Why"])
    assert "asked: 30 ms" in seen.dom


def test_the_page_of_a_goodput_plan_draws_everything(shown):
    faults = Faults(host_mtbf_s=6e7, checkpoint_s=30, restart_s=300)
    offers = (Offer("reserved", 2.9), Offer("spot", 1.9, preemptions_per_day=3))
    found = plan_goodput(
        slices.cluster("v5p:8x8x8", 4), faults, training_s=3.6e6, offers=offers, step_time_s=11
    )
    seen = shown(pages.goodput(found))
    check(seen, ["Time that is no new training", "Offers, cheapest first", "Why"])


def test_the_page_is_whole_without_a_network(plan):
    text = pages.training(plan)
    # The drawing library names URLs that it never loads.
    markup = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    assert "Content-Security-Policy" in markup
    assert "default-src 'none'" in markup
    assert not re.search(r"\b(src|href)=|@import|url\(|https?://", markup)
    assert len(text) - len(markup) > 1_000_000  # the library is inside


def test_the_browser_test_notices_a_page_that_wants_the_network(shown):
    text = page.render("t", "s", [], []).replace("<h1>", '<img src="https://example.com/x.png"><h1>')
    seen = shown(text)
    assert any("example.com" in message for message in seen.console)


def pixels(path):
    """Width, height and raw rows of an 8-bit PNG."""
    data = path.read_bytes()
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert (depth, kind) in ((8, 2), (8, 6))
    raw, at = b"", 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            raw += data[at + 8 : at + 8 + length]
        at += 12 + length
    return width, height, zlib.decompress(raw)


def test_light_and_dark_are_different_pictures_and_neither_is_blank(tmp_path, browser, plan):
    file = tmp_path / "page.html"
    file.write_text(pages.training(plan), encoding="utf-8")
    light = pixels(browser.screenshot(file))
    dark = pixels(browser.screenshot(file, dark=True))
    assert light[:2] == dark[:2] == (1280, 2000)
    assert light[2] != dark[2]
    for _, _, raw in (light, dark):
        assert len(zlib.compress(raw, 1)) > 50_000  # a blank page packs into a few kilobytes


def test_text_of_the_user_cannot_become_markup():
    cards = [
        page.Prose("<b>", ["</p><script>alert(1)</script>"], [("a & b", [page.Point("<i>", True)])]),
        page.Grid("g", "", ["<td>"], [["</table>"]]),
        page.Chart(
            "c", "", {"data": [{"name": "</script><script>alert(2)</script>"}], "layout": {"height": 9}}
        ),
    ]
    text = page.render("</title>", "<h1>", [page.Tile("<", ">")], cards)
    markup = text.partition("</main>")[0]
    assert "<script>" not in markup
    assert "\\u003c/script>\\u003cscript>alert(2)" in markup
    assert "&lt;/table&gt;" in markup


def test_a_lone_half_card_takes_the_whole_row():
    chart = page.Chart("c", "", {"data": [], "layout": {"height": 9}})
    text = page.render("t", "s", [], [chart, chart, chart])
    assert re.findall(r'class="card( wide)?"', text) == ["", "", " wide"]


def test_without_plotly_a_page_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UserError, match=r"pip install 'slicewise\[report\]'"):
        page.render("t", "s", [], [])
