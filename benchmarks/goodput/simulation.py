"""A discrete-event simulation of one training run with failures (simpy).

All ranks train in step, so the run is one process; the number of ranks sets how often it fails:

- A *crash* or a *hang* of one rank ends the job. A crash is seen at once, a hang after a time-out;
  then the job starts again from its newest checkpoint.
- *Damage*: from one step on the model gets worse (a divergence, corrupted weights). What is trained
  after it counts for nothing, and checkpoints saved after it are damaged too. A policy notices it
  after some steps, or a person after hours; then the run goes back to a checkpoint from before it.
- A *false alarm* of a policy goes back although nothing was wrong.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import simpy

DAY = 86_400.0
Waiting = Generator[simpy.Event, Any, None]


@dataclass(frozen=True)
class Cluster:
    """What happens to a run, whatever its policy. Times are in seconds."""

    ranks: int
    failures_per_rank_day: float
    hang_share: float
    """Of the failures: those in which no process ends."""
    damages_per_day: float
    """Of training; they do not depend on the number of ranks."""
    step_s: float
    restart_s: float
    """From the end of a job to its next step: scheduling, start, reading the checkpoint."""

    @property
    def mtbf_s(self) -> float:
        """Mean time between two failures of any rank."""
        failures_per_day = self.ranks * self.failures_per_rank_day
        return DAY / failures_per_day if failures_per_day else math.inf


@dataclass(frozen=True)
class Care:
    """What looks after the run: a policy, or a person. Times are in seconds."""

    name: str
    interval_s: float
    """Training between two checkpoints."""
    save_s: float
    """How long a checkpoint keeps training waiting."""
    hang_timeout_s: float
    noticed: float
    """Share of the damages that the policy notices; a person notices the others."""
    notice_s: float
    """Training from the damage to the policy's rollback."""
    rollback_s: float
    """How long a rollback keeps training waiting."""
    person_s: float
    """From the damage until a person has the run back in order."""
    false_per_step: float = 0.0
    probation_s: float = 0.0
    """A checkpoint is known to be good after so much more training without an alarm."""


class Spent(NamedTuple):
    """Where the time of a run went, as shares that add up to 1."""

    useful: float
    """The goodput, or effective training time ratio (ETTR)."""
    lost: float
    """Training that a crash, a hang or a rollback undid, or that a damaged model did."""
    saving: float
    down: float
    """Hanging, starting again, restoring, waiting for a person."""


def simulate(cluster: Cluster, care: Care, days: float, seed: int) -> Spent:
    """One run of so many days."""
    environment = simpy.Environment()
    run = _Run(environment, cluster, care, np.random.default_rng(seed))
    environment.run(until=days * DAY)
    return run.spent()


class _Run:
    def __init__(
        self,
        environment: simpy.Environment,
        cluster: Cluster,
        care: Care,
        generator: np.random.Generator,
    ) -> None:
        self._environment, self._cluster, self._care = environment, cluster, care
        self._generator = generator
        self._work = 0.0
        """Seconds of training that the present weights have had."""
        self._trained = self._saving = 0.0
        self._training_since: float | None = None
        self._saves = [0.0]
        """Work in each checkpoint; the first is the start of the run."""
        self._damaged_at: float | None = None
        """Work at which the present weights were damaged."""
        self._process = environment.process(self._train())
        if math.isfinite(cluster.mtbf_s):
            environment.process(self._failures())
        per_second = cluster.damages_per_day / DAY
        environment.process(self._in_training(per_second, self._damage))
        environment.process(self._in_training(care.false_per_step / cluster.step_s, self._alarm))

    def spent(self) -> Spent:
        now = self._environment.now
        self._pause()
        good = self._work if self._damaged_at is None else self._damaged_at
        down = now - self._trained - self._saving
        return Spent(good / now, (self._trained - good) / now, self._saving / now, down / now)

    # -- the job ---------------------------------------------------------------------------------

    def _train(self) -> Waiting:
        down_s = 0.0
        while True:
            try:
                if down_s:
                    yield self._environment.timeout(down_s)
                    down_s = 0.0
                yield from self._interval()
            except simpy.Interrupt as interruption:
                self._pause()
                # What interrupts a start or a restore begins it again.
                down_s = max(interruption.cause(), down_s)  # type: ignore[misc]

    def _interval(self) -> Waiting:
        self._training_since = self._environment.now
        yield self._environment.timeout(self._care.interval_s)
        self._pause()
        began = self._environment.now
        try:
            yield self._environment.timeout(self._care.save_s)
            self._saves.append(self._work)
        finally:
            self._saving += self._environment.now - began

    def _pause(self) -> None:
        if self._training_since is not None:
            took = self._environment.now - self._training_since
            self._work += took
            self._trained += took
            self._training_since = None

    def _go_back(self, to: float) -> None:
        """Restores the newest checkpoint with at most so much work."""
        self._saves = [each for each in self._saves if each <= to]
        self._work = self._saves[-1]
        if self._damaged_at is not None and self._work <= self._damaged_at:
            self._damaged_at = None

    # -- what happens to it ------------------------------------------------------------------------

    def _failures(self) -> Waiting:
        while True:
            yield self._environment.timeout(self._generator.exponential(self._cluster.mtbf_s))
            hangs = self._generator.random() < self._cluster.hang_share
            self._process.interrupt(lambda hangs=hangs: self._restarted(hangs))

    def _restarted(self, hangs: bool) -> float:
        self._go_back(math.inf)
        return self._cluster.restart_s + (self._care.hang_timeout_s if hangs else 0.0)

    def _in_training(self, per_second: float, happens: Any) -> Waiting:
        """Events at this rate; those that fall into a time without training are left out."""
        while per_second:
            yield self._environment.timeout(self._generator.exponential(1 / per_second))
            if self._training_since is not None:
                happens()

    def _damage(self) -> None:
        if self._damaged_at is None:
            self._damaged_at = self._work + self._environment.now - self._training_since  # type: ignore[operator]
            by_policy = self._generator.random() < self._care.noticed
            self._environment.process(self._noticed(self._damaged_at, by_policy))

    def _noticed(self, damage: float, by_policy: bool) -> Waiting:
        care = self._care
        yield self._environment.timeout(care.notice_s if by_policy else care.person_s)
        if self._damaged_at != damage:
            return  # a crash has undone it
        if by_policy:
            self._process.interrupt(lambda: self._rolled_back(damage - care.probation_s))
        else:  # a person sees on the curve which checkpoint is good
            self._process.interrupt(lambda: self._rolled_back(damage))

    def _alarm(self) -> None:
        self._process.interrupt(lambda: self._rolled_back(self._work - self._care.probation_s))

    def _rolled_back(self, to: float) -> float:
        self._go_back(max(to, 0.0))
        return self._care.rollback_s
