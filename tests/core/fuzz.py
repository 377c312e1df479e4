"""Fuzzed signals: many independent runs side by side, each with troubles of its own.

A trace is a `Signals` of arrays with the leading axes (steps, lanes). Some lanes are healthy, some
are nothing but trouble, and the scales reach from what float32 can barely hold to what it cannot.
"""

from typing import Any

import numpy as np

from healcore.core.signals import Signals

ODDITIES = np.array(
    [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-42, 1e-30, 3.4e38, -3.4e38, 1e15, 1e20, -1.0],
    np.float32,
)
"""Values that a signal must never have, and values close to them."""


def signals(
    rng: np.random.Generator, steps: int, lanes: int, *, groups: int = 0, wild: bool = True
) -> Signals:
    """Signals of `lanes` runs, each array (steps, lanes); `group_norms` has `groups` tensors.

    `eval_loss` is NaN at most steps. `wild`: with scales at the ends of float32 and odd values.
    """
    shape = (steps, lanes)
    norm = _norms(rng, shape, wild=wild)
    loss = _losses(rng, shape, wild=wild)
    loss, norm = _grown(rng, loss, norm)
    evaluation = np.where(rng.random(shape) < 0.03, loss + rng.normal(1.0, 2.0, shape), np.nan)
    per_group = None
    if groups:
        share = rng.dirichlet(np.ones(groups), size=lanes).astype(np.float32)
        jitter = np.exp(rng.normal(0, 0.2, (*shape, groups))).astype(np.float32)
        per_group = norm[..., None] * np.sqrt(share) * jitter
        per_group = _disturb(rng, per_group, wild=wild)
    rare = np.where(rng.random(lanes) < 0.5, 0.0, 0.004)
    with np.errstate(over="ignore"):
        evaluation = evaluation.astype(np.float32)
    return Signals(
        loss=_rounded(rng, _disturb(rng, loss, wild=wild)),
        grad_norm=_rounded(rng, _disturb(rng, norm, wild=wild)),
        eval_loss=evaluation,
        group_norms=per_group,
        change_expected=rng.random(shape) < rare,
        externally_skipped=rng.random(shape) < 2 * rare,
        learning_rate=_rates(rng, shape, wild=wild),
    )


def growths(rng: np.random.Generator, steps: int, lanes: int) -> Signals:
    """Runs whose loss and norm grow twice; norms or the rate may rise first, the loss may fall."""
    shape = (steps, lanes)
    t = np.arange(steps)[:, None]
    loss = rng.choice([3.0, 0.1, -1.0], lanes) + rng.choice([0.0, 0.01, 0.1], lanes) * rng.normal(
        size=shape
    )
    norm = np.exp(rng.choice([0.0, 0.1, 0.3], lanes) * rng.normal(size=shape))
    rate = np.where(rng.random(lanes) < 0.2, 1 + t / 100, np.ones(shape))
    for _ in range(2):
        k = np.clip(t - rng.integers(5, steps, lanes), -8, rng.integers(5, 60, lanes))
        after = np.maximum(k, 0.0)
        grown = np.where(
            rng.random(lanes) < 0.5,
            after ** rng.choice([1.0, 2.0, 3.0, 5.0], lanes),
            np.where(k > 0, rng.choice([1.3, 1.6, 2.0, 4.0], lanes) ** np.minimum(after, 30), 0),
        )
        back = (rng.random(lanes) < 0.5) & (np.roll(k, 1, axis=0) == k) & (k > 0)
        grown = np.where(back, 0, grown)
        loss = loss + rng.choice([0.01, 0.1, 1.0], lanes) * grown
        before = (k > -rng.integers(0, 8, lanes)) & (k <= 0)
        norm = norm * np.where(before, rng.choice([1.0, 1.8, 2.5, 6.0], lanes), 1.0)
        norm = norm * (1 + rng.choice([1.0, 10.0, 50.0], lanes) * grown)
        rate = rate * np.where(k > -3, rng.choice([1.0, 1.01, 1.5, 10.0, 0.2], lanes), 1.0)
    restart = rng.random(shape) < 0.003
    norm = np.where(norm > 1e15, np.inf, norm)  # so that growth ends in overflow
    return Signals(
        loss=_rounded(rng, loss.astype(np.float32)),
        grad_norm=_rounded(rng, norm.astype(np.float32)),
        change_expected=restart,
        learning_rate=rate.astype(np.float32),
    )


def at(trace: Signals, step: int, lane: int | None = None) -> Signals:
    """One step of a trace: of all lanes, or of one as NumPy scalars."""
    where = step if lane is None else (step, lane)
    return Signals(*(None if part is None else part[where] for part in trace))


def part(trace: Signals, start: int, stop: int) -> Signals:
    return Signals(*(None if each is None else each[start:stop] for each in trace))


