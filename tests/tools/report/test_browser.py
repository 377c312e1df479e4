"""The page in a real browser: it draws, it asks for nothing, it fits, and it answers clicks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from healcore.history import Curves, Mode
from healcore.tools.report.page import render
from healcore.tools.report.runs import read_reports
from tests.tools.report.chromium import needs_browser, open_page, print_page
from tests.tools.report.test_page import empty, hostile

pytestmark = needs_browser

MEASURE = """
const out = [...document.querySelectorAll("body *")].filter((e) => !e.closest("svg") &&
  e.getBoundingClientRect().width && e.getBoundingClientRect().right > innerWidth + 1);
const found = { inner: innerWidth, page: document.documentElement.scrollWidth,
  plot: document.querySelector(".chart").getBoundingClientRect().width,
  out: out.map((e) => e.tagName + "." + e.className) };
"""


def page_of(reports, folder: Path, script: str = "") -> Path:
    """A page; for a test's own script the content security policy is removed."""
    text = render(reports)
    if script:
        text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text, count=1)
        own = f"addEventListener('load', () => setTimeout(() => {{{script}}}, 600));"
        text = text.replace("</body>", f"<script>{own}</script></body>")
    page = folder / "page.html"
    page.write_text(text, encoding="utf-8")
    return page


def test_it_draws_asks_for_nothing_and_has_no_error(healed, resumed, tmp_path):
    reports = [*read_reports(healed), *read_reports(resumed)]
    opened = open_page(page_of(reports, tmp_path), tmp_path)
    assert opened.console == []
    assert opened.asked == []
    assert opened.dom.count('class="chart"') >= 2
    assert opened.dom.count('class="trace"') >= 2 * 4
    for label in ("log loss", "as recorded", "whole run"):
        assert opened.dom.count(f">{label}</button>") == 2


def test_a_page_that_asks_would_be_seen(tmp_path):
    page = tmp_path / "asks.html"
    page.write_text('<img src="http://tracker.example/1.png"><script>nonsense(</script>')
    opened = open_page(page, tmp_path)
    assert opened.asked == ["http://tracker.example/1.png"]
    assert opened.console


def test_nothing_overflows_on_a_tablet(stopped, tmp_path):
    script = MEASURE + "document.body.dataset.found = JSON.stringify(found);"
    opened = open_page(page_of(read_reports(stopped), tmp_path, script), tmp_path, width=768)
    found = json.loads(opened.data("found").replace("&quot;", '"'))
    assert found["out"] == []
    assert found["page"] <= found["inner"]


def test_nothing_overflows_on_a_phone(stopped, tmp_path):
    # A window has at least 500 pixels; a frame in it may have fewer, and is laid out like a phone.
    long = hostile()._replace(title="x" * 300, policy_name="y" * 300)
    reports = [*read_reports(stopped), long]
    inner = page_of(reports, tmp_path, MEASURE + "parent.postMessage(JSON.stringify(found), '*');")
    outer = tmp_path / "outer.html"
    listen = "addEventListener('message', (e) => { document.body.dataset.found = e.data; });"
    frame = f'<iframe src="{inner.name}" style="width:390px;height:844px;border:0"></iframe>'
    outer.write_text(f"<body><script>{listen}</script>{frame}</body>")
    found = json.loads(open_page(outer, tmp_path).data("found").replace("&quot;", '"'))
    assert found["inner"] == 390
    assert found["out"] == []
    assert found["page"] <= 390
    assert 300 < found["plot"] <= 390


def test_the_printed_page_has_everything(stopped, tmp_path):
    pdf, console = print_page(page_of(read_reports(stopped), tmp_path), tmp_path)
    assert console == ""
    assert pdf.startswith(b"%PDF")
    # Six sheets of A4, the policy unfolded. Columns narrower than their text would need many more.
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 6


def test_a_row_zooms_and_the_axes_switch(healed, tmp_path):
    script = """
    const plot = document.querySelector(".plot"), found = [];
    const note = () => found.push(
      [plot.layout.xaxis.range, plot.layout.yaxis.type, plot.layout.xaxis.title.text]);
    const press = (label) => [...document.querySelectorAll(".tools button")]
      .find((each) => each.textContent === label).click();
    note();
    document.querySelectorAll("tr[data-incident]")[0].querySelector("button").click(); note();
    press("log loss"); note();
    press("whole run"); press("as recorded"); note();
    document.body.dataset.found = JSON.stringify(found);
    document.body.dataset.chosen = document.querySelectorAll("tr.chosen").length;
    """
    (report,) = read_reports(healed)
    opened = open_page(page_of([report], tmp_path, script), tmp_path)
    assert opened.console == []
    whole, row, linear, recorded = json.loads(opened.data("found").replace("&quot;", '"'))
    case = report.incidents[0]
    assert whole[0][0] <= 0
    assert whole[0][1] >= report.curves.step.max()
    assert whole[0][0] < row[0][0] < case.onset_step < case.step < row[0][1] < whole[0][1]
    assert (whole[1], row[1], linear[1]) == ("log", "log", "linear")
    assert recorded[2] == "row, as recorded"
    assert recorded[0][1] >= len(report.curves.step) - 1 > whole[0][1]


