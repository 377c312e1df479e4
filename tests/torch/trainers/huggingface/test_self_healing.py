"""`heal_trainer` on the real trainers: rollbacks within `train()`, restarts, stores."""

import logging
import math
import multiprocessing
import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.trainer_utils import get_last_checkpoint

from healcore import Checkpoints
from healcore.runtime.run.start import StoreNotEmpty
from healcore.runtime.store.manifest import scan
from healcore.torch import AttachError, DCPStore, HealingCallback, heal_trainer
from healcore.torch.trainers.hook import healings_of
from healcore.torch.trainers.huggingface.steps import loss_fn_of
from tests.healer.run_directory import events_of, new_process
from tests.healer.run_options import grouped
from tests.healer.simulated_kills import Crash, die_at_the_end
from tests.torch.trainers.huggingface import small_runs
from tests.torch.trainers.huggingface import tiny_trainers as tiny
from tests.torch.trainers.huggingface.small_runs import calling

AT = 6
"""The step that begins with damaged weights: with two steps per generation one that generates."""


@pytest.mark.slow
def test_generation_goes_on_after_a_rollback(tmp_path: Path):
    """GRPO keeps generated batches for several steps; a rollback has to generate them again."""
    trainer = tiny.grpo(tmp_path, max_steps=12, steps_per_generation=2)
    before = float(small_runs.weights(trainer).abs().max())
    rewarded: list[int] = []
    hooks: list[Any] = []
    reward = trainer.reward_funcs[0]

    def noted(**given: Any) -> list[float | None]:
        rewarded.append(trainer.state.global_step)
        return reward(**given)

    def damage(state: Any, *, model: Any, **_: Any) -> None:
        """Doubles a weight once, and makes its gradient NaN in that step, as a faulty device."""
        if not hooks:
            weight = next(model.parameters())
            hooks.append(weight.register_hook(lambda gradient: gradient * math.nan))
            with torch.no_grad():
                weight.mul_(2)

    trainer.reward_funcs[0] = noted
    removed = calling("on_step_end", lambda *_, **__: hooks and hooks[0].remove())
    steps = small_runs.Steps()
    for each in (calling("on_step_begin", damage, at=AT), removed, steps):
        trainer.add_callback(each)
    healed: Any = heal_trainer(
        trainer,
        store=tmp_path / "store",
        checkpoints=Checkpoints(every=2),
        rollback={"probation": 2, "confirm": False},
        respond=[{"to": ["nonfinite"], "do": ["skip", "rollback"]}],
    )
    healed.train()
    assert healed.healer.rollbacks == 1
    (back,) = steps.returns
    first = steps.steps[back]
    assert first <= AT
    assert steps.steps[back:] == list(range(first, 13))
    assert rewarded.count(first - 1) == 2, "the completions of that step came once more"
    assert float(small_runs.weights(trainer).abs().max()) < 1.5 * before


WARMUP = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 80, "learning_rate": 30.0}


DIVERGES = {"optim": "sgd", "max_steps": 50, "max_grad_norm": 0.0, **WARMUP}
OFTEN = {"save_every": 5, "rollback": {"probation": 10}}


def test_a_divergence_is_rolled_back_in_place(tmp_path: Path):
    trainer = tiny.sft(tmp_path, **DIVERGES, logging_steps=4)
    steps = small_runs.Steps()
    scales: list[float] = []

    def applied(*_: Any, **__: Any) -> None:
        (healing,) = healings_of(healed.healer).values()
        decision: Any = healing.last_decision()
        scales.append(float(decision.lr_scale))

    for each in (steps, calling("on_step_end", applied)):
        trainer.add_callback(each)
    # Without a `loss_fn` the detectors alone decide, and the rollback comes with a cut.
    options = {"store": tmp_path / "store", "loss_fn": None, **grouped(OFTEN)}
    healed: Any = heal_trainer(trainer, "pretraining", **options)
    healed.train()

    # The run went back once, and then trained every step to the end.
    (back,) = steps.returns
    first, before = steps.steps[back], steps.steps[back - 1]
    assert 1 < first <= before
    assert steps.steps[back:] == list(range(first, 51))
    assert healed.healer.rollbacks == 1
    assert trainer.state.global_step == healed.healer.step == 50

    # The cut learning rate is effective at the next step: same weights, same batch, shorter step.
    earlier = steps.steps.index(first)
    assert steps.epochs[back] == steps.epochs[earlier]
    assert scales[back] < 0.9
    expected = steps.moved[earlier] * scales[back] / scales[earlier]
    assert steps.moved[back] == pytest.approx(expected, rel=1e-4)

    # The log has each step once, and the sums of the loss have gone back with it.
    logged = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    rows = events_of(tmp_path / "store" / "healcore.metrics.jsonl")
    losses = {row["step"]: row["loss"] for row in rows}  # the last one of a repeated step
    means = {at: sum(losses[at - i] for i in (1, 2, 3, 4)) / 4 for at in range(4, 51, 4)}
    assert logged == pytest.approx(means, rel=1e-3)
    mean = sum(losses.values()) / 50
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(mean, rel=1e-4)

    # Without healing the same run is lost.
    alone = tiny.sft(tmp_path, **DIVERGES)
    alone.train()
    assert torch.isfinite(small_runs.weights(trainer)).all()
    assert not torch.isfinite(small_runs.weights(alone)).all()


