"""The packages on PyPI that promise what healcore promises: selgis and self-healing-trainer."""

from __future__ import annotations

import contextlib
import functools
import math
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.healbench.arms.clipping import FixedClip
from benchmarks.healbench.arms.common import gradients, owned, package, silent
from benchmarks.healbench.problem import MAIN, Problem
from benchmarks.healbench.training import Stopped, Training

SELGIS = "selgis==0.2.7"
SELF_HEALING_TRAINER = "self-healing-trainer==1.0.2"


class Rate:
    """The scheduler that SelgisCore needs, on top of the program's own schedule.

    selgis's SmartScheduler keeps a factor that `reduce_lr` halves, over a schedule of its own. Here
    the factor is over the program's schedule, and in force for the length of a step.
    """

    def __init__(self, optimizer: Optimizer, least: float) -> None:
        self._optimizer = optimizer
        self._least = least
        self.scale = 1.0

    def reduce_lr(self, factor: float = 0.5) -> float:
        """Called by the core when it goes back."""
        self.scale *= factor
        return self._scaled(self._optimizer.param_groups[0]["lr"])

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """The reduced rate."""
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = self._scaled(rate)
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _scaled(self, rate: float) -> float:
        return max(rate * self.scale, min(rate, self._least))


class Selgis(Training):
    """selgis 0.2.7: its `SelgisCore` with the default configuration, as its `Trainer` calls it.

    `Trainer(model, config, train_dataloader).train()` of its README is, for every batch,
    `core.check_loss(loss)`, then `core.backward_step` and `core.optimizer_step`, which clips to
    1.0. A loss that is not finite or 3 times the mean of the last 10 loads the weights saved last
    (every 100 steps, whatever their state), forgets the moments, halves the rate for good, and
    drops the batch. Its Trainer itself cannot be given a program's loop or schedule:
    it computes the loss by itself, and only steps schedules of its own. Its early stopping and
    "final surge" need a second loader, which its README's first example has not either.

    One core per optimizer. States are kept in memory ("disk" is the default). It makes a GradScaler
    for CUDA only: the program's is put in that place.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        selgis = package("selgis", SELGIS)
        self._config = selgis.SelgisConfig(state_storage="memory")
        self._silence = contextlib.ExitStack()
        self._rates, self._cores = {}, {}
        with silent("selgis"):
            for name, each in problem.optimizers.items():
                self._rates[name] = rate = Rate(each, self._config.min_lr)
                core = selgis.SelgisCore(
                    owned(problem, name), each, rate, self._config, torch.device("cpu")
                )
                core._scaler = problem.scaler
                self._cores[name] = core

    def __enter__(self) -> Selgis:
        self._silence.enter_context(silent("selgis"))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._silence.close()

    def update(
        self, loss: Tensor, optimizer: str = MAIN, *, step: bool = True, share: float = 1.0
    ) -> None:
        """Its `Trainer._training_step` and what follows."""
        core, inner = self._cores[optimizer], self.problem.optimizers[optimizer]
        if not step:
            super().update(loss, optimizer, step=False, share=share)
            return
        if optimizer not in self._accumulating:
            inner.zero_grad(set_to_none=True)
        self._accumulating.discard(optimizer)
        if core.check_loss(loss.detach()):
            core.backward_step(share * loss)
            if self.problem.after_backward is not None:
                self.problem.after_backward()
            self._count_clip(inner)
            with self._rates[optimizer].in_force():
                core.optimizer_step()
        else:
            finite = math.isfinite(float(loss.detach()))
            self.counts.finite_skips += finite
            self.counts.nonfinite_skips += not finite
            self.counts.rollbacks += 1
            self.counts.lr_cuts += 1
        if optimizer in self.problem.schedulers:
            self.problem.schedulers[optimizer].step()

    def _count_clip(self, inner: Optimizer) -> None:
        scaler = self.problem.scaler
        norm = float(nn.utils.get_total_norm(gradients(inner)))
        norm /= 1.0 if scaler is None else scaler.get_scale()
        self.counts.clips += self._config.grad_clip_norm < norm < math.inf


class SelfHealingTrainer(FixedClip):
    """self-healing-trainer 1.0.2: its `MetaTrainerCallback`, called as the Trainer of HF calls it.

    Its README recommends the callback, with a "meta-trainer" that is trained once on synthetic
    curves (`TrajectoryGenerator(seed=42)`, 5 variations). With a constant rate the arm does what
    HF's Trainer does with it, to the bit. As in the README, but for what follows.

    - `enable_online_learning=False`. With the default, True, the first decision raises
      `TypeError: TrajectoryStep.__init__() got an unexpected keyword argument 'action'`.
    - Losses are logged as means of 10 steps, which is how often the callback looks: it waits for
      five logged values, and the Trainer's own default is one in 500 steps.
    - No evaluation in between, as without an `eval_dataset`: the callback then takes 1.1 times the
      training loss, and never goes back. (It goes back for overfitting, which cannot be seen then;
      for a loss that is not finite it would, but it never looks whether it is.)
    - The Trainer clips to 1.0 by default, so that does this arm. The callback's own clipping comes
      after the step, when the gradients have been used.
    - The rate that it sets, at most 1e-3 (its `max_lr`), holds until the program's schedule sets
      another one.

    The README's other way, `meta.decide(TrainingState(...))` in a plain loop, raises `TypeError:
    TrainingState.__init__() missing 2 required positional arguments: 'epoch' and 'total_steps'`.
    With these given it halves the rate in a quarter to four fifths of all steps of a curve that
    falls with 5 to 10 % of noise: it takes noise for oscillation. One callback per optimizer.
    """

    interval = 10

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        package("meta_trainer", SELF_HEALING_TRAINER)
        callbacks = package("callbacks.huggingface_callback", SELF_HEALING_TRAINER)
        trainer = package("transformers.trainer_callback", "transformers")
        self._runs = {}
        for name, each in problem.optimizers.items():
            callback = callbacks.MetaTrainerCallback(
                meta_trainer_path=str(_trained()), verbose=False, enable_online_learning=False
            )
            self._runs[name] = _Supervised(
                callback,
                owned(problem, name),
                SimpleNamespace(learning_rate=each.param_groups[0]["lr"]),
                trainer.TrainerState(epoch=0.0, max_steps=len(problem.batches)),
                trainer.TrainerControl(),
            )
        self._norm = 0.0

    def clip(self, optimizer: Optimizer) -> float:
        """Clips unchanged and keeps the norm for the log."""
        self._norm = super().clip(optimizer)
        return self._norm

    def update(
        self, loss: Tensor, optimizer: str = MAIN, *, step: bool = True, share: float = 1.0
    ) -> None:
        """The step, between the callback's."""
        if not step:
            super().update(loss, optimizer, step=False, share=share)
            return
        run, inner = self._runs[optimizer], self.problem.optimizers[optimizer]
        run.begin(inner, self.problem.schedulers.get(optimizer))
        super().update(loss, optimizer, share=share)
        rate = inner.param_groups[0]["lr"]
        gone_back = run.callback.stats.rollbacks_executed
        run.end(float(loss.detach()), self._norm, rate, self.interval)
        self.counts.lr_cuts += inner.param_groups[0]["lr"] < rate
        self.counts.rollbacks += run.callback.stats.rollbacks_executed - gone_back
        if run.control.should_training_stop:
            raise Stopped(f"its early stopping at step {run.state.global_step}")


class _Supervised:
    """One callback, and the order of the Trainer's calls."""

    def __init__(
        self, callback: Any, model: nn.Module, args: Any, state: Any, control: Any
    ) -> None:
        self.callback = callback
        self.state, self.control = state, control
        self._model, self._args = model, args
        self._losses: list[float] = []

    def begin(self, optimizer: Optimizer, scheduler: Any) -> None:
        """`on_train_begin` before the first step, `on_step_begin`."""
        to = (self._args, self.state, self.control)
        given = {"model": self._model, "optimizer": optimizer, "lr_scheduler": scheduler}
        if self.state.global_step == 0 and not self._losses:
            self.callback.on_train_begin(*to, **given)
        self.callback.on_step_begin(*to, **given)

    def end(self, loss: float, norm: float, rate: float, interval: int) -> None:
        """`on_step_end`, then, when it is due, `on_log`."""
        to = (self._args, self.state, self.control)
        self.state.global_step += 1
        self.state.epoch = self.state.global_step / self.state.max_steps
        self._losses.append(loss)
        self.callback.on_step_end(*to, model=self._model)
        if self.state.global_step % interval == 0:
            logs = {"loss": sum(self._losses) / interval, "grad_norm": norm, "learning_rate": rate}
            self._losses = []
            self.callback.on_log(*to, logs=logs)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Exists as long as the process."""
    return tempfile.TemporaryDirectory()


@functools.cache
def _trained() -> Path:
    """The file of the meta-trainer, made once per process as in its README."""
    meta = package("meta_trainer", SELF_HEALING_TRAINER)
    before = random.getstate()  # its generator seeds the one that everybody uses
    try:
        curves = meta.TrajectoryGenerator(seed=42).generate_all_scenarios(variations_per_scenario=5)
    finally:
        random.setstate(before)
    trained = meta.MetaTrainer()
    trained.learn_from_trajectories(curves)
    path = Path(_folder().name) / "meta_trainer_model.json"
    trained.save(str(path))
    return path
