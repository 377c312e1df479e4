"""`HealingCallback` in a real Trainer under HF's default arguments."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from healcore.runtime.loop.termination import RunStopped
from healcore.torch import AttachError, HealingCallback
from tests.torch.trainers.huggingface import small_runs
from tests.torch.trainers.huggingface.small_runs import calling, counts, logged, trainer, weights


def mean_loss(of: Any) -> float:
    """The loss over all clean rows, with the final weights."""
    rows = small_runs.Rows(40)
    with torch.no_grad():
        return float(of.model(rows.x, rows.y)["loss"])


def test_one_nan_batch_is_noticed_in_its_step_and_the_run_completes(tmp_path: Path):
    callback = HealingCallback()
    sick = trainer(tmp_path / "sick", scaled={20: math.nan}, callbacks=[callback])
    seen: list[Any] = []

    def decided(state: Any, **_: Any) -> None:
        assert callback.healing is not None
        seen.append(callback.healing.last_decision())

    sick.add_callback(calling("on_step_end", decided))
    sick.train()
    healthy = trainer(tmp_path / "healthy")
    healthy.train()
    assert [i for i, decision in enumerate(seen) if decision.skip] == [20]
    assert sick.state.global_step == 40
    assert weights(sick).isfinite().all()
    assert mean_loss(sick) == pytest.approx(mean_loss(healthy), rel=0.15)
    assert counts(callback, "skips", "incidents") == [1, 1]


@pytest.mark.parametrize(("limit", "accumulated"), [(1.0, 1), (0.3, 3), (0.0, 1)])
def test_what_changes_nothing_changes_no_bit(tmp_path: Path, limit: float, accumulated: int):
    """Without clipping in the policy, and in observe mode, HF's own clipping stays, to the bit."""
    arguments = {"max_grad_norm": limit, "gradient_accumulation_steps": accumulated, "steps": 20}
    plain = trainer(tmp_path, **arguments)
    plain.train()
    for callback in (HealingCallback(clip=None), HealingCallback("observe")):
        healed = trainer(tmp_path, **arguments, callbacks=[callback])
        healed.train()
        assert torch.equal(weights(plain), weights(healed))
        assert logged(plain, "loss") == logged(healed, "loss")
        assert logged(plain, "grad_norm") == logged(healed, "grad_norm")


def test_the_policys_clip_is_really_applied(tmp_path: Path):
    """With plain SGD a step moves the weights by learning rate times the clipped norm."""
    moves = small_runs.Steps()
    run = trainer(
        tmp_path,
        scaled={30: 1000.0},
        callbacks=[HealingCallback(clip={"kind": "fixed", "max_norm": 0.5}), moves],
        optim="sgd",
        lr_scheduler_type="constant",
        learning_rate=0.01,
    )
    run.train()
    norms = logged(run, "grad_norm")
    assert norms[30] > 500  # the log has the norm before clipping
    expected = [0.01 * min(norm, 0.5) for norm in norms]
    assert moves.moved == pytest.approx(expected, rel=1e-3)


def test_a_clip_never_loosens_the_users_own(tmp_path: Path):
    callback = HealingCallback("zclip", clip={"max_norm": 1.0})
    applied: list[float] = []

    def note(state: Any, **_: Any) -> None:
        assert callback.healing is not None
        row = callback.healing.metrics()
        applied.append(float(row["heal/grad_norm"] * row["heal/grad_scale"]))

    callbacks = [callback, calling("on_step_end", note)]
    run = trainer(tmp_path, callbacks=callbacks, max_grad_norm=0.3)
    run.train()
    assert max(applied) == pytest.approx(0.3, rel=1e-3)
    assert run.args.max_grad_norm == 0.3


