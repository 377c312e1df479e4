"""The detector `records` on synthetic losses: false alarms of healthy runs, explosions found.

Each row is one set of thresholds, each stream 400 runs of 1,000 steps. Prints the largest share of
runs with an alarm over the exchangeable streams (which `alpha` bounds) and over those that only
wander, and for explosions the share found within 20 steps and the median number of steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from healcore.core.detectors import RecordsConfig
from healcore.core.signals import Signals, observe

STEPS, RUNS = 1000, 400
Stream = Callable[[np.random.Generator], np.ndarray]


def ar(share: float) -> Stream:
    """A moving average of noise, which starts at its own spread."""

    def stream(rng: np.random.Generator) -> np.ndarray:
        noise = rng.normal(size=(STEPS, RUNS))
        noise[0] /= np.sqrt(1 - share**2)
        for i in range(1, STEPS):
            noise[i] += share * noise[i - 1]
        return noise

    return stream


def mix(share: float, ratio: float) -> Stream:
    """Two sources, with losses 1 and `ratio`."""

    def stream(rng: np.random.Generator) -> np.ndarray:
        level = np.where(rng.random((STEPS, RUNS)) < share, ratio, 1.0)
        return level * np.exp(0.1 * rng.normal(size=level.shape))

    return stream


def learning(noise: Stream, scale: float) -> Stream:
    """The same noise on a loss that falls."""
    return lambda rng: 5 * np.exp(-np.arange(STEPS) / 200)[:, None] + scale * noise(rng)


def normal(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(STEPS, RUNS))


EXCHANGEABLE: dict[str, Stream] = {
    "normal": normal,
    "exponential": lambda rng: rng.exponential(size=(STEPS, RUNS)),
    "log-normal": lambda rng: np.exp(2 * normal(rng)),
    "Student t, 2": lambda rng: rng.standard_t(2, (STEPS, RUNS)),
    "Cauchy": lambda rng: rng.standard_cauchy((STEPS, RUNS)),
    "15 % of 20 x": mix(0.15, 20.0),
    "1 % of 100 x": mix(0.01, 100.0),
    "half of 3 x": mix(0.5, 3.0),
}
WANDERING: dict[str, Stream] = {
    "falling": learning(normal, 0.3),
    "falling, 15 % of 20 x": learning(mix(0.15, 20.0), 0.5),
    "AR 0.97": ar(0.97),
    "AR 0.99": ar(0.99),
    "AR 0.999": ar(0.999),
    "random walk": lambda rng: np.cumsum(normal(rng), axis=0),
    "ramp, 1 unit of noise in 100 steps": lambda rng: normal(rng) + np.arange(STEPS)[:, None] / 100,
    "ramp, 1 unit in 10": lambda rng: normal(rng) + np.arange(STEPS)[:, None] / 10,
    "ramp, 1 unit in 2": lambda rng: normal(rng) + np.arange(STEPS)[:, None] / 2,
}


def explosions(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Losses and onsets: growth by a factor of 1.1 to 4 a step, to at most 1e6."""
    onset = rng.integers(10, 900, RUNS)
    factor = rng.choice([1.1, 1.3, 1.6, 2.5, 4.0], RUNS)
    grown = factor ** np.clip(np.arange(STEPS)[:, None] - onset, 0, 200) - 1
    noise = rng.choice([0.03, 0.3], RUNS) * normal(rng)
    return 2 + 3 * np.exp(-np.arange(STEPS) / 100)[:, None] + noise + np.minimum(grown, 1e6), onset


def first_alarms(losses: np.ndarray, config: RecordsConfig) -> np.ndarray:
    """The step of each run's first alarm, or the number of steps."""
    state, found = config.init(), np.full(RUNS, STEPS)
    for i, loss in enumerate(losses.astype(np.float32)):
        seen = observe(Signals(loss=loss), np.zeros(RUNS, bool), clips=False, xp=np)
        with np.errstate(all="ignore"):
            state, reading = config.update(state, seen, xp=np)
        found = np.where(reading.alarm & (found == STEPS), i, found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", action="store_true", help="each stream, default thresholds")
    options = parser.parse_args()
    base = RecordsConfig()
    if options.streams:
        for name, stream in (EXCHANGEABLE | WANDERING).items():
            found = first_alarms(stream(np.random.default_rng(1)), base)
            print(f"{name:36} {(found < STEPS).sum():4} of {RUNS}")
        return
    variants = {"as it is": base}
    for field in ("growth", "record_rate", "alpha"):
        for factor in (0.0, 0.5, 0.75, 1.25, 1.5, 2.0, 4.0):
            number = factor * getattr(base, field)
            if 0 < number < 1 or (field == "growth" and number <= 1):
                variants[f"{field} = {number:g}"] = base._replace(**{field: number})
    variants |= {f"warmup_steps = {n}": base._replace(warmup_steps=n) for n in (1, 2, 4, 6, 12)}
    print(f"{'':24}{'exchangeable':>14}{'wandering':>11}{'found in 20':>13}{'median':>8}")
    for name, config in variants.items():
        shares = []
        for streams in (EXCHANGEABLE, WANDERING):
            each = [first_alarms(s(np.random.default_rng(1)), config) for s in streams.values()]
            shares.append(max((found < STEPS).mean() for found in each))
        losses, onset = explosions(np.random.default_rng(2))
        late = first_alarms(losses, config) - onset
        found = (late >= 0) & (late <= 20)
        print(
            f"{name:24}{shares[0]:14.4f}{shares[1]:11.4f}{found.mean():13.3f}"
            f"{np.median(late[found]):8.0f}"
        )


if __name__ == "__main__":
    main()
