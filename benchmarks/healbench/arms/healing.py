"""healcore itself: a policy attached to each optimizer, and the Healer around the whole loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

import healcore
from benchmarks.healbench.arms.common import silent
from benchmarks.healbench.problem import MAIN, Problem
from benchmarks.healbench.training import Stopped, Training
from healcore.core.decision import Cause
from healcore.torch import Healing, attach

_NONFINITE = Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD


class _Counting(Training):
    """Counts what the handles of the optimizers did.

    What a GradScaler leaves out by itself never reaches an optimizer and is not counted.
    """

    heals: Mapping[str, Healing]
    """The handle of each optimizer, by the problem's names."""

    def update(
        self, loss: Tensor, optimizer: str = MAIN, *, step: bool = True, share: float = 1.0
    ) -> None:
        """Takes the unchanged step, then reads the decision."""
        live = self.heals[optimizer].live_engine
        before = live.decision
        super().update(loss, optimizer, step=step, share=share)
        if live.decision is None or live.decision is before or not bool(live.decision.skip):
            return
        if int(live.decision.cause) & _NONFINITE:
            self.counts.nonfinite_skips += 1
        else:
            self.counts.finite_skips += 1

    def count(self) -> None:
        """Copies the counts that the handles keep."""
        metrics = [heal.metrics() for heal in self.heals.values()]
        self.counts.clips = sum(int(each["heal/clips"]) for each in metrics)
        self.counts.lr_cuts = sum(int(each["heal/lr_cuts"]) for each in metrics)
        self.counts.lr_scale = min(float(each["heal/lr_scale"]) for each in metrics)


class _Rows(Sequence):
    """Something indexable as the Sequence that it is: the Healer rewinds what calls itself one."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]


class Attached(_Counting):
    """`heal = attach(optimizer, policy)` for each optimizer, and `heal.observe(loss)`.

    Args:
        problem: the program.
        policy: a preset's name, or whatever else `attach` takes.
    """

    def __init__(self, problem: Problem, policy: Any) -> None:
        super().__init__(problem)
        self._policy = policy

    def __enter__(self) -> Attached:
        self.heals = {
            name: attach(each, self._policy, scaler=self.problem.scaler)
            for name, each in self.problem.optimizers.items()
        }
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.count()
        for heal in self.heals.values():
            heal.detach()

    def before_backward(self, loss: Tensor, optimizer: str) -> None:
        """Reports the loss."""
        self.heals[optimizer].observe(loss)


class Healed(_Counting):
    """The loop of the README, with everything in `state` that the program has.

    Checkpoints stay in host memory (`store=None`), where they are gone back to first anyway.
    `counts.evidence` is in optimizer steps and in forward passes over the batch of a step.

    Args:
        problem: the program.
        policy: a preset's name, or whatever else `Healer` takes.
        ask: pass the program's `loss_fn` on, where it has one.
    """

    start = 500
    """Steps in which a run may spend the evaluations that it starts with."""

    def __init__(self, problem: Problem, policy: Any = "default", *, ask: bool = False) -> None:
        super().__init__(problem)
        state = {
            **{f"module_{name}": each for name, each in problem.modules.items()},
            **{f"optimizer_{name}": each for name, each in problem.optimizers.items()},
            **{f"scheduler_{name}": each for name, each in problem.schedulers.items()},
            **{f"state_{name}": each for name, each in problem.state.items()},
        }
        if problem.scaler is not None:
            state["scaler"] = problem.scaler
        self._batch: Any = None
        """The current batch, for a program whose loss is that of its `loss_fn`."""
        self._asks = ask and problem.loss_fn is not None
        self._passes, self._passes_before = 0, list[int]()
        """Calls of the `loss_fn` so far, and before each update."""
        self._stepped = 0
        options: dict[str, Any] = {"loss_fn": self._counted_loss} if self._asks else {}
        self._healer = healcore.Healer(policy, state=state, store=None, **options)
        self._ended: healcore.RunStopped | None = None
        self._silence = contextlib.ExitStack()

    def __enter__(self) -> Healed:
        self._silence.enter_context(silent("healcore"))
        try:
            self._healer.__enter__()
        except BaseException:
            self._silence.close()
            raise
        driver: Any = self._healer._run.driver
        self.heals = {
            name: driver.healings[f"optimizer_{name}"] for name in self.problem.optimizers
        }
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None and self._ended is not None:
            kind, error, trace = type(self._ended), self._ended, self._ended.__traceback__
        try:
            self._healer.__exit__(kind, error, trace)
        finally:
            self._silence.close()
        self.count()
        self.counts.rollbacks = self._healer.rollbacks
        self.counts.evidence = self._evidence()

    def _counted_loss(self, batch: Any) -> Tensor:
        self._passes += 1
        assert self.problem.loss_fn is not None
        return self.problem.loss_fn(batch)

    def _evidence(self) -> dict[str, float]:
        size = len(self._passes_before) / max(1, self._stepped)  # micro-batches of a step
        passes = [*self._passes_before, self._passes]

        def at(step: float) -> float:
            return passes[min(round(step * size), len(passes) - 1)] / size

        steps = self.steps / size
        found = {"steps": steps, "passes": self._passes / size}
        found |= {"later_steps": max(0.0, steps - self.start)}
        found |= {"later_passes": found["passes"] - at(self.start)}
        if self.problem.fault is not None and self.counts.rollbacks:
            back, fault = self._healer.report().rollbacks[0], self.problem.fault / size
            found |= {"fault": int(fault), "rollback": back.step, "target": back.checkpoint}
            found["passes_to_rollback"] = at(back.step) - at(fault)
        return found

    def update(
        self, loss: Tensor, optimizer: str = MAIN, *, step: bool = True, share: float = 1.0
    ) -> None:
        """Counts the optimizer steps."""
        super().update(loss, optimizer, step=step, share=share)
        self._stepped += step

    def batches(self) -> Iterator[Any]:
        """Through the Healer, which goes back in them."""
        try:
            for batch in self._healer.batches(_Rows(self.problem.batches)):
                self._batch = batch if self._asks else None
                yield batch
        except healcore.RunStopped as error:
            self._ended = error
            raise Stopped(error.why) from error

    def before_backward(self, loss: Tensor, optimizer: str) -> None:
        """Reports the loss, as `healer.loss(batch)` does."""
        self._passes_before.append(self._passes)
        self._healer.observe(loss, f"optimizer_{optimizer}", batch=self._batch)
