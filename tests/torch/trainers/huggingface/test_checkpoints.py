"""A bad checkpoint of a real Trainer is never the one to resume from, and none is deleted."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from healcore.runtime.loop.termination import RunStopped
from healcore.torch import HealingCallback
from healcore.torch.trainers.huggingface import checkpoints
from tests.torch.trainers.huggingface.small_runs import Rows, calling, trainer, weights

SAVES = {"save_strategy": "steps", "save_steps": 10}
SHORT = {"probation": 5, "confirm": False}
FILES = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors")


def breaks(step: int) -> TrainerCallback:
    """Writes NaN into a weight, as a faulty device would."""

    def write(state: Any, *, model: Any, **_: Any) -> None:
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] = math.nan

    return calling("on_step_begin", write, at=step)


def saved_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_a_checkpoint_with_nan_is_never_saved_and_the_run_stops(tmp_path: Path):
    run = trainer(tmp_path, callbacks=[HealingCallback(), breaks(17)], **SAVES)
    with pytest.raises(RunStopped, match=r"layers.0.weight"):
        run.train()
    assert saved_in(tmp_path) == ["checkpoint-10"]
    again = trainer(tmp_path, callbacks=[HealingCallback()], **SAVES)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 40
    assert weights(again).isfinite().all()


def test_the_policy_may_let_it_pass_with_an_alert(tmp_path: Path):
    callback = HealingCallback(rollback={"nonfinite_state": "alert"}, respond=[])
    run = trainer(tmp_path, callbacks=[callback, breaks(17)], **SAVES)
    run.train()
    assert saved_in(tmp_path) == ["checkpoint-10"]


def test_the_best_one_is_not_saved_with_nan_either(tmp_path: Path):
    """save_strategy="best" decides on saving after the last event that could prevent it."""
    run = trainer(
        tmp_path,
        callbacks=[HealingCallback(respond=[]), breaks(17)],
        save_strategy="best",
        eval_strategy="steps",
        eval_steps=20,
        metric_for_best_model="eval_runtime",  # of a model with NaN this one is finite
        eval_dataset=Rows(2),
    )
    run.train()
    assert saved_in(tmp_path) == []
    assert len(list((tmp_path / "_healcore").glob("checkpoint-*"))) >= 1


def test_healthy_steps_make_a_checkpoint_known_good(tmp_path: Path):
    callback = HealingCallback(rollback=SHORT)
    run = trainer(tmp_path, scaled={12: math.nan}, callbacks=[callback], **SAVES)
    run.train()
    status = {p.name: checkpoints.read_record(p) for p in checkpoints.list_checkpoints(tmp_path)}
    found = {name: record.status for name, record in status.items() if record is not None}
    assert found == {
        "checkpoint-10": "good",
        "checkpoint-20": "good",
        "checkpoint-30": "good",
        "checkpoint-40": "candidate",
    }
    report: Any = callback.report()
    assert report.last_good == 30


def test_one_that_turns_out_bad_is_moved_away_not_deleted(tmp_path: Path):
    """A rollback is ordered at step 22 for trouble since step 18: checkpoint 20 is from within."""
    callback = HealingCallback(
        rollback={"probation": 15, "confirm": False},
        respond=[{"to": ["nonfinite"], "do": ["skip", "rollback"], "when": {"consecutive": 5}}],
        max_skips=0,
    )
    scaled = dict.fromkeys(range(18, 23), math.nan)
    run = trainer(tmp_path, scaled=scaled, callbacks=[callback], steps=26, **SAVES)
    run.train()
    assert saved_in(tmp_path) == ["checkpoint-10", "checkpoint-26"]
    moved = tmp_path / "_healcore" / "checkpoint-20"
    assert (moved / "model.safetensors").is_file()
    record = json.loads((moved / "healcore.json").read_text())
    assert record["status"] == "quarantined"
    assert "nonfinite" in record["why"]
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-26")


def test_the_best_model_can_still_be_loaded_from_there(tmp_path: Path):
    callback = HealingCallback(
        rollback={"probation": 15, "confirm": False},
        respond=[{"to": ["nonfinite"], "do": ["skip", "rollback"], "when": {"consecutive": 5}}],
        max_skips=0,
    )
    run = trainer(
        tmp_path,
        scaled=dict.fromkeys(range(18, 23), math.nan),
        callbacks=[callback],
        steps=26,
        eval_strategy="steps",
        eval_steps=10,
        eval_dataset=Rows(2),
        load_best_model_at_end=True,
        metric_for_best_model="steps_per_second",
        **SAVES,
    )
    run.state.best_metric = None

    def rate(state: Any, *, metrics: Any, **_: Any) -> None:
        """The checkpoint of step 20 is the best by its evaluation."""
        metrics["eval_steps_per_second"] = 1.0 if state.global_step == 20 else 0.5

    run.add_callback(calling("on_evaluate", rate))
    run.train()
    assert run.state.best_model_checkpoint == str(tmp_path / "_healcore" / "checkpoint-20")


def test_what_a_kill_cut_off_is_not_resumed_from(tmp_path: Path):
    first = trainer(tmp_path, callbacks=[HealingCallback()], **SAVES)
    first.train()
    (tmp_path / "checkpoint-40" / "trainer_state.json").unlink()
    shutil.copytree(tmp_path / "checkpoint-30", tmp_path / "checkpoint-50")
    state = tmp_path / "checkpoint-50" / "trainer_state.json"
    state.write_text(state.read_text()[:100])
    empty = tmp_path / "checkpoint-60"
    empty.mkdir()
    again = trainer(tmp_path, callbacks=[HealingCallback()], **SAVES)
    resumed: list[int] = []

    begin = lambda state, **_: resumed.append(state.global_step)  # noqa: E731
    again.add_callback(calling("on_train_begin", begin))
    again.train(resume_from_checkpoint=True)
    assert resumed == [30]
    assert {p.name for p in (tmp_path / "_healcore").glob("checkpoint-*")} == {
        "checkpoint-40",
        "checkpoint-50",
        "checkpoint-60",
    }
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-40")


@pytest.mark.parametrize("recorded", [True, False], ids=["healed", "unhealed"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "missing"])
@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_with_a_damaged_file_gives_way_to_the_older_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, damage: str, recorded: bool
):
    callbacks = [HealingCallback()] if recorded else []
    first = trainer(tmp_path, callbacks=callbacks, steps=20, **SAVES)
    first.train()
    path = tmp_path / "checkpoint-20" / name
    size = path.stat().st_size
    path.unlink() if damage == "missing" else os.truncate(path, size // 2 * (damage != "empty"))
    again = trainer(tmp_path, callbacks=[HealingCallback()], steps=20, **SAVES)
    again.train(resume_from_checkpoint=True)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "moved to" in line]
    assert path.stem in line
    assert line.endswith("resumes from checkpoint-10")
    if recorded:  # otherwise the first run has no clipping
        assert torch.equal(weights(again), weights(first))


def test_the_only_checkpoint_without_an_optimizer_is_not_resumed_from(tmp_path: Path):
    trainer(tmp_path, callbacks=[HealingCallback()], steps=10, **SAVES).train()
    (tmp_path / "checkpoint-10" / "optimizer.pt").unlink()
    assert "optimizer.pt" in checkpoints.find_defect(tmp_path / "checkpoint-10")


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "optimizer_0/__0_0.distcp"])
@pytest.mark.parametrize("left", [None, 50])
def test_a_shard_may_be_missing_or_truncated(tmp_path: Path, name: str, left: int | None):
    """Folders as FSDP writes, and sharded safetensors."""
    path = tmp_path / "checkpoint-10"
    (path / "optimizer_0").mkdir(parents=True)
    (path / "optimizer_0" / "__0_0.distcp").write_bytes(bytes(100))
    (path / "trainer_state.json").write_text("{}")
    for shard in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        save_file({"weight": torch.ones(3)}, path / shard)
    kept = checkpoints.TrainerCheckpoints(tmp_path, probation=1, writes=True)
    kept.add(10, in_trouble=False)
    assert kept.mark_good([], 12) == [10]
    assert checkpoints.find_defect(path) == ""
    (path / name).unlink() if left is None else os.truncate(path / name, left)
    assert name in checkpoints.find_defect(path)


@pytest.mark.parametrize("later", [True, False])
def test_a_run_may_change_which_files_its_checkpoints_have(tmp_path: Path, later: bool):
    """`save_only_model` is switched on or off: the newest checkpoint is complete."""
    for steps, only in ((10, later), (20, not later)):
        run = trainer(
            tmp_path, callbacks=[HealingCallback()], steps=steps, save_only_model=only, **SAVES
        )
        run.train(resume_from_checkpoint=steps == 20)
    assert checkpoints.resume_target(tmp_path) == (tmp_path / "checkpoint-20", {})


def test_a_checkpoint_of_an_unhealed_run_with_nan_is_not_resumed_from(tmp_path: Path):
    sick = trainer(tmp_path, scaled={25: math.nan}, **SAVES)
    sick.train()
    again = trainer(tmp_path, scaled={25: math.nan}, callbacks=[HealingCallback()], **SAVES)
    # As HF's example scripts do, which ask before there is a Trainer.
    again.train(resume_from_checkpoint=get_last_checkpoint(str(tmp_path)))
    assert weights(again).isfinite().all()
    assert again.state.global_step == 40


def test_an_older_checkpoint_named_by_the_user_is_taken(tmp_path: Path):
    trainer(tmp_path, callbacks=[HealingCallback()], **SAVES).train()
    (tmp_path / "checkpoint-40" / "trainer_state.json").unlink()
    again = trainer(tmp_path, callbacks=[HealingCallback()], **SAVES)
    assert again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-20"))
    assert (tmp_path / "checkpoint-40" / "trainer_state.json").is_file()


def test_where_nothing_good_is_left_training_begins_anew(tmp_path: Path):
    (tmp_path / "checkpoint-10").mkdir(parents=True)
    run = trainer(tmp_path, callbacks=[HealingCallback()], steps=5)
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == 5
    with pytest.raises(ValueError, match="No valid checkpoint"):  # HF's own: there is none at all
        trainer(tmp_path, callbacks=[HealingCallback()], steps=5).train(resume_from_checkpoint=True)


def test_save_total_limit_leaves_the_newest_known_good_one(tmp_path: Path):
    def age(state: Any, **_: Any) -> None:
        """Ten seconds between two saves: below one the Trainer orders folders by number."""
        for path in tmp_path.glob("checkpoint-*"):
            found = path.stat().st_mtime
            os.utime(path, (found - 10, found - 10))

    # 10 becomes known-good; NaN batches keep 20, 30 and 40 on probation.
    scaled = dict.fromkeys([*range(21, 28, 2), *range(31, 38, 2)], math.nan)
    callback = HealingCallback(rollback={"probation": 9, "confirm": False})
    callbacks = [callback, calling("on_save", age)]
    run = trainer(tmp_path, scaled=scaled, callbacks=callbacks, save_total_limit=2, **SAVES)
    run.train()
    report: Any = callback.report()
    assert report.last_good is not None
    assert saved_in(tmp_path) == [f"checkpoint-{report.last_good}", "checkpoint-40"]


def test_in_observe_mode_nothing_is_moved_or_written(tmp_path: Path):
    run = trainer(tmp_path, callbacks=[HealingCallback("observe"), breaks(17)], **SAVES)
    run.train()
    assert len(saved_in(tmp_path)) == 4
    assert not list(tmp_path.glob("checkpoint-*/healcore.json"))