@pytest.mark.slow
def test_a_rollback_over_the_end_of_an_evaluated_epoch_completes(tmp_path: Path):
    """A rollback over the end of an epoch, into one that an evaluation has closed."""
    length = {"max_steps": -1, "num_train_epochs": 3, "gradient_accumulation_steps": 2}
    saves = {"eval_strategy": "epoch", "save_strategy": "epoch", "dataloader_num_workers": 1}
    rate = {"warmup_steps": 24, "learning_rate": 40.0}
    trainer = tiny.plain(tmp_path / "out", **{**DIVERGES, **length, **saves, **rate})
    steps = small_runs.Steps()
    trainer.add_callback(steps)
    options = {"store": tmp_path / "store", "clip": None, **grouped(OFTEN)}
    healed: Any = heal_trainer(trainer, "pretraining", **options)
    healed.train()
    assert steps.returns
    assert trainer.state.global_step == trainer.state.max_steps == 24
    evaluated = [row["step"] for row in trainer.state.log_history if "eval_loss" in row]
    # The batches of the trouble are skipped; batches of the next pass come instead.
    assert healed.healer.report().skipped_batches
    assert evaluated == [8, 16, 24]
    saved = {int(each.name[11:]) for each in (tmp_path / "out").glob("checkpoint-*")}
    assert saved == set(evaluated)
    assert trainer.state.epoch == 3.0


def run(folder: Path, kind: str, kill_at: int) -> Any:
    """Weights, trained steps and logged steps of a run that kills its process at a step."""
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None  # as in HF's scripts
    given: Any = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 9}
    given |= {"sync_ref_model": True, "ref_model_sync_steps": 3} if kind == "dpo" else {}
    trainer = getattr(tiny, kind)(folder, max_steps=24, **given)
    # The loss has a parameter, as a loss of sentence-transformers.
    factor = torch.nn.Parameter(torch.ones(1))
    loss = trainer.compute_loss
    trainer.compute_loss = lambda *batch, **named: (loss(*batch, **named) * factor).sum()
    trainer.create_optimizer().add_param_group({"params": [factor]})
    trainer.model.zero_grad = trainer.optimizer.zero_grad
    killed = calling("on_step_end", lambda *_, **__: os.kill(os.getpid(), 9), at=kill_at)
    for each in (steps := small_runs.Steps(), killed):
        trainer.add_callback(each)
    options: Any = {"store": folder / "store", "checkpoints": Checkpoints(every=5)}
    added = HealingCallback(**options)  # called after the Trainer has loaded its own checkpoint
    trainer.add_callback(added) if kind == "dpo" else heal_trainer(trainer, **options)
    trainer.train(resume_from_checkpoint=last)
    logged = [row["step"] for row in trainer.state.log_history if "loss" in row]
    return torch.cat([small_runs.weights(trainer), factor.detach()]), steps.steps, logged


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["sft", "dpo", *(pytest.param(k, marks=pytest.mark.stress) for k in ("plain", "grpo"))]
)
def test_killed_and_started_again(kind: str, tmp_path: Path):
    """After kill -9 the same command ends with the weights of a run without interruption."""
    killed = multiprocessing.get_context("fork").Process(target=run, args=(tmp_path, kind, 19))
    killed.start()
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    weights, steps, logged = run(tmp_path, kind, -1)
    new_process()
    whole, *_ = run(tmp_path / "whole", kind, -1)
    assert 1 < steps[0] <= 19 < steps[-1] == 24
    assert logged == list(range(1, 25))
    assert torch.equal(weights, whole)
    # Once more, after it has completed: nothing is trained, and the program goes on.
    new_process()
    again, steps, _ = run(tmp_path, kind, -1)
    assert steps == []
    assert torch.equal(again, weights)


