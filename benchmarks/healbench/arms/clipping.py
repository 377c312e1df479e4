"""Gradient clipping: none, fixed, ZClip and AdaGC."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.healbench.arms.common import gradients, package, parameters, scaler_skips
from benchmarks.healbench.problem import Problem
from benchmarks.healbench.training import Training

_foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
_foreach_mul_ = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]


class Nothing(Training):
    """The program as it is."""


class FixedClip(Training):
    """`clip_grad_norm_` to 1.0, for each optimizer's parameters."""

    max_norm = 1.0

    def admit(self, optimizer: Optimizer, loss: Tensor) -> bool:
        """Clips; takes every step."""
        self.clip(optimizer)
        return True

    def clip(self, optimizer: Optimizer) -> float:
        """The norm before clipping."""
        norm = float(nn.utils.clip_grad_norm_(parameters(optimizer), self.max_norm))
        self.counts.clips += self.max_norm < norm < math.inf
        return norm


class _Parameters(nn.Module):
    """An optimizer's parameters, for a function that wants a model."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self._optimizer = optimizer

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(parameters(self._optimizer))  # type: ignore[arg-type]


class ZClip(Training):
    """The authors' package with its defaults, as in its README: `zclip.step(model)`.

    Its defaults include a fixed limit of 1.0 on top. One per optimizer.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        rule = package("zclip", "zclip==1.0.0").ZClip
        self._rules = {id(each): rule() for each in problem.optimizers.values()}
        self._models = {id(each): _Parameters(each) for each in problem.optimizers.values()}

    def admit(self, optimizer: Optimizer, loss: Tensor) -> bool:
        """Clips; takes every step."""
        model = self._models[id(optimizer)]
        norm = float(self._rules[id(optimizer)].step(model))
        if math.isfinite(norm) and norm > 0:
            left = float(nn.utils.get_total_norm(gradients(optimizer)))
            self.counts.clips += left < 0.9999 * norm
        return True


class AdaGC(Training):
    """AdaGC (arXiv:2502.11034v2), in place before the program's own optimizer.

    The one package that has it (pytorch_optimizer) has it as an optimizer of its own. Here it is
    from the formula, with the numbers of the paper's second version; with the package's numbers
    (1.05, 0.98) it gives the package's factors. Where a GradScaler leaves a step out, no history
    is written, as in an optimizer that is not called.
    """

    limit = 1.0
    """lambda_abs: global norm in the warm-up."""
    ratio = 1.04
    """lambda_rel: of a tensor's norm over the average of its clipped norms."""
    decay = 0.99
    """beta."""
    warmup = 100
    """T_start, in steps."""
    eps = 1e-8

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._averages: dict[Tensor, float] = {}
        self._taken: dict[int, int] = {}

    def admit(self, optimizer: Optimizer, loss: Tensor) -> bool:
        """Clips each tensor by its own history; takes every step."""
        weights = [each for each in parameters(optimizer) if each.grad is not None]
        grads = gradients(optimizer)
        if not grads:
            return True
        norms = torch.stack(list(_foreach_norm(grads))).tolist()
        total = math.hypot(*norms)
        if scaler_skips(self.problem, optimizer, total):
            return True
        taken = self._taken.get(id(optimizer), 0)
        self._taken[id(optimizer)] = taken + 1
        together = _at_most_1(self.limit, total + self.eps)
        factors = [
            self._factor(weight, norm, together, warm=taken >= self.warmup)
            for weight, norm in zip(weights, norms, strict=True)
        ]
        if not all(each == 1.0 for each in factors):
            self.counts.clips += 1
            _foreach_mul_(grads, factors)
        return True

    def _factor(self, weight: Tensor, norm: float, together: float, *, warm: bool) -> float:
        average = self._averages.get(weight)
        if average is None or not warm:
            left = together * norm
            self._averages[weight] = left if average is None else _least(average, left)
            return together
        factor = _at_most_1(self.ratio * max(average, self.eps), max(norm, self.eps))
        self._averages[weight] = self.decay * average + (1 - self.decay) * factor * norm
        return factor


def _at_most_1(limit: float, norm: float) -> float:
    """The factor that brings a norm to a limit; NaN stays NaN, as in tensors."""
    factor = limit / norm
    return 1.0 if factor > 1 else factor


def _least(a: float, b: float) -> float:
    """NaN if one is, as torch.minimum."""
    return math.nan if math.isnan(a) or math.isnan(b) else min(a, b)