def bf16(x: Any) -> np.ndarray:
    """`x` rounded to bfloat16 and back; NaN and Inf as they are."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32)
    return np.where(np.isfinite(x), rounded.view(np.float32), x)


def _norms(rng: np.random.Generator, shape: tuple[int, int], *, wild: bool) -> np.ndarray:
    """Positive: noisy or constant, with ramps and level shifts."""
    _, lanes = shape
    low, high = (-22, 14) if wild else (-5, 5)
    ordinary = rng.random(lanes) < (0.7 if wild else 1.0)
    exponent = np.where(ordinary, rng.uniform(-3, 2, lanes), rng.uniform(low, high, lanes))
    spread = rng.choice([0.0, 1e-6, 0.01, 0.1, 0.3, 1.0], lanes)
    logs = np.log(10.0) * exponent + spread * rng.normal(size=shape)
    logs += _shifts(rng, shape)
    return np.exp(np.clip(logs, -100, 88)).astype(np.float32)


def _losses(rng: np.random.Generator, shape: tuple[int, int], *, wild: bool) -> np.ndarray:
    """Falling, constant, near zero or negative."""
    steps, lanes = shape
    t = np.arange(steps)[:, None] / max(steps, 1)
    scale = np.where(
        rng.random(lanes) < (0.8 if wild else 1.0), 1.0, 10.0 ** rng.uniform(-20, 10, lanes)
    )
    start = rng.choice([10.0, 3.0, 0.693, 0.0, -2.0], lanes)
    fall = rng.choice([0.0, 1.0, 4.0], lanes) * np.exp(-t * rng.uniform(1, 8, lanes))
    noise = rng.choice([0.0, 1e-6, 0.01, 0.1, 1.0], lanes) * rng.normal(size=shape)
    climb = np.where(rng.random(lanes) < 0.2, 20.0, 0.0) * t
    raised = np.where(rng.random(lanes) < 0.3, 2.0, 0.0) * _shifts(rng, shape)
    loss = start + fall + noise + climb + raised
    logged = np.round(loss, 2)  # as a log with two digits has it
    return (scale * np.where(rng.random(lanes) < 0.2, logged, loss)).astype(np.float32)


def _grown(
    rng: np.random.Generator, loss: np.ndarray, norm: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """In some lanes loss and norm grow together for a while, from step to step."""
    steps, lanes = loss.shape
    some = rng.random(lanes) < 0.4
    t = np.arange(steps)[:, None]
    for _ in range(2):
        start, length = rng.integers(0, steps + 1, lanes), rng.integers(2, 25, lanes)
        rate = some * np.log(rng.choice([1.0, 1.2, 1.5, 2.0, 3.0], lanes))
        stays = rng.random(lanes) < 0.3
        grown = np.clip(t - start + 1, 0, length)
        grown = np.where((t - start >= length) & ~stays, 0, grown) * rate
        size = np.maximum(np.abs(loss).max(0), 1e-3) * rng.choice([0.1, 0.5, 1.0], lanes)
        quicker = rng.choice([1.0, 2.0], lanes)
        with np.errstate(over="ignore"):
            loss = (loss + size * np.expm1(grown)).astype(np.float32)
            norm = (norm * np.exp(np.clip(quicker * grown, 0, 60))).astype(np.float32)
    return loss, norm


def _rates(rng: np.random.Generator, shape: tuple[int, int], *, wild: bool) -> np.ndarray:
    """Schedules: constant, warm-up and decay, steps down; some are no rates at all."""
    steps, lanes = shape
    t = np.arange(steps)[:, None] / max(steps, 1)
    warm = np.minimum(1, t / rng.uniform(0.01, 0.3, lanes))
    decay = 0.5 * (1 + np.cos(np.pi * t))
    stairs = 10.0 ** -np.floor(3 * t)
    kind = rng.integers(0, 4, lanes)
    curve = np.select([kind == 0, kind == 1, kind == 2], [1.0, warm, warm * decay], stairs)
    rates = curve * 10.0 ** rng.uniform(-6, 1, lanes)
    if wild:
        odd = rng.random(shape) < rng.choice([0.0, 0.0, 0.01, 1.0], lanes)
        rates = np.where(odd, rng.choice(ODDITIES, shape), rates)
    return rates.astype(np.float32)


def _shifts(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Sums of jumps and short ramps in the log."""
    steps, lanes = shape
    total = np.zeros(shape)
    for _ in range(3):
        at_step = rng.integers(0, steps + 1, lanes)
        height = np.log(rng.choice([1.0, 1.0, 1.5, 2.0, 3.0, 0.3, 30.0], lanes))
        length = rng.choice([1, 1, 20, 200], lanes)
        total += height * np.clip((np.arange(steps)[:, None] - at_step + 1) / length, 0, 1)
    return total


def _disturb(rng: np.random.Generator, x: np.ndarray, *, wild: bool) -> np.ndarray:
    """Spikes and oddities, at a rate of the lane's own; some come in rows."""
    steps, lanes = x.shape[:2]
    tail = (1,) * (x.ndim - 2)
    rate = rng.choice([0.0, 0.001, 0.01, 0.05, 0.5], lanes).reshape(lanes, *tail)
    spikes = rng.random(x.shape) < rate
    with np.errstate(over="ignore"):
        x = np.where(spikes, x * 10.0 ** rng.uniform(0.3, 4, x.shape), x).astype(np.float32)
    if not wild:
        return x
    rate = rng.choice([0.0, 0.0, 0.001, 0.02, 0.5], lanes).reshape(lanes, *tail)
    odd = rng.random(x.shape) < rate
    x = np.where(odd, rng.choice(ODDITIES, x.shape), x)
    # A row of one and the same oddity: zeros, NaNs.
    row = np.arange(steps)[:, None] - rng.integers(-steps, steps, lanes)
    in_row = ((row >= 0) & (row < rng.choice([0, 5, 60], lanes))).reshape(steps, lanes, *tail)
    return np.where(in_row, rng.choice(ODDITIES[:4], lanes).reshape(lanes, *tail), x)


def _rounded(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """A quarter of the lanes in bfloat16."""
    return np.where(rng.random(x.shape[1]) < 0.25, bf16(x), x).astype(np.float32)