@pytest.mark.parametrize("resume", [True, "checkpoint", "get_last_checkpoint"])
def test_an_added_callback_resumes_from_its_store_and_not_as_the_program_says(resume, tmp_path):
    """Also if the Trainer has no checkpoint, with which it raises, or if its own has the end."""
    without = resume is True

    def train(resume: Any = None, *, ends: int = -1) -> Any:
        new_process()
        saves = {"save_strategy": "no" if without else "steps", "save_steps": 2}
        trainer = small_runs.trainer(tmp_path, steps=8, **saves)
        steps = small_runs.Steps()
        trainer.add_callback(steps)
        trainer.add_callback(HealingCallback(store="auto", checkpoints=Checkpoints(every=3)))
        error = small_runs.raising(ZeroDivisionError())
        trainer.add_callback(calling("on_step_begin", error, at=ends))
        with pytest.raises(ZeroDivisionError) if ends >= 0 else nullcontext():
            trainer.train(resume_from_checkpoint=resume)
        return trainer, steps.steps

    train(ends=6)
    paths: dict[Any, Any] = {"checkpoint": str(tmp_path / "checkpoint-4")}
    paths["get_last_checkpoint"] = get_last_checkpoint(str(tmp_path))
    trainer, steps = train(paths.get(resume, resume))
    assert steps == [7, 8]
    assert trainer.state.global_step == 8
    assert train(paths.get(resume, resume))[1] == [], "completed"


@pytest.mark.parametrize("resume", [True, "checkpoint-4"])
def test_a_newer_checkpoint_of_the_trainer_is_ignored_with_a_warning(resume, tmp_path, caplog):
    """The run is killed before the first regular save of the store."""

    def train(resume: Any = None, *, ends: int = -1) -> Any:
        new_process()
        trainer = small_runs.trainer(tmp_path, steps=8, save_strategy="steps", save_steps=2)
        steps = small_runs.Steps()
        trainer.add_callback(steps)
        heal_trainer(trainer, checkpoints=Checkpoints(every=100))
        trainer.add_callback(calling("on_step_end", small_runs.raising(Crash()), at=ends))
        trainer.train(resume_from_checkpoint=resume)
        return steps.steps

    with pytest.MonkeyPatch.context() as patch:
        die_at_the_end(patch)
        with pytest.raises(Crash):
            train(ends=5)
    named = resume if resume is True else str(tmp_path / resume)
    assert train(named) == [*range(1, 9)]
    (line,) = [each.message for each in caplog.records if "is ignored" in each.message]
    assert "from its checkpoint of step 0" in line
    assert "later steps of the Trainer's checkpoint are trained again" in line
    assert "checkpoints=healcore.Checkpoints(every=" in line


def test_a_list_of_stores_is_passed_to_the_healer(tmp_path: Path):
    """The first directory is lost, as a local disk, and the second continues the run."""
    stores = [tmp_path / "local", str(tmp_path / "shared")]

    def train(*, ends: int = -1) -> list[int]:
        new_process()
        trainer = small_runs.trainer(tmp_path, steps=8)
        steps = small_runs.Steps()
        trainer.add_callback(steps)
        trainer.add_callback(HealingCallback(store=stores, checkpoints=Checkpoints(every=3)))
        trainer.add_callback(
            calling("on_step_begin", small_runs.raising(ZeroDivisionError()), at=ends)
        )
        with pytest.raises(ZeroDivisionError) if ends >= 0 else nullcontext():
            trainer.train(resume_from_checkpoint=ends < 0)  # the store has precedence
        return steps.steps

    train(ends=6)
    shutil.rmtree(tmp_path / "local")
    assert train() == [7, 8]
    assert sorted(scan(tmp_path / "local")[0])[-1] == 8


