"""ArcticTraining's own loop on one process: skips, rollbacks, labels, positions, stops."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.healer.run_directory import new_process
from tests.torch.forked_ranks import Worlds, folder, serve, worlds_of
from tests.torch.trainers.deepspeed_engines import prepare
from tests.torch.trainers.huggingface.small_runs import raising

worlds = worlds_of("tests.torch.trainers.test_arctic", 300)
TWO_EPOCHS = [*range(9)] * 2


@pytest.fixture(scope="module")
def kinds() -> Any:
    """The module with the trainers. DeepSpeed keeps the groups of its first setup."""
    for library in ("deepspeed", "arctic_training"):
        pytest.importorskip(library, reason="run by make test-deepspeed")
    prepare()
    from tests.torch.trainers import arctic_trainers

    return arctic_trainers


def test_one_nan_batch_is_skipped_exactly(kinds: Any, tmp_path: Path):
    trainer = kinds.TinyTrainer(tmp_path, bad=5)
    trainer.train()
    assert trainer.global_step == 9
    assert trainer.healcore.report().counts["skips"] == 1
    assert all(map(torch.equal, trainer.after[2], trainer.after[3]))
    assert not any(map(torch.equal, trainer.after[3], trainer.after[4]))
    assert all(bool(p.isfinite().all()) for p in trainer.weights)


def test_a_checkpoint_of_arctic_training_has_the_step_of_its_weights(kinds: Any, tmp_path: Path):
    trainer = kinds.TinyTrainer(tmp_path, save_every=3)
    trainer.train()
    found = {}
    for path in tmp_path.glob("epoch_*"):
        content = torch.load(path / "mp_rank_00_model_states.pt", weights_only=False)
        found[int(path.name.rsplit("_", 1)[1])] = content
    assert sorted(found) == [3, 6]  # ArcticTraining saves with the first batch after the step
    for step, content in found.items():
        assert all(map(torch.equal, content["module"].values(), trainer.after[step]))
        assert content["global_step"] == content["global_steps"] == step


def test_a_rollback_within_the_run(kinds: Any, tmp_path: Path):
    """From the second epoch to a checkpoint of the first; the run leaves events and a report."""
    trainer = kinds.RollingBack(tmp_path, bad=8)
    trainer.train()
    report = trainer.healcore.report()
    assert len(report.rollbacks) == 1
    assert all(bool(p.isfinite().all()) for p in trainer.weights)
    assert trainer.train_batch_idx == trainer.model.micro_steps
    events = tmp_path / "_healcore" / "healcore.events.jsonl"
    kinds_of = [json.loads(line)["kind"] for line in events.read_text().splitlines()]
    assert kinds_of.count("rollback") == 1
    assert kinds_of[-1] == "end"


def test_an_exception_ends_the_run_with_a_postmortem(kinds: Any, tmp_path: Path):
    trainer = kinds.TinyTrainer(tmp_path, at=(5, raising(ValueError("broken"))))
    with pytest.raises(ValueError, match="broken"):
        trainer.train()
    assert trainer.healcore.report().ending == "exception"
    assert list((tmp_path / "_healcore").glob("*postmortem*"))


@pytest.mark.parametrize("stop", [1, 4, 5, 8])
def test_a_resume_replays_no_batch_and_loses_none(stop: int, kinds: Any, tmp_path: Path):
    """Under accumulation, also where a step has batches of two epochs."""
    whole = kinds.TinyTrainer(tmp_path / "whole")
    whole.train()
    assert whole.read == TWO_EPOCHS
    first = kinds.TinyTrainer(tmp_path / "parts", exit_iteration=stop)
    first.train()
    assert "exit_iteration" in first.early_stop_reason
    second = kinds.TinyTrainer(tmp_path / "parts")
    second.train()
    assert first.read + second.read == TWO_EPOCHS
    assert second.global_step == 9
    assert all(map(torch.equal, second.weights, whole.weights))
    new_process()
    third = kinds.TinyTrainer(tmp_path / "parts")
    third.train()
    assert (third.read, third.global_step) == ([], 9)


def test_the_kill_switch_stops_between_two_steps(kinds: Any, tmp_path: Path):
    # The fifth batch begins the third step.
    trainer = kinds.TinyTrainer(tmp_path, at=(4, (tmp_path / "stop").touch))
    trainer.train()
    assert "kill switch" in trainer.early_stop_reason
    assert trainer.read == [0, 1, 2, 3, 4, 5]
    assert trainer.global_step == 3


def test_a_kill_switch_that_one_rank_sees_stops_both(kinds: Any, worlds: Worlds):
    first, second = worlds.of(2, [], "stopped")
    assert first[:2] == second[:2] == [3, 6], "steps and batches"
    assert first[2] == "another rank has a reason to stop"
    assert "kill switch" in second[2]


def stopped(_: str) -> list[Any]:
    """Trains until rank 1, which alone is asked to stop, finds its kill switch."""
    rank = dist.get_rank()
    prepare(rank, 2)
    from tests.torch.trainers.arctic_trainers import TinyTrainer

    stop = folder() / f"stop-{rank}"
    at = (5, stop.touch) if rank == 1 else (-1, bool)
    trainer: Any = TinyTrainer(folder(), at=at, kill_switch_path=stop)
    trainer.train()
    return [trainer.global_step, len(trainer.read), trainer.early_stop_reason]


if __name__ == "__main__":
    serve(stopped, seconds=300, cases=["stopped"])
