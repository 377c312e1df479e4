"""`HealingCallback` in real Trainers of transformers and TRL, under HF's default arguments."""

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from healcore.runtime.run.termination import RunStopped
from healcore.torch import AttachError, HealingCallback
from tests.healer.run_options import grouped
from tests.torch.sync_counter import CountSyncs
from tests.torch.trainers.huggingface import small_runs
from tests.torch.trainers.huggingface import tiny_trainers as tiny
from tests.torch.trainers.huggingface.small_runs import (
    BATCH,
    SAVES,
    Rows,
    Steps,
    calling,
    counts,
    logged,
    raising,
    trainer,
    weights,
)

NAN = math.nan


def test_one_nan_batch_is_noticed_in_its_step_and_the_run_completes(tmp_path: Path, capsys: Any):
    callback, skipped = HealingCallback(), list[bool]()
    decided = lambda *_, **__: skipped.append(callback.healing.last_decision().skip)  # type: ignore[union-attr]  # noqa: E731
    own = [callback, calling("on_step_end", decided)]
    sick = trainer(tmp_path / "sick", scaled={20: NAN}, callbacks=own)
    sick.train()
    healthy = trainer(tmp_path / "healthy")
    healthy.train()
    assert [i for i, skip in enumerate(skipped) if skip] == [20]
    assert sick.state.global_step == 40
    assert weights(sick).isfinite().all()
    rows = small_runs.Rows(40)  # without NaN
    with torch.no_grad():
        losses = [float(each.model(rows.x, rows.y)["loss"]) for each in (sick, healthy)]
    assert losses[0] == pytest.approx(losses[1], rel=0.15)
    assert counts(callback, "skips", "incidents") == [1, 1]
    assert "has no checkpoint" not in capsys.readouterr().err, "the Trainer has the checkpoints"