@pytest.mark.slow
def test_an_evaluation_that_raised_comes_again_after_a_restart(tmp_path: Path):
    for at in (16, 0):
        trainer = tiny.plain(tmp_path, max_steps=-1, num_train_epochs=2, eval_strategy="epoch")
        error = small_runs.raising(ZeroDivisionError())
        trainer.add_callback(calling("on_prediction_step", error, at=at))
        heal_trainer(trainer, checkpoints=Checkpoints(every=5))
        with pytest.raises(ZeroDivisionError) if at else nullcontext():
            trainer.train()
    assert [row["step"] for row in trainer.state.log_history if "eval_loss" in row] == [16, 32]


def test_the_last_checkpoint_is_not_the_best_model(tmp_path: Path):
    best = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True}
    best |= {"metric_for_best_model": "steps", "greater_is_better": False}
    trainer = tiny.plain(tmp_path, max_steps=4, eval_steps=2, save_steps=2, **best)
    trainer.evaluate = lambda **_: {"eval_steps": trainer.state.global_step}
    heal_trainer(trainer).train()
    best_model = small_runs.weights(trainer)
    stored = DCPStore(tmp_path / "_healcore").restore(4, {"model": trainer.model}).state["model"]
    trainer.model.load_state_dict(stored)
    assert not torch.equal(small_runs.weights(trainer), best_model)


def test_a_callback_that_ends_the_last_epoch_early(tmp_path: Path):
    def stop(*_: Any, control: Any, **__: Any) -> None:
        control.should_epoch_stop = True

    own = [calling("on_step_end", stop, at=18)]
    trainer = small_runs.trainer(tmp_path, steps=8, max_steps=20, callbacks=own)
    healed = heal_trainer(trainer, store=None)
    assert [healed.train().global_step for _ in range(2)] == [18, 18], "a new run each"


def test_a_finished_cell_with_other_hyperparameters_does_not_return_the_old_model(tmp_path, caplog):
    """A callback ends the training at step 5 of 8, as EarlyStoppingCallback."""

    def train(**arguments: Any) -> Any:
        new_process()
        trainer = small_runs.trainer(tmp_path, steps=8, **arguments)
        heal_trainer(trainer).train()
        return trainer

    def stop(state: Any, *, control: Any, **_: Any) -> None:
        control.should_training_stop = True

    stops = {"callbacks": [calling("on_step_end", stop, at=5)]}
    caplog.set_level(logging.INFO, "healcore")
    first = train(**stops)
    again = train(**stops)
    assert torch.equal(small_runs.weights(first), small_runs.weights(again))
    assert "completed earlier, at step 5: nothing was trained" in caplog.text
    assert "other settings" not in caplog.text
    with pytest.raises(StoreNotEmpty, match=r"optimizer\.lr: 0\.01 -> 0\.5"):
        train(learning_rate=0.5)
    with pytest.raises(StoreNotEmpty, match="per_device_train_batch_size: 4 -> 2"):
        train(per_device_train_batch_size=2)
    assert train(num_train_epochs=2).state.global_step == 16


def test_what_cannot_be_healed_is_refused_in_words(tmp_path: Path):
    with pytest.raises(AttachError, match=r"takes a transformers\.Trainer"):
        heal_trainer(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    tiny.plain(tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    with pytest.raises(AttachError, match="conflicts with the store, which has no checkpoint"):
        heal_trainer(tiny.plain(tmp_path)).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="every is a whole number"):
        heal_trainer(tiny.plain(tmp_path), checkpoints=Checkpoints(every=0))

    class Own(small_runs.InOrder):
        """Has its own loop, as TRL's PPO, and its own step, as Online DPO."""

        step = small_runs.InOrder.training_step

        def train(self) -> None:  # type: ignore[override]
            self.callback_handler.on_train_begin(self.args, self.state, self.control)

        def training_step(self, *given: Any) -> torch.Tensor:
            return self.step(*given)

    own = small_runs.trainer(tmp_path, cls=Own)
    assert loss_fn_of(own) is None
    with pytest.raises(AttachError, match="a loop of its own"):
        heal_trainer(own).train()
    assert not (tmp_path / "_healcore").exists()
