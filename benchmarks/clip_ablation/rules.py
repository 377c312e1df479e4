"""Clipping rules as NumPy functions over lanes: one lane is one variant of a rule on one seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from healcore.core.signals import Signals
from healcore.policy import load

Limit = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Takes norms and losses (lanes,) of one step, learns them, and returns the limits."""


class Variant(NamedTuple):
    """One rule with its numbers."""

    rule: str
    numbers: dict[str, float]

    @property
    def name(self) -> str:
        """Name of the table's row."""
        return " ".join([self.rule, *(f"{key}={value:g}" for key, value in self.numbers.items())])


def nothing(lanes: int) -> Limit:
    """No clip."""
    return lambda norm, loss: np.full(lanes, np.inf)


def fixed(lanes: int, max_norm: Any) -> Limit:
    """`clip_grad_norm_`."""
    return lambda norm, loss: np.zeros(lanes) + max_norm


def _averaged(lanes: int, decay: Any, warmup: Any, limit_of: Callable, learnt: Callable) -> Limit:
    """A rule with a mean and a variance of the clipped norms: plain in warm-up, then moving."""
    count, mean, var = np.zeros(lanes), np.zeros(lanes), np.zeros(lanes)

    def limit(norm: np.ndarray, loss: np.ndarray) -> np.ndarray:
        nonlocal count, mean, var
        largest = np.where(count < warmup, np.inf, limit_of(mean, var))
        learns = np.isfinite(norm) & (norm > 0)
        value = learnt(np.where(learns, np.minimum(norm, largest), 1.0))
        rate = np.where(count < warmup, 1 / (count + 1), 1 - decay)
        gap = value - mean
        after = mean + rate * gap
        var = np.where(learns, (1 - rate) * (var + rate * gap * gap), var)
        mean = np.where(learns, after, mean)
        count = count + learns
        return largest

    return limit


def deviations(lanes: int, k: Any, r: Any, decay: Any = 0.97, warmup: Any = 10) -> Limit:
    """Mean + k deviations; a deviation is at least r means."""

    def largest(mean: np.ndarray, var: np.ndarray) -> np.ndarray:
        return mean + k * np.maximum(np.sqrt(var), r * mean)

    return _averaged(lanes, decay, warmup, largest, lambda norm: norm)


def logarithm(lanes: int, k: Any, r: Any, decay: Any = 0.97, warmup: Any = 10) -> Limit:
    """The same of the norm's logarithm: r is the least deviation of the logarithm."""

    def largest(mean: np.ndarray, var: np.ndarray) -> np.ndarray:
        return np.exp(mean + k * np.maximum(np.sqrt(var), r))

    return _averaged(lanes, decay, warmup, largest, np.log)


def root_mean_square(lanes: int, k: Any, decay: Any = 0.97, warmup: Any = 10) -> Limit:
    """K times the root mean square."""

    def largest(mean: np.ndarray, var: np.ndarray) -> np.ndarray:
        return k * np.sqrt(mean * mean + var)

    return _averaged(lanes, decay, warmup, largest, lambda norm: norm)


def recent_max(
    lanes: int, k: Any, decay: Any = 0.99, growth: Any = np.inf, warmup: Any = 10
) -> Limit:
    """K times the largest norm that has passed lately, which grows by at most `growth` a step."""
    count, top = np.zeros(lanes), np.zeros(lanes)

    def limit(norm: np.ndarray, loss: np.ndarray) -> np.ndarray:
        nonlocal count, top
        largest = np.where(top > 0, k * top, np.inf)
        most = np.where(top > 0, np.minimum(k, growth) * top, np.inf)
        learns = np.isfinite(norm) & (norm > 0)
        top = np.where(learns, np.maximum(decay * top, np.minimum(norm, most)), top)
        warm = count < warmup
        count = count + learns
        return np.where(warm, np.inf, largest)

    return limit


def _policy(name: str) -> Callable[..., Limit]:
    """The clip of a preset, by healcore's own engine."""

    def rule(lanes: int) -> Limit:
        engine = load(name).engine()
        state = engine.init(batch=(lanes,))

        def limit(norm: np.ndarray, loss: np.ndarray) -> np.ndarray:
            nonlocal state
            signals = Signals(loss=np.float32(loss), grad_norm=np.float32(norm))
            state, _ = engine.step(state, signals, xp=np)
            scale = state.last.decision.grad_scale
            return np.where(scale < 1, scale * norm, np.inf)

        return limit

    return rule


RULES: dict[str, Callable[..., Limit]] = {
    "nothing": nothing,
    "fixed": fixed,
    "deviations": deviations,
    "logarithm": logarithm,
    "rms": root_mean_square,
    "recent_max": recent_max,
    "default": _policy("default"),
    "zclip-paper": _policy("zclip-paper"),
}


def limits(variants: list[Variant], seeds: int) -> Limit:
    """The rules of all variants as one: lane `variant * seeds + seed`."""
    parts: list[tuple[np.ndarray, Limit]] = []
    kinds = [(variant.rule, tuple(variant.numbers)) for variant in variants]
    for rule, keys in dict.fromkeys(kinds):
        chosen = [i for i, kind in enumerate(kinds) if kind == (rule, keys)]
        numbers = {
            key: np.repeat([variants[i].numbers[key] for i in chosen], seeds) for key in keys
        }
        lanes = np.concatenate([np.arange(i * seeds, (i + 1) * seeds) for i in chosen])
        parts.append((lanes, RULES[rule](len(lanes), **numbers)))

    def limit(norm: np.ndarray, loss: np.ndarray) -> np.ndarray:
        largest = np.empty(len(norm))
        for lanes, rule in parts:
            largest[lanes] = rule(norm[lanes], loss[lanes])
        return largest

    return limit
