"""`HealingCallback` in real Trainers of transformers and TRL, under HF's default arguments."""

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from healcore.runtime.run.ending.exits import RunStopped
from healcore.torch import AttachError, HealingCallback
from tests.healer.run_options import grouped
from tests.torch.sync_counter import CountSyncs
from tests.torch.trainers.huggingface import small_runs
from tests.torch.trainers.huggingface import tiny_trainers as tiny
from tests.torch.trainers.huggingface.small_runs import (
    SAVES,
    InOrder,
    calling,
    logged,
    trainer,
    weights,
)

NAN = math.nan


@pytest.mark.parametrize(("store", "read"), [(None, 8), ("auto", 9)])
def test_a_nan_batch_is_noticed_in_its_step_and_logged(
    tmp_path: Path, capsys: Any, recwarn: Any, store: Any, read: int
):
    callback = HealingCallback(store=store)
    skipped: list[bool] = []
    seen: list[Any] = []

    def decided(*_: Any, **__: Any) -> None:
        skipped.append(callback.healing.last_decision().skip)  # type: ignore[union-attr]

    # As the trackers of report_to, before the user's callbacks.
    tracker = calling("on_log", lambda state, *, logs, **_: seen.append(dict(logs)))
    own = [tracker, callback, calling("on_step_end", decided)]
    run = trainer(tmp_path, callbacks=own, scaled={7: NAN, 39: NAN})
    run.train()

    # The steps of both batches are skipped.
    assert [i for i, skip in enumerate(skipped) if skip] == [7, 39]
    assert weights(run).isfinite().all()

    # The rows of the log. A step is read after the next step; with a store when the next batch is
    # read.
    rows = [row for row in seen if "loss" in row]
    assert len(rows) == run.state.global_step == 40
    assert [i for i, row in enumerate(rows) if "heal/skips" in row] == [read]
    assert (rows[read]["heal/skips"], rows[read]["heal/incidents"]) == (1.0, 1.0)
    healthy = {"loss", "grad_norm", "learning_rate", "epoch", "heal/clips"}
    assert all(row.keys() <= healthy for i, row in enumerate(rows) if i != read)
    assert "train_loss" in seen[-1]
    assert store is None or seen[-1]["heal/skips"] == 2.0, "the last row has the last steps"

    # The line on the screen.
    printed = capsys.readouterr().err
    (line,) = (each for each in printed.splitlines() if "incident 1: " in each)
    assert "step 7: incident 1: nonfinite loss and nonfinite grad" in line
    assert store or "has no checkpoint" not in printed, "the Trainer has the checkpoints"
    assert not [each for each in recwarn if "scheduler" in str(each.message)]


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


def test_an_order_to_save_saves(tmp_path: Path):
    callback = HealingCallback(respond=[{"to": ["nonfinite"], "do": ["skip", "save"]}])
    trainer(tmp_path, scaled={10: NAN}, callbacks=[callback]).train()
    (path,) = tmp_path.glob("checkpoint-*")
    assert path.name in ("checkpoint-11", "checkpoint-12")  # read one step later


@pytest.mark.parametrize("late", [False, True])
def test_the_end_by_an_exception_is_reported_and_nothing_stays(tmp_path: Path, late: bool):
    """Without a store: events, the postmortem, the report, and the user's tracker."""
    tracked: list[int] = []

    def received(step: int, values: Any) -> None:
        tracked.append(step)

    tracker: Any = SimpleNamespace(metrics=received, event=bool)
    callback = HealingCallback(trackers=tracker)
    raises = calling("on_step_end", small_runs.raising(ZeroDivisionError("here")), at=9)
    own = [callback, raises]
    run = trainer(tmp_path, scaled={4: NAN}, callbacks=[] if late else own)
    for each in own if late else []:
        run.add_callback(each)
    run.log = set_by_user = run.log
    with pytest.raises(ZeroDivisionError):
        run.train()

    # What is left of the run.
    report: Any = callback.report()
    assert (report.ending, report.steps, report.counts["skips"]) == ("exception", 9, 1)
    assert not report.converged
    assert "ZeroDivisionError" in report.postmortem.read_text()
    assert len(tracked) > 5
    assert not list(tmp_path.glob("**/step-*"))  # no checkpoint

    # Nothing stays on the trainer's objects.
    assert run.log is set_by_user
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
    with pytest.raises(AttachError, match="belongs to no Trainer"):
        HealingCallback().on_train_begin(arguments, TrainerState(), TrainerControl())


@pytest.mark.parametrize("as_class", [False, True])
@pytest.mark.parametrize("way", ["constructor", "add_callback", "callback_handler"])
def test_a_callback_knows_its_trainer(tmp_path: Path, way: str, as_class: bool):
    """Also if it replaces another one without `add_callback`, as a Trainer's checkpoint does."""
    given: Any = HealingCallback if as_class else HealingCallback()
    run = trainer(tmp_path, steps=3, callbacks=[given] if way == "constructor" else [])
    if way == "add_callback":
        run.add_callback(given)
    elif way == "callback_handler":
        run.add_callback(HealingCallback())  # wraps `train()`, which looks for callbacks again
        run.remove_callback(HealingCallback)
        run.callback_handler.add_callback(given)
    run.train()
    (callback,) = (e for e in run.callback_handler.callbacks if isinstance(e, HealingCallback))
    assert callback.trainer is run
    assert callback.report().steps == 3