@pytest.mark.parametrize(("limit", "accumulated"), [(0.3, 3), (0.0, 1)])
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
    own = [HealingCallback(clip={"kind": "fixed", "max_norm": 0.5}), moves := Steps()]
    sgd = {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": 0.01}
    run = trainer(tmp_path, scaled={30: 1000.0}, callbacks=own, **sgd)
    run.train()
    norms = logged(run, "grad_norm")
    assert norms[30] > 500  # the log has the norm before clipping
    expected = [0.01 * min(norm, 0.5) for norm in norms]
    assert moves.moved == pytest.approx(expected, rel=1e-3)


def test_a_row_of_the_log_has_what_has_changed(tmp_path: Path, capsys: Any, recwarn: Any):
    seen: list[dict[str, float]] = []
    # As the trackers of report_to, before the user's callbacks.
    tracker = calling("on_log", lambda state, *, logs, **_: seen.append(dict(logs)))
    trainer(tmp_path, callbacks=[tracker, HealingCallback()], scaled={7: NAN}).train()
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
    own = [HealingCallback(store=tmp_path / "store")]
    run = trainer(tmp_path, callbacks=own, scaled={39: NAN})
    run.train()
    assert run.state.log_history[-1]["heal/skips"] == 1.0
    assert "train_loss" in run.state.log_history[-1]


def test_an_order_to_save_saves(tmp_path: Path):
    callback = HealingCallback(respond=[{"to": ["nonfinite"], "do": ["skip", "save"]}])
    trainer(tmp_path, scaled={10: NAN}, callbacks=[callback]).train()
    (path,) = tmp_path.glob("checkpoint-*")
    assert path.name in ("checkpoint-11", "checkpoint-12")  # read one step later


@pytest.mark.parametrize("late", [False, True])
def test_the_end_by_an_exception_is_reported_and_nothing_stays(tmp_path: Path, late: bool):
    """Without a store: events, the postmortem, the report, and the user's tracker."""
    tracked: list[int] = []
    received = lambda step, values: tracked.append(step)  # noqa: E731
    callback = HealingCallback(trackers=SimpleNamespace(metrics=received, event=bool))
    raises = calling("on_step_end", raising(ZeroDivisionError("here")), at=9)
    own = [callback, raises]
    run = trainer(tmp_path, scaled={4: NAN}, callbacks=[] if late else own)
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
    def damage(state: Any, *, model: Any, **_: Any) -> None:
        with torch.no_grad():
            model.layers[0].weight[0, 0] = NAN

    own = [HealingCallback(), calling("on_step_begin", damage, at=10)]
    run = trainer(tmp_path, callbacks=own)
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
    callback = HealingCallback()
    run = trainer(tmp_path, steps=1, gradient_accumulation_steps=4, callbacks=[callback])
    run.model = run.model_wrapped = TokenMean()
    run.model_accepts_loss_kwargs = True
    data = run.train_dataset
    data.y[2:9] = -100  # most of two micro-batches
    with torch.no_grad():
        true = float(run.model(data.x, data.y)["loss"])
    run.train()
    assert counts(callback, "loss") == pytest.approx([true], rel=1e-5)


@pytest.mark.parametrize("restored", [False, True])
def test_the_lr_multiplier_survives_hfs_restore(tmp_path: Path, restored: bool):
    """Measured by parameter displacement; with and without HF's restore of callbacks."""
    policy = {
        "respond": [{"to": ["nonfinite"], "do": ["skip", "cut_lr"]}],
        "lr": {"factor": 0.5, "hold_steps": 1000, "ceiling": 1.0},
    }
    arguments = {
        "optim": "sgd",
        "max_grad_norm": 1e-3,  # every step is clipped to it, and so moves as far
        "lr_scheduler_type": "constant",
        "restore_callback_states_from_checkpoint": restored,
        "scaled": {12: NAN},
        **SAVES,
    }
    first = trainer(tmp_path, callbacks=[HealingCallback(**policy)], **arguments)
    first.train()
    own = [HealingCallback(**policy), steps := Steps()]
    again = trainer(tmp_path, callbacks=own, **arguments)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-20"))
    moved = dict(zip(steps.steps, steps.moved, strict=True))
    assert moved[21] == pytest.approx(0.5e-2 * 1e-3, rel=0.01)
    (live,) = (e for e in again.callback_handler.callbacks if isinstance(e, HealingCallback))
    assert counts(live, "lr_scale", "skips") == [0.5, 1]
    assert torch.equal(weights(first), weights(again))


@pytest.mark.parametrize(("engine", "accumulated"), [("host", 2), ("device", 1)])
def test_no_sync_is_added_to_a_step(tmp_path: Path, engine: Any, accumulated: int):
    counted: list[int] = []
    arguments: Any = {"logging_steps": 500, "gradient_accumulation_steps": accumulated}
    for healed in (False, True):
        for steps in (4, 8):
            own = [HealingCallback(attach={"engine": engine})] if healed else []
            run = trainer(tmp_path, steps=steps, callbacks=own, **arguments)
            with CountSyncs() as syncs:
                run.train()
            assert run.optimizer.optimizer.param_groups[0]["fused"]  # HF's default
            counted.append(syncs.count)
    plain, plain_long, short, long = counted
    assert plain_long > plain  # HF's own: its filter for NaN reads the loss of each micro-batch
    assert long - short == plain_long - plain
    assert short - plain <= 2  # and hardly any at the beginning and the end


def test_what_a_kill_cut_off_is_not_resumed_from(tmp_path: Path):
    first = trainer(tmp_path, callbacks=[HealingCallback()], **SAVES)
    first.train()
    (tmp_path / "checkpoint-40" / "trainer_state.json").unlink()
    shutil.copytree(tmp_path / "checkpoint-30", tmp_path / "checkpoint-50")
    state = tmp_path / "checkpoint-50" / "trainer_state.json"
    state.write_text(state.read_text()[:100])
    (tmp_path / "checkpoint-60").mkdir()
    resumed: list[int] = []
    begin = calling("on_train_begin", lambda state, **_: resumed.append(state.global_step))
    again = trainer(tmp_path, callbacks=[HealingCallback(), begin], **SAVES)
    again.train(resume_from_checkpoint=True)
    assert resumed == [30]
    assert torch.equal(weights(again), weights(first))


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("optimizer.pt", 0.5),
        ("rng_state.pth", 0.5),
        ("model.safetensors", 0.5),
        ("scheduler.pt", 0),
    ],
)
def test_a_damaged_file_gives_way_to_the_older_one(
    tmp_path: Path, capsys: Any, name: str, kept: float
):
    first = trainer(tmp_path, callbacks=[HealingCallback()], steps=20, **SAVES)
    first.train()
    path = tmp_path / "checkpoint-20" / name
    os.truncate(path, int(path.stat().st_size * kept))
    if not kept:
        path.unlink()
    again = trainer(tmp_path, callbacks=[HealingCallback()], steps=20, **SAVES)
    again.train(resume_from_checkpoint=True)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "not resume from" in line]
    assert name in line
    assert torch.equal(weights(again), weights(first))