def test_the_pointer_shows_values_zooms_and_chooses(healed, tmp_path):
    script = """
    const plot = document.querySelector(".plot"), found = {};
    const chart = () => plot.querySelector(".chart").getBoundingClientRect();
    const send = (kind, x, y) => plot.querySelector(".chart").dispatchEvent(new PointerEvent(kind,
      { bubbles: true, button: 0, clientX: chart().left + x, clientY: chart().top + y }));
    const range = () => plot.layout.xaxis.range.map(Math.round);
    send("pointermove", 600, 200);
    found.hover = [...plot.querySelectorAll(".hover div")].map((each) => each.textContent);
    send("pointerdown", 300, 200); send("pointermove", 400, 200); send("pointerup", 500, 200);
    found.zoomed = range();
    send("dblclick", 400, 200);
    found.whole = range();
    const loss = [...plot.querySelectorAll(".legend button")]
      .find((each) => each.textContent === "loss");
    found.lines = plot.querySelectorAll(".trace").length;
    loss.click();
    found.fewer = plot.querySelectorAll(".trace").length;
    const places = [...plot.querySelectorAll(".trace path[transform]")]
      .map((each) => each.getAttribute("transform").match(/[-\\d.]+/g).map(Number));
    for (const [x, y] of places) { send("pointerdown", x, y); send("pointerup", x, y); }
    found.chosen = document.querySelectorAll("tr.chosen").length;
    document.body.dataset.found = JSON.stringify(found);
    """
    (report,) = read_reports(healed)
    opened = open_page(page_of([report], tmp_path, script), tmp_path)
    assert opened.console == []
    found = json.loads(opened.data("found").replace("&quot;", '"'))
    assert any(text.startswith("loss ") for text in found["hover"])
    assert any(text.startswith("gradient norm ") for text in found["hover"])
    assert found["whole"][0] < found["zoomed"][0] < found["zoomed"][1] < found["whole"][1]
    assert found["fewer"] < found["lines"]
    assert found["chosen"] == 1


def test_hostile_texts_do_not_run(tmp_path):
    # Without the page's policy, which would forbid it, and which another test reads.
    opened = open_page(page_of([hostile()], tmp_path, "document.body.dataset.ran = 1"), tmp_path)
    assert opened.data("ran") == "1"
    assert opened.console == []
    assert "data-hacked" not in opened.dom
    assert opened.dom.count("<img") == 0


def test_odd_curves_draw(tmp_path):
    step = np.arange(100.0)
    nan = np.full(100, np.nan)
    bad = np.ones(100, bool)
    huge = np.where(step == 50, np.inf, 3e38)
    few = np.array([3.0, 2.0, 1.0])
    odd = [
        Curves(step, np.sin(step), grad_norm=nan),  # a signed loss
        Curves(step, nan, nonfinite=bad),  # never finite
        Curves(step, huge, nonfinite=~np.isfinite(huge), grad_norm=np.zeros(100)),
        Curves(step[:1], few[:1]),
        Curves(step, nan, grad_norm=step),  # no loss at all
        Curves(step[:3], few, isolated=True, lr_scale=few / 3),
    ]
    reports = [hostile()._replace(curves=series, title=str(i)) for i, series in enumerate(odd)]
    script = """
    scrollTo(0, document.body.scrollHeight);
    document.querySelectorAll("section").forEach((each) => each.scrollIntoView());
    dispatchEvent(new Event("beforeprint")); dispatchEvent(new Event("afterprint"));
    document.querySelectorAll(".tools button").forEach((each) => each.click());
    setTimeout(() => { document.body.dataset.drawn =
      document.querySelectorAll(".plot:has(.chart)").length; }, 500);
    """
    opened = open_page(page_of([*reports, empty()], tmp_path, script), tmp_path)
    assert opened.console == []
    assert opened.data("drawn") == str(len(odd))


def test_a_gap_is_a_break_and_a_stop_has_its_mark(tmp_path):
    step = np.r_[0.0:100.0, 200.0:300.0]
    action = ("ROLLBACK", "STOP")
    case = replace(
        hostile().incidents[0], action=action, mode=Mode.OBSERVE, stop_step=40.0, stop=40
    )
    series = Curves(step, np.linspace(2, 1, 200), index=np.arange(200))
    report = hostile()._replace(curves=series, incidents=(case,), mode=Mode.OBSERVE)
    script = """
    const data = document.querySelector(".plot").data;
    const loss = data.find((each) => each.name === "loss");
    const at = loss.x.indexOf(200);
    document.body.dataset.found = JSON.stringify([
      loss.x.slice(at - 2, at + 1), loss.y[at - 1],
      data.filter((each) => each.name && each.name.startsWith("would have"))
        .map((each) => [each.name, each.x[0]]),
    ]);
    """
    opened = open_page(page_of([report], tmp_path, script), tmp_path)
    assert opened.console == []
    around, value, marks = json.loads(opened.data("found").replace("&quot;", '"'))
    assert (around, value) == ([99, None, 200], None)
    assert marks == [["would have rolled back", 20], ["would have stopped", 40]]
