"""Real runs of the Healer, in both frameworks: every line that they write follows the schema."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from healcore.core.decision import Action
from healcore.events import read
from healcore.events.kinds import KINDS
from healcore.policy import fingerprint
from healcore.runtime.healer import Healer
from healcore.runtime.reporting.postmortem import path_for
from healcore.runtime.run.ending.exits import RunStopped
from healcore.tools.report.run_report import read_reports
from tests.events.sample_events import problems
from tests.healer.run_directory import flip_a_bit
from tests.healer.training_loops import (
    BOTH_FRAMEWORKS,
    Faults,
    TorchLoop,
    broken_at,
    loop_of,
    rules,
    train,
)

pytestmark = pytest.mark.slow  # many runs; the other tests here read events


def kinds_in(path: Path) -> set[str]:
    """The kinds in a file, every event of which is valid and has its run's postmortem."""
    history = read(path)
    assert history.problems == []
    for event in history.events:
        assert problems(event) == []
    for run, events in history.by_process().items():
        content = json.loads(path_for(path, run).read_text())
        assert content["ending"] == events[-1]["ending"]
    return {event["kind"] for event in history.events}


def wrong_then_right(incident):
    if incident.number == 1:
        raise ValueError("a hook with a mistake in it")
    return incident.action | Action.SAVE


@BOTH_FRAMEWORKS
def test_a_run_with_all_sorts_of_trouble(framework, tmp_path):
    path = tmp_path / "run.events.jsonl"
    policy = rules(recoveries=2)
    options = {"store": tmp_path / "store", "events": path}
    # A transient fault and one that stays; what the loop raises ends the run.
    loop = loop_of(framework, Faults(once=[8], always=[19]), policy)
    hooks = {"before": broken_at(27), "on_incident": wrong_then_right}
    with pytest.raises(RuntimeError, match="power"):
        train(loop, policy, range(40), **hooks, **options)
    # The newest checkpoint is damaged. Then the budget is spent.
    flip_a_bit(max((tmp_path / "store").glob("step-*")), seed=1)
    loop = loop_of(framework, Faults(always=range(28, 40)), policy)
    with pytest.raises(RunStopped):
        train(loop, policy, range(40), **options)
    # For alerts see tests/healer/test_alerts.py.
    absent = {"save_failed", "problem", "assessment"}
    assert kinds_in(path) >= set(KINDS) - absent


@BOTH_FRAMEWORKS
def test_the_settings_of_a_run_are_in_its_events_and_its_report(framework, tmp_path):
    loop = loop_of(framework, policy=rules())
    path = tmp_path / "run.events.jsonl"
    known: dict[str, Any] = {"policy": f"test ({fingerprint(rules())[:8]})"}
    if isinstance(loop, TorchLoop):  # as a trainer does
        sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        loop.optimizer.run_settings = sizes  # type: ignore[attr-defined]
        known |= {"learning_rate": 0.01, "batch_size": 4, "accumulation": 2, "optimizer": "AdamW"}
        known["precision"] = "float32"
    data: Any = DataLoader(range(3), batch_size=1)  # type: ignore[arg-type]
    train(loop, rules(), data, events=path)
    (start,) = (e["settings"] for e in read(path).events if "settings" in e)
    assert {k: start.get(k) for k in known} == known
    (report,) = read_reports(path)
    assert "number of ranks 1" in report.facts["Settings"]
    assert ("precision float32" in report.facts["Settings"]) == ("precision" in known)


def test_a_restart_names_the_keys_of_a_policy_that_differ(tmp_path, caplog):
    """Both policies have the name "default"."""
    model = torch.nn.Linear(1, 1)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    with suppress(ValueError), Healer("default", state=state, store=tmp_path) as healer:
        for _ in healer.batches([torch.ones(1, 1)]):
            raise ValueError
    with Healer("default", state=state, store=tmp_path, rollback={"probation": 7}) as healer:
        for batch in healer.batches([torch.ones(1, 1)]):
            loss = model(batch).mean()
            healer.observe(loss)
            loss.backward()
            state["optimizer"].step()
    assert "default with rollback.probation = 7 (" in caplog.text


@BOTH_FRAMEWORKS
def test_out_of_memory_writes_a_profile(framework, tmp_path):
    def before(healer: Healer, number: int) -> None:
        if number == 7:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB.")

    path = tmp_path / "run.events.jsonl"
    with pytest.raises(torch.OutOfMemoryError):
        train(loop_of(framework, policy=rules()), rules(), range(9), events=path, before=before)
    (problem,) = (event["problem"] for event in read(path).events if event["kind"] == "fault")
    assert "memory profile" in next(tmp_path.glob("run.postmortem.*")).read_text()
    profiles = {each.suffix: each for each in tmp_path.glob("run.memory.*")}
    if framework == "torch":
        assert "parameters" in profiles[".txt"].read_text()
    assert set(profiles) == ({".txt"} if framework == "torch" else {".prof"})
    assert all(each.name in problem and each.stat().st_size for each in profiles.values())


def test_each_smaller_part_names_the_memory_profile(tmp_path):
    model = torch.nn.Linear(2, 1)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with Healer("default", state=state, store=tmp_path) as healer:
        for batch in healer.batches([torch.ones(4, 2)]):
            for part in healer.microbatches(batch):
                with part:
                    model(part.batch).sum().backward()
                    if len(part.batch) > 1:
                        raise torch.OutOfMemoryError("CUDA out of memory.")
            state["optimizer"].step()
    found = [e["problem"] for e in read(tmp_path / "healcore.events.jsonl").events if "sign" in e]
    assert all("memory profile: healcore.memory." in each for each in found)
    assert len(found) == 2


def test_lines_of_an_error_are_errors_and_name_their_page(caplog, tmp_path):
    with pytest.raises(RunStopped):
        train(loop_of("torch", Faults(always=range(9, 40))), rules(recoveries=1), range(40))
    with pytest.raises(RuntimeError, match="power"):
        train(loop_of("torch"), "default", range(9), before=broken_at(7), store=tmp_path)
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    pages = [each.message for each in caplog.records if "docs/faults.md" in each.message]
    assert [page[-len("nan_loss") :] for page in pages] == ["nan_loss"], "once"
    for part in ("stopped by the policy (the budget", "RuntimeError: power", "by an exception"):
        assert any(part in line and "does not classify" not in line for line in errors), part