def test_a_checkpoint_of_an_unhealed_run_with_nan_is_not_resumed_from(tmp_path: Path):
    trainer(tmp_path, scaled={25: math.nan}, **SAVES).train()
    again = trainer(tmp_path, scaled={25: math.nan}, callbacks=[HealingCallback()], **SAVES)
    # As HF's example scripts do, which ask before there is a Trainer.
    again.train(resume_from_checkpoint=get_last_checkpoint(str(tmp_path)))
    assert weights(again).isfinite().all()
    assert again.state.global_step == 40


def of_trl(kind: str, folder: Path, *, callbacks: Any = (), **given: Any) -> Any:
    usual = {"gradient_accumulation_steps": 2, "max_steps": 16, "learning_rate": 3e-3}
    made = getattr(tiny, kind)(folder, **{**usual, **given})
    for each in callbacks:
        made.add_callback(each)
    return made


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_the_loss_that_is_judged_is_the_steps(tmp_path: Path, kind: str):
    """TRL's trainers scale it for the accumulation in two ways."""
    callback, judged = HealingCallback(), list[float]()
    note = calling("on_step_end", lambda *_, **__: judged.extend(counts(callback, "loss")))
    run = of_trl(kind, tmp_path, callbacks=[callback, note], max_steps=6)
    run.train()
    assert judged == pytest.approx(logged(run, "loss"), rel=1e-2, abs=2e-4)
    assert len(judged) == 6


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "orpo", "cpo"])
def test_a_nan_step_of_trl_is_skipped(tmp_path: Path, kind: str):
    """The output is NaN, as of a fully masked row."""
    hooks: list[Any] = []

    def poison(state: Any, *, model: Any, **_: Any) -> None:
        hook = lambda module, inputs, out: out * math.nan  # noqa: E731
        hooks.append(model.model.layers[0].register_forward_hook(hook))

    begin = calling("on_step_begin", poison, at=8)
    end = calling("on_step_end", lambda *_, **__: hooks.pop().remove(), at=9)
    run = of_trl(kind, tmp_path, callbacks=[HealingCallback(), begin, end])
    run.train()
    assert weights(run).isfinite().all()
    assert logged(run, "heal/skips") == [1.0]  # a row has what has changed
    assert run.state.global_step == 16


POLICY = {
    "save_every": 5,
    "rollback": {"probation": 3, "confirm": False, "skip_batches": 0},
    "respond": [{"to": ["nonfinite"], "do": ["skip", "rollback"]}],
    "clip": None,
}


class Stream(IterableDataset):
    """The rows of some batches; `once`: a generator that is never made again.

    The batch `bad` is bad in the first pass only.
    """

    def __init__(self, batches: int, bad: int | None, *, once: bool) -> None:
        rows = Rows(batches, {} if bad is None else {bad: math.nan})
        self.rows, self.once = rows, once
        self.left = self.all()

    def all(self) -> Iterator[Any]:
        rows, self.rows = self.rows, Rows(len(self.rows) // BATCH)
        for index in range(len(rows)):
            yield rows[index]

    def __iter__(self) -> Iterator[Any]:
        yield from self.left if self.once else self.all()


def run(folder: Path, *, once: bool = False, bad: int | None = None, callbacks: Any = ()) -> Any:
    made = trainer(
        folder,
        cls=small_runs.Recording,
        callbacks=[HealingCallback(store=folder / "store", **grouped(POLICY)), *callbacks],
        max_steps=30,
        max_grad_norm=0.0,
        # Where one process reads for all, accelerate itself raises at the end of the data.
        accelerator_config={"dispatch_batches": False},
    )
    made.train_dataset = Stream(20, bad, once=once)
    made.train()
    made.seen = [batch for _, batch in made.seen]
    return made


@pytest.mark.parametrize("once", [False, True])
def test_iterable_data_continue_forward_after_a_rollback(once: bool, tmp_path: Path):
    """They lose no batch."""
    found = run(tmp_path, once=once, bad=12)
    assert found.seen[:20] == list(range(20))
    assert found.state.global_step == (20 - 9 if once else 30), "from step 14 back to 5"
    assert weights(found).isfinite().all()


def test_iterable_data_are_read_from_their_start_after_a_restart(tmp_path: Path):
    """The used batches are dropped."""
    fails = calling("on_step_end", raising(RuntimeError("stop")), at=7)
    with pytest.raises(RuntimeError, match="stop"):
        run(tmp_path, callbacks=[fails])
    again = run(tmp_path)
    assert again.seen == [*range(5, 20), *range(10)]  # from the checkpoint of step 5
    assert torch.equal(weights(again), weights(run(tmp_path / "whole")))
