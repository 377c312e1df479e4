"""The page as text: complete, self-contained, and safe whatever the files contain."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from markupsafe import escape

from healcore.core.evidence import Evidence
from healcore.events.models import EventRecord
from healcore.history import Counts, Curves, Incident, Mode
from healcore.history.incident import count_incidents
from healcore.history.process import RunState
from healcore.history.run import AttemptOrigin, Mark, RunAttempt
from healcore.runtime.postmortem.sentences import outcome
from healcore.tools.report.page import render
from healcore.tools.report.run_report import RunReport
from healcore.tools.report.runs import read_reports

EVIL = "</script><script>document.body.dataset.hacked=1</script><img src=x onerror=alert(1)>&'\""


def hostile() -> RunReport:
    """A report in which every text wants to be a script."""
    step = np.arange(50.0)
    series = Curves(
        step=step,
        loss=np.exp(-step / 10),
        attempt=np.zeros(50, int),
        index=np.arange(50),
    )
    case = Incident(
        number=1,
        attempt=0,
        onset=20,
        index=22,
        onset_step=20.0,
        step=22.0,
        cause=(EVIL,),
        action=(EVIL, "ROLLBACK"),
        skipped=2,
        responses=(EventRecord(kind="stop", why=EVIL),),
        checkpoint=10,
        evidence=(Evidence(EVIL, 1.0),),
    )
    return RunReport(
        title=EVIL,
        mode=Mode.HEAL,
        policy_name=EVIL,
        policy_toml=EVIL,
        fingerprint=EVIL,
        curves=series,
        incidents=(case,),
        counts=count_incidents((case,)),
        facts={EVIL: EVIL},
        state=RunState.UNKNOWN,
        notes=(EVIL,),
        attempts=(
            RunAttempt(0, 0.0, AttemptOrigin.RECORDED, EVIL),
            RunAttempt(1, 0.0, AttemptOrigin.RECORDED, EVIL),
        ),
        marks=(Mark(30.0, EventRecord(kind="hook", hook=EVIL)),),
        diagnosis=f"{EVIL}\n  - {EVIL}\n    {EVIL}",
    )


class Elements(HTMLParser):
    """Every element with its attributes, and the text of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._in_script = self._in_script and tag != "script"

    def handle_data(self, data):
        if self._in_script:
            self.scripts[-1] += data


def test_nothing_is_loaded(healed):
    page = render(read_reports(healed))
    elements = Elements(page)
    for tag, attributes in elements.found:
        assert not {"src", "data", "srcset", "action", "ping"} & attributes.keys(), (
            tag,
            attributes,
        )
        assert (attributes.get("href") or "#").startswith("#"), (tag, attributes)
        assert tag not in {"link", "iframe", "img", "object", "embed", "base"}
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert style
    assert not re.search(r"url\(|@import", style[1])
    ours = elements.scripts[-1]
    assert not re.search(r"https?://|fetch\(|XMLHttpRequest|WebSocket|import\(|sendBeacon", ours)
    policy = next(a["content"] for t, a in elements.found if a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert "http" not in policy


def test_the_page_is_small_and_has_one_script_however_many_runs(healed, stopped):
    reports = [*read_reports(healed), *read_reports(stopped)]
    page = render(reports)
    assert len(page) < 300_000
    assert page.count("<script>") == render(reports[:1]).count("<script>") == 1
    assert page.count("<section") == 2
    assert re.findall(r'<a href="(#s\d)"', page) == ["#s0", "#s1"]


def test_the_data_is_strict_json(healed, stopped):
    def refuse(token: str):
        raise AssertionError(f"{token} is not JSON")

    for events in (healed, stopped):
        data = Elements(render(read_reports(events))).scripts[0]
        plot = json.loads(data, parse_constant=refuse)["runs"][0]
        rows = len(plot["step"])
        assert all(len(plot[name]) == rows for name in ("loss", "norm", "lr", "undone", "attempt"))


def test_every_incident_has_its_row(healed):
    (report,) = read_reports(healed)
    page = render([report])
    rows = re.findall(r'<tr id="s0-i(\d+)".*?</tr>', page)
    assert [int(row) for row in rows] == list(range(len(report.incidents)))
    for case in report.incidents:
        assert f"#{case.number}</button>" in page
        assert escape(outcome(case)) in page
    assert "epoch 0: 250–260 (skipped)" in page
    assert "1 → 0.25" in page
    assert "[budget]" in page
    assert report.fingerprint in page
    assert "completed" in page
    assert "from step 0 (the start): 1 incident;" in page  # the attempt's, undone or not


def test_texts_cannot_become_elements():
    elements = Elements(render([hostile(), hostile()]))
    assert [tag for tag, _ in elements.found].count("script") == 2
    assert "img" not in {tag for tag, _ in elements.found}
    assert not any(name.startswith("on") for _, attributes in elements.found for name in attributes)
    assert json.loads(elements.scripts[0])["runs"][0]["incidents"][0]["n"] == 1


def empty() -> RunReport:
    """A run with no event but its start."""
    nothing = Curves(np.zeros(0), np.zeros(0, np.float32))
    state = RunState.RUNNING
    return RunReport("nothing", Mode.HEAL, "default", "", "", nothing, (), Counts(), {}, state)


def test_a_run_without_rows_is_a_page():
    page = render([empty()])
    assert "nothing to draw" in page
    assert "No incident." in page


def test_no_run_is_no_page():
    with pytest.raises(ValueError, match="at least one"):
        render([])


def test_ten_thousand_incidents_are_a_page_that_opens():
    report = hostile()
    first = report.incidents[0]
    many = tuple(replace(first, number=i, onset_step=i % 50) for i in range(10_000))
    page = render([report._replace(incidents=many)])
    assert page.count("data-incident=") == 1000
    assert "9000 more are in the plot" in page
