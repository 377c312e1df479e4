"""`HealingCallback` in a real Trainer under HF's default arguments."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from healcore.runtime.loop.termination import RunStopped
from healcore.torch import AttachError, HealingCallback
from tests.torch.sync_counter import CountSyncs
from tests.torch.trainers.huggingface import small_runs
from tests.torch.trainers.huggingface.small_runs import (
    Steps,
    calling,
    counts,
    logged,
    trainer,
    weights,
)


def test_one_nan_batch_is_noticed_in_its_step_and_the_run_completes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
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
    rows = small_runs.Rows(40)  # without NaN
    with torch.no_grad():
        losses = [float(each.model(rows.x, rows.y)["loss"]) for each in (sick, healthy)]
    assert losses[0] == pytest.approx(losses[1], rel=0.15)
    assert counts(callback, "skips", "incidents") == [1, 1]
    assert "has no checkpoint" not in capsys.readouterr().err, "the Trainer has the checkpoints"


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
    moves = Steps()
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
    (line,) = (each for each in capsys.readouterr().err.splitlines() if "incident 1: " in each)
    assert "step 7: incident 1: nonfinite loss and nonfinite grad" in line
    assert ", learning rate 0.007" in line
    assert not [each for each in recwarn if "scheduler" in str(each.message)]


def test_the_last_row_of_the_log_has_the_last_steps(tmp_path: Path):
    callback = HealingCallback(store=tmp_path / "store")
    run = trainer(tmp_path, callbacks=[callback], scaled={39: math.nan})
    run.train()
    assert run.state.log_history[-1]["heal/skips"] == 1.0
    assert "train_loss" in run.state.log_history[-1]


def test_an_order_to_save_saves(tmp_path: Path):
    callback = HealingCallback(respond=[{"to": ["nonfinite"], "do": ["skip", "save"]}])
    trainer(tmp_path, scaled={10: math.nan}, callbacks=[callback]).train()
    (path,) = tmp_path.glob("checkpoint-*")
    assert path.name in ("checkpoint-11", "checkpoint-12")  # read one step later


@pytest.mark.parametrize("late", [False, True])
def test_the_end_by_an_exception_is_reported_and_nothing_stays(tmp_path: Path, late: bool):
    """Without a store: events, the postmortem, the report, and the user's tracker."""
    tracked: list[int] = []
    received = lambda step, values: tracked.append(step)  # noqa: E731
    callback = HealingCallback(trackers=SimpleNamespace(metrics=received, event=bool))
    raises = calling("on_step_end", small_runs.raising(ZeroDivisionError("here")), at=9)
    own = [callback, raises]
    run = trainer(tmp_path, scaled={4: math.nan}, callbacks=[] if late else own)
    for each in own if late else []:
        run.add_callback(each)
    run.log = set_by_user = run.log
    with pytest.raises(ZeroDivisionError):
        run.train()
    assert run.log is set_by_user
    report = callback.report()
    assert (report.ending, report.steps, report.counts["skips"]) == ("exception", 9, 1)
    assert not report.converged
    assert report.postmortem is not None
    assert "ZeroDivisionError" in report.postmortem.read_text()
    assert len(tracked) > 5
    assert not list(tmp_path.glob("**/step-*"))  # no checkpoint
    optimizer = run.optimizer.optimizer
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not {"training_step", "_run_epoch", "_mixed_mesh_grad_norm"} & set(vars(run))
    assert "clip_grad_norm_" not in vars(run.accelerator)


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


class TokenMean(small_runs.Net):
    """Divides the loss of each micro-batch by the tokens of all of them."""

    accepts_loss_kwargs = True

    def forward(self, x: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        kept = labels != -100
        total = ((self.layers(x).squeeze(-1) - labels)[kept] ** 2).sum()
        return {"loss": total / (kept.sum() if num_items_in_batch is None else num_items_in_batch)}


def test_a_token_mean_over_uneven_micro_batches_is_seen_as_such(tmp_path: Path):
    run = trainer(tmp_path, steps=1, gradient_accumulation_steps=4)
    run.model = run.model_wrapped = TokenMean()
    run.model_accepts_loss_kwargs = True
    data = run.train_dataset
    data.y[2:9] = -100  # most of two micro-batches
    kept = data.y != -100
    with torch.no_grad():
        true = (run.model.layers(data.x).squeeze(-1)[kept] - data.y[kept]).square().mean()
    callback = HealingCallback()
    run.add_callback(callback)
    run.train()
    assert counts(callback, "loss") == pytest.approx([float(true)], rel=1e-5)


SAVES = {"save_strategy": "steps", "save_steps": 10}
POLICY = {
    "respond": [{"to": ["nonfinite"], "do": ["skip", "cut_lr"]}],
    "lr": {"factor": 0.5, "hold_steps": 1000, "ceiling": 1.0},
}


@pytest.mark.parametrize("restored", [False, True])
def test_the_lr_multiplier_survives_hfs_restore(tmp_path: Path, restored: bool):
    """Measured by parameter displacement; with and without HF's restore of callbacks."""
    arguments = {
        "optim": "sgd",
        "max_grad_norm": 1e-3,  # every step is clipped to it, and so moves as far
        "lr_scheduler_type": "constant",
        "restore_callback_states_from_checkpoint": restored,
        **SAVES,
    }
    first = trainer(
        tmp_path, scaled={12: math.nan}, callbacks=[HealingCallback(**POLICY)], **arguments
    )
    first.train()
    steps = Steps()
    callback = HealingCallback(**POLICY)
    again = trainer(tmp_path, scaled={12: math.nan}, callbacks=[callback, steps], **arguments)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-20"))
    moved = dict(zip(steps.steps, steps.moved, strict=True))
    assert moved[21] == pytest.approx(0.5e-2 * 1e-3, rel=0.01)
    live = [e for e in again.callback_handler.callbacks if isinstance(e, HealingCallback)]
    assert len(live) == 1
    assert counts(live[0], "lr_scale", "skips") == [0.5, 1]
    assert torch.equal(weights(first), weights(again))


@pytest.mark.parametrize(("engine", "accumulated"), [("host", 2), ("device", 1)])
def test_no_sync_is_added_to_a_step(
    tmp_path: Path, engine: Literal["host", "device"], accumulated: int
):
    counted: list[int] = []
    for healed in (False, True):
        for steps in (4, 8):
            run = trainer(
                tmp_path,
                steps=steps,
                callbacks=[HealingCallback(attach={"engine": engine})] if healed else [],
                logging_steps=500,
                gradient_accumulation_steps=accumulated,
            )
            with CountSyncs() as syncs:
                run.train()
            assert run.optimizer.optimizer.param_groups[0]["fused"]  # HF's default
            counted.append(syncs.count)
    plain, plain_long, short, long = counted
    assert plain_long > plain  # HF's own: its filter for NaN reads the loss of each micro-batch
    assert long - short == plain_long - plain
    assert short - plain <= 2  # and hardly any at the beginning and the end
