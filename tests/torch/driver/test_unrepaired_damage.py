"""Damage that comes back after each rollback is not summed up as healed."""

import json

import pytest

from healcore import Healer
from healcore.tools.report.page import render
from healcore.tools.report.run_report import read_reports
from tests.healer.run_directory import new_process, postmortems
from tests.torch.driver.compared_run import STEPS, ComparedRun, at_change, events
from tests.torch.driver.test_damage_or_data import noise, times


def test_damage_that_comes_back_is_named_wherever_the_run_is_summed_up(tmp_path, capsys):
    run = ComparedRun()
    healer = run.train(tmp_path, at=at_change(lambda: times(run, 50.0), again=True))
    verdicts = [each["verdict"] for each in events(tmp_path, "assessment")]
    assert verdicts[-1] == "accepted"
    assert verdicts.count("accepted") == 1
    accepted = events(tmp_path, "assessment")[-1]
    assert "come back after 2 rollbacks" in accepted["why"]
    said = f"damage since step {accepted['onset']} was not repaired"

    line = capsys.readouterr().err.splitlines()[-1]
    assert f"completed after step {STEPS}: {said}; " in line
    assert "rolled back 3 times" in line
    assert "left out" not in line, "the batches of the tries were read again"

    report = healer.report()
    assert (report.ending, report.converged) == ("completed", False)
    assert report.unrepaired == (accepted["onset"],)
    assert said in str(report)
    assert "on purpose" in " ".join(report.advice)

    (file,) = tmp_path.glob("*.postmortem.*.json")
    written = json.loads(file.read_text())
    assert written["unrepaired"] == [accepted["onset"]]
    assert said in " ".join(written["diagnosis"].split())

    reports = read_reports(tmp_path / "e.jsonl")
    page = render(reports)
    assert '<span class="badge open">completed, with damage</span>' in page
    assert said in page


def test_a_change_of_the_program_is_no_damage_if_the_loss_is_lower_at_the_end(tmp_path, capsys):
    """It comes back in the repeat, and the rest of the training makes up for it."""

    def train() -> Healer:
        run = ComparedRun()
        run.optimizer.param_groups[0]["lr"] = 1e-3  # so the loss still falls at the change
        reset = at_change(lambda: noise(run, 1.0), again=True)
        return run.train(tmp_path, at=reset, steps=640, store=tmp_path / "store")

    healer = train()
    accepted, recovered = events(tmp_path, "assessment")[-2:]
    assert (accepted["verdict"], recovered["verdict"]) == ("accepted", "recovered")
    assert recovered["onset"] == accepted["onset"]
    said = f"nothing is left of the damage since step {accepted['onset']}: the mean loss is "
    said_line, last_line = capsys.readouterr().err.splitlines()[-2:]
    assert said in said_line
    assert "probably your program made the change itself" in said_line
    assert "completed after step 640: rolled back once; " in last_line
    assert (healer.report().unrepaired, healer.report().converged) == ((), True)
    (written,) = postmortems(tmp_path)
    assert written["unrepaired"] == []
    assert "has recovered from the damage" in " ".join(written["diagnosis"].split())
    page = render(read_reports(tmp_path / "e.jsonl"))
    assert '<span class="badge good">completed</span>' in page
    new_process()
    assert train().report().unrepaired == (), "the record of the run knows it too"


@pytest.mark.slow
@pytest.mark.parametrize("step", [215, STEPS - 5])
def test_a_restart_knows_the_damage_that_was_not_repaired(tmp_path, step, capsys):
    """Killed in the last pass, shortly after its rollback and at its end."""
    run = ComparedRun()
    edit = at_change(lambda: times(run, 50.0), again=True)

    def end(healer: Healer) -> None:
        edit(healer)
        if healer.step == step and healer.report().unrepaired:
            raise SystemExit(1)

    healer = run.train(tmp_path, at=end, store=tmp_path / "store")
    onsets = healer.report().unrepaired
    assert len(onsets) == 1
    run = ComparedRun()
    edit = at_change(lambda: times(run, 50.0), again=True)
    healer = run.train(tmp_path, at=edit, store=tmp_path / "store")
    assert (healer.report().unrepaired, healer.report().converged) == (onsets, False)
    assert f"damage since step {onsets[0]} was not" in capsys.readouterr().err.splitlines()[-1]
    (report,) = read_reports(tmp_path / "e.jsonl")
    assert report.unrepaired == onsets