def test_two_trainers_train_in_turn(tmp_path: Path):
    """With a callback of their own each, and then with the same callback."""
    kind: Any = HealingCallback
    own = [trainer(tmp_path, steps=3, callbacks=[kind]) for _ in range(2)]
    shared = HealingCallback()
    both = [trainer(tmp_path, steps=3, callbacks=[shared]) for _ in range(2)]
    for run in (own[1], own[0], both[0], both[1], both[0]):
        run.train()
        (callback,) = (e for e in run.callback_handler.callbacks if isinstance(e, HealingCallback))
        assert callback.trainer is run
        assert callback.report().steps == 3


def test_a_callback_made_before_the_class_of_its_trainer_heals_it(tmp_path: Path):
    """As a program that makes the callback and then imports a trainer of TRL."""
    callback = HealingCallback()

    class Later(InOrder):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.add_callback(TrainerCallback())  # as GRPOTrainer adds its own

    run = trainer(tmp_path, steps=3, callbacks=[callback], cls=Later)
    run.train()
    assert callback.trainer is run
    assert callback.report().steps == 3


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
    own = [HealingCallback(**policy), steps := small_runs.Steps()]
    again = trainer(tmp_path, callbacks=own, **arguments)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-20"))
    moved = dict(zip(steps.steps, steps.moved, strict=True))
    assert moved[21] == pytest.approx(0.5e-2 * 1e-3, rel=0.01)
    (live,) = (e for e in again.callback_handler.callbacks if isinstance(e, HealingCallback))
    assert live.trainer is again
    assert live is own[0]
    assert small_runs.counts(live, "lr_scale", "skips") == [0.5, 1]
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


def test_a_checkpoint_of_an_unhealed_run_with_nan_is_not_resumed_from(tmp_path: Path):
    trainer(tmp_path, scaled={25: NAN}, **SAVES).train()
    again = trainer(tmp_path, scaled={25: NAN}, callbacks=[HealingCallback()], **SAVES)
    with pytest.raises(AttachError, match="has NaN in layers"):
        again.train(resume_from_checkpoint=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "orpo", "cpo", "grpo"])
def test_a_nan_step_of_trl_is_skipped(tmp_path: Path, kind: str):
    """Other steps are judged by their loss. GRPO has no bad step: it would generate with NaN."""
    callback = HealingCallback()
    judged: list[float] = []
    hooks: list[Any] = []

    def times_nan(module: Any, inputs: Any, out: Any) -> Any:
        return out * NAN

    def poison(state: Any, *, model: Any, **_: Any) -> None:
        hooks.append(model.model.layers[0].register_forward_hook(times_nan))

    def judge(*_: Any, **__: Any) -> None:
        judged.extend(small_runs.counts(callback, "loss"))

    begin = calling("on_step_begin", poison, at=-1 if kind == "grpo" else 4)
    end = calling("on_step_end", lambda *_, **__: hooks and hooks.pop().remove())
    usual: Any = {"gradient_accumulation_steps": 2, "max_steps": 8, "learning_rate": 3e-3}
    usual |= {"data": tiny.uneven(labelled=False)} if kind == "sft" else {}
    run = getattr(tiny, kind)(tmp_path, **usual)
    for each in (callback, calling("on_step_end", judge), begin, end):
        run.add_callback(each)
    run.train()
    assert weights(run).isfinite().all()
    losses = logged(run, "loss")
    if kind != "grpo":
        assert logged(run, "heal/skips") == [1.0]  # a row has what has changed
        del losses[4], judged[4]
    assert len(judged) == run.state.global_step - (kind != "grpo")
    assert judged == pytest.approx(losses, rel=1e-2, abs=2e-4)


POLICY = {
    "save_every": 5,
    "rollback": {"probation": 3, "confirm": False, "skip_batches": 0},
    "respond": [{"to": ["nonfinite"], "do": ["skip", "rollback"]}],
    "clip": None,
}


class Stream(IterableDataset):
    """Rows of batches; the batch `bad` is bad in the first pass; `once` allows only one pass."""

    def __init__(self, batches: int, bad: int | None, *, once: bool) -> None:
        rows = small_runs.Rows(batches, {} if bad is None else {bad: NAN})
        self.rows, self.once = rows, once
        self.left = self.all()

    def all(self) -> Iterator[Any]:
        rows = self.rows
        self.rows = small_runs.Rows(len(self.rows) // small_runs.BATCH)
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


@pytest.mark.slow
def test_iterable_data_are_read_from_their_start_after_a_restart(tmp_path: Path):
    """The used batches are dropped."""
    fails = calling("on_step_end", small_runs.raising(RuntimeError("stop")), at=7)
    with pytest.raises(RuntimeError, match="stop"):
        run(tmp_path, callbacks=[fails])
    again = run(tmp_path)
    assert again.seen == [*range(5, 20), *range(10)]  # from the checkpoint of step 5
    whole = run(tmp_path / "whole")
    assert torch.equal(weights(again), weights(whole))
    assert logged(again, "epoch")[-5:] == logged(whole, "epoch")[-5:]