def test_the_halved_learning_rate_takes_effect(tmp_path: Path):
    """From the step of the cut on, weights move half as far: measured with sign-like updates."""
    callback = HealingCallback(
        respond=[{"to": ["nonfinite"], "do": ["skip", "cut_lr"]}],
        lr={"factor": 0.5, "hold_steps": 50, "ceiling": 1.0},
    )
    both = {"lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 1e-3}
    steps = small_runs.Steps()
    trainer(tmp_path, scaled={20: math.nan}, callbacks=[callback, steps], **both).train()
    moved = steps.moved
    assert moved[19] == pytest.approx(1e-2 * 1e-3, rel=0.01)  # every step is clipped to 1e-3
    assert moved[20] == 0
    assert moved[21] == pytest.approx(0.5e-2 * 1e-3, rel=0.01)
    assert counts(callback, "lr_cuts", "lr_scale") == [1, 0.5]


def test_a_stop_ends_training_with_a_diagnosis(tmp_path: Path):
    callback = HealingCallback(
        respond=[{"to": ["nonfinite"], "do": ["skip", "stop"], "when": {"consecutive": 3}}],
    )
    scaled = dict.fromkeys(range(10, 15), math.nan)
    run = trainer(tmp_path, scaled=scaled, callbacks=[callback])
    with pytest.raises(RunStopped, match="NaN or Inf") as stopped:
        run.train()
    assert run.state.global_step in (13, 14)
    assert isinstance(stopped.value, SystemExit)
    assert stopped.value.code  # a text: printed, and the process ends with status 1


def hooks_of(run: Any) -> int:
    optimizer = run.optimizer.optimizer
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


@pytest.mark.parametrize("late", [False, True])
def test_nothing_stays_after_an_exception(tmp_path: Path, late: bool):
    callback = HealingCallback()
    raises = calling("on_step_end", small_runs.raising(RuntimeError("stop here")), at=5)
    run = trainer(tmp_path, callbacks=[] if late else [callback, raises])
    if late:
        run.add_callback(callback)
        run.add_callback(raises)
    with pytest.raises(RuntimeError, match="stop here"):
        run.train()
    assert hooks_of(run) == 0
    assert not {"training_step", "log", "_run_epoch", "_mixed_mesh_grad_norm"} & set(vars(run))
    assert "clip_grad_norm_" not in vars(run.accelerator)


def test_a_row_of_the_log_has_what_has_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
):
    seen: list[dict[str, float]] = []

    # As the trackers of report_to, before the user's callbacks.
    tracker = calling("on_log", lambda state, *, logs, **_: seen.append(dict(logs)))
    run = trainer(tmp_path, callbacks=[tracker, HealingCallback()], scaled={7: math.nan})
    run.train()
    rows = [row for row in seen if "loss" in row]
    assert len(rows) == 40
    # A step is read after the next step.
    assert [i for i, row in enumerate(rows) if "heal/skips" in row] == [8]
    assert (rows[8]["heal/skips"], rows[8]["heal/incidents"]) == (1.0, 1.0)
    healthy = {"loss", "grad_norm", "learning_rate", "epoch", "heal/clips"}
    assert all(row.keys() <= healthy for i, row in enumerate(rows) if i != 8)
    assert not any(name.startswith("heal/") for row in seen if "loss" not in row for name in row)
    (line,) = (each for each in capsys.readouterr().err.splitlines() if "incident 1: " in each)
    assert "step 7: incident 1: nonfinite loss and nonfinite grad" in line
    assert ", learning rate 0.007" in line
    assert not [each for each in recwarn if "scheduler" in str(each.message)]


def test_an_order_to_save_saves(tmp_path: Path):
    callback = HealingCallback(respond=[{"to": ["nonfinite"], "do": ["skip", "save"]}])
    run = trainer(tmp_path, scaled={10: math.nan}, callbacks=[callback])
    run.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] in (
        ["checkpoint-11"],
        ["checkpoint-12"],  # read one step later
    )


def test_the_end_by_an_exception_is_reported(tmp_path: Path):
    """Without a store too: events, the postmortem, the report, and the user's tracker."""
    tracker = Tracked()
    callback = HealingCallback(trackers=tracker)
    raises = calling("on_step_end", small_runs.raising(ZeroDivisionError("here")), at=9)
    run = trainer(tmp_path, scaled={4: math.nan}, callbacks=[callback, raises])
    with pytest.raises(ZeroDivisionError):
        run.train()
    report = callback.report()
    assert (report.ending, report.steps, report.counts["skips"]) == ("exception", 9, 1)
    assert not report.converged
    assert report.postmortem is not None
    assert "ZeroDivisionError" in report.postmortem.read_text()
    assert len(tracker.steps) > 5
    assert not list(tmp_path.glob("**/step-*"))  # no checkpoint


class Tracked:
    """A tracker that keeps the steps whose numbers it receives."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self.steps.append(step)

    def event(self, event: Any) -> None:
        pass


def test_without_a_store_damaged_weights_stop_the_run(tmp_path: Path):
    callback = HealingCallback()

    def damage(state: Any, *, model: Any, **_: Any) -> None:
        with torch.no_grad():
            model.layers[0].weight[0, 0] = math.nan

    run = trainer(tmp_path, callbacks=[callback, calling("on_step_begin", damage, at=10)])
    with pytest.raises(RunStopped, match="needs a store"):
        run.train()
    assert run.state.global_step < 40


def test_a_callback_without_a_trainer_is_refused(tmp_path: Path):
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(AttachError, match="found no Trainer"):
        HealingCallback().on_train_begin(arguments, TrainerState(), TrainerControl())
