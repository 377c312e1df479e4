"""The page as text: complete, self-contained, and safe whatever the files contain."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from markupsafe import escape

from healcore.events.models import EventRecord, EvidenceRecord
from healcore.history import Counts, Curves, Incident, Mode, RunState
from healcore.history.incident import count_incidents
from healcore.history.run import RunAttempt
from healcore.tools.report.page import outcome, render
from healcore.tools.report.run_report import RunReport, read_reports

EVIL = (
    "</script><script>document.body.dataset.hacked=1</script><img src=x onerror=alert(1)>&'\"$x^{"
)


def hostile() -> RunReport:
    """A report in which every text wants to be a script."""
    step = np.arange(50.0)
    case = Incident(
        number=1, attempt=0, onset_step=20.0, step=22.0, cause=(EVIL,), action=(EVIL, "ROLLBACK"),
        skipped=2, responses=(EventRecord(kind="stop", why=EVIL),), checkpoint=10,
        evidence=(EvidenceRecord(name=EVIL, grad_norm=1.0),),
    )  # fmt: skip
    return RunReport(
        title=EVIL, mode=Mode.HEAL, policy_name=EVIL, policy_toml=EVIL, fingerprint=EVIL,
        curves=Curves(step, np.exp(-step / 10), attempt=np.zeros(50, int)),
        incidents=(case,), counts=count_incidents((case,)), facts={EVIL: EVIL},
        state=RunState.UNKNOWN, notes=(EVIL,),
        attempts=(RunAttempt(0, 0.0, EVIL), RunAttempt(1, 0.0, EVIL, 9.0)),
        alarms_outside={3.0: (EVIL,)},
        diagnosis=f"{EVIL}\n  - {EVIL}\n    {EVIL}",
    )  # fmt: skip


class Elements(HTMLParser):
    """Every element with its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_nothing_is_loaded(healed):
    page = render(read_reports(healed))
    elements = Elements(page)
    for tag, attributes in elements.found:
        assert tag not in {"script", "link", "iframe", "object", "embed", "base"}
        assert not {"srcset", "action", "ping"} & attributes.keys()
        assert all((attributes.get(e) or "#")[0] == "#" for e in ("href", "xlink:href", "src"))
    assert not re.search(r"url\((?!#)|@import", page)
    policy = next(a["content"] for t, a in elements.found if a.get("http-equiv"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_several_runs_have_an_overview(healed, stopped):
    page = render([*read_reports(healed), *read_reports(stopped)])
    assert page.count("<section") == page.count("<figure") == 2
    assert re.findall(r'<a href="(#s\d)"', page) == ["#s0", "#s1"]


def test_every_incident_has_its_row(healed):
    (report,) = read_reports(healed)
    page = render([report])
    assert page.count('<tr class="incident">') == len(report.incidents)
    texts = [*(f"#{case.number}: " for case in report.incidents), report.fingerprint, "[budget]"]
    texts += ["epoch 0: 250–260 (11 skipped)", "1 → 0.25", "completed"]
    texts += ["from step 0 (start): 1 incident;"]  # the attempt's, undone or not
    assert not [text for text in texts if text not in page]
    assert all(escape(outcome(case)) in page for case in report.incidents)


def test_texts_cannot_become_elements():
    elements = Elements(render([hostile(), hostile()]))
    assert not {"script", "img"} & {tag for tag, _ in elements.found}
    assert [tag for tag, _ in elements.found].count("svg") == 4  # two figures in two widths
    assert not any(name.startswith("on") for _, attributes in elements.found for name in attributes)


def empty() -> RunReport:
    """A run with no event but its start."""
    nothing = Curves(np.zeros(0), np.zeros(0, np.float32))
    state = RunState.RUNNING
    return RunReport("nothing", Mode.HEAL, "default", "", "", nothing, (), Counts(), {}, state)


def test_a_run_without_rows_is_a_page():
    page = render([empty()])
    assert "No curves" in page
    assert "No incident." in page


def test_the_programs_of_the_documentation_run(healed, tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[3] / "docs" / "reports.md").read_text()
    monkeypatch.chdir(tmp_path)
    shutil.copy(healed, "run.events.jsonl")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    found = [block for block in blocks if "read_reports" in block or "runs_of" in block]
    assert len(found) == 2
    for program in found:
        exec(program, {})
    assert "</html>" in Path("run.html").read_text()
    assert "completed" in capsys.readouterr().out.lower()
