"""Rules of published training code that look at the loss: Lightning's and OLMo's."""

from __future__ import annotations

import math
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.healbench.arms.clipping import FixedClip
from benchmarks.healbench.arms.common import package, principal, scaler_skips
from benchmarks.healbench.problem import Problem
from benchmarks.healbench.training import Stopped, Training


class LightningSpike(Training):
    """Lightning's own SpikeDetection with its defaults, called at the end of every batch.

    It raises at the first loss that is not finite or three times the mean of the last ten, and
    the run is over: going back and leaving out the batches that it names is up to whoever starts
    the run again. It is given one loss per batch, as a LightningModule returns one: the last one
    of the main optimizer.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        spike = package("lightning.fabric.utilities.spike", "lightning")
        fabric = package("lightning.fabric", "lightning").Fabric
        self._exception = spike.TrainingSpikeException
        self._folder = tempfile.TemporaryDirectory()
        named = Path(self._folder.name) / "skip_batches.json"
        self._rule = spike.SpikeDetection(exclude_batches_path=str(named))
        self._fabric = fabric(accelerator="cpu", devices=1)
        self._main = principal(problem)
        self._loss: Tensor | None = None

    def batches(self) -> Iterator[Any]:
        """The data in order; what comes after a `yield` is the end of that batch."""
        for index in range(len(self.problem.batches)):
            self._loss = None
            yield self.problem.batches[index]
            if self._loss is None:
                continue
            try:
                self._rule.on_train_batch_end(self._fabric, self._loss, None, index)
            except self._exception as error:
                raise Stopped(str(error)) from error

    def before_backward(self, loss: Tensor, optimizer: str) -> None:
        """Keeps the loss for the end of the batch."""
        if optimizer == self._main:
            self._loss = loss.detach()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._folder.cleanup()


class OlmoSkipStep(FixedClip):
    """OLMo-core's SkipStepOptimizer (3.0.0), with the clip to 1.0 that OLMo 2 was trained with.

    A step is left out when its loss or its norm before clipping is more than 6 standard deviations
    above the mean of the last 128, once there are 64. The windows are as published: outliers and
    NaN stay in them, so that one NaN costs 129 steps. The skip is exact, which is kinder than the
    original, whose factor of 0 lets a NaN gradient through to the moments. One per optimizer.
    """

    window = 128
    sigmas = 6.0

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._seen = {
            id(each): (deque[float](maxlen=self.window), deque[float](maxlen=self.window))
            for each in problem.optimizers.values()
        }

    def admit(self, optimizer: Optimizer, loss: Tensor) -> bool:
        """False for an outlier."""
        norm = self.clip(optimizer)
        if scaler_skips(self.problem, optimizer, norm):
            return True
        value, fine = float(loss.detach()), True
        for window, latest in zip(self._seen[id(optimizer)], (value, norm), strict=True):
            if len(window) + 1 >= self.window // 2:
                spread, mean = torch.std_mean(torch.tensor(list(window)))
                fine &= latest - float(mean) <= self.sigmas * float(spread)
            window.append(latest)
        if not fine:
            finite = math.isfinite(value) and math.isfinite(norm)
            self.counts.finite_skips += finite
            self.counts.nonfinite_skips += not finite
        return fine
