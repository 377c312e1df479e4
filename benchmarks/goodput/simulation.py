"""A discrete-event simulation of one training run with failures (simpy).

All ranks train in step, so the run is one process; the number of ranks sets how often it fails:

- A *crash* or a *hang* of one rank ends the job. A crash is seen at once, a hang after a time-out;
  then the job starts again from its newest checkpoint.
- *Damage*: from one step on the model gets worse (a divergence, corrupted weights). What is trained
  after it counts for nothing, and checkpoints saved after it are damaged too. A policy rolls back
  after some steps, or a person later; then the run continues from a checkpoint from before it.
- A *needless rollback* of a policy undoes steps although nothing was wrong.
- *Evidence*: forward passes for comparisons of weights, on all ranks, for which training waits.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Generator
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
    restore_s: float
    """How long a rollback keeps training waiting."""
    person_s: float
    """From the damage until a person has the run back in order."""
    rolled_back: float = 0.0
    """Share of the damages that the policy rolls back; a person repairs the others."""
    rollbacks: tuple[tuple[float, float], ...] = ()
    """One of these for each damage that is rolled back, drawn at random: training from the damage
    to the rollback, and training that the rollback undoes."""
    evidence_s: float = 0.0
    """Forward passes for evidence from a damage to its rollback."""
    evidence_share: float = 0.0
    """Forward passes for evidence in a healthy run, as a share of the time of training."""
    needless_per_step: float = 0.0
    needless_s: float = 0.0
    """Training that a needless rollback undoes."""


class Spent(NamedTuple):
    """Where the time of a run went, as shares that add up to 1."""

    useful: float
    """The goodput, or effective training time ratio (ETTR)."""
    lost: float
    """Training that a crash, a hang or a rollback undid, or that a damaged model did."""
    evidence: float
    """Forward passes for evidence in health."""
    saving: float
    down: float
    """Hanging, starting again, restoring, waiting for a person."""


def simulate(cluster: Cluster, care: Care, days: float, seed: int) -> Spent:
    """One run of so many days."""
    environment = simpy.Environment()
    run = _Run(environment, cluster, care, seed)
    environment.run(until=days * DAY)
    return run.spent()


class _Run:
    def __init__(
        self,
        environment: simpy.Environment,
        cluster: Cluster,
        care: Care,
        seed: int,
    ) -> None:
        self._environment, self._cluster, self._care = environment, cluster, care
        # One generator each: under every policy the same failures and damages happen.
        failures, damages, needless, self._policy = np.random.default_rng(seed).spawn(4)
        self._work = 0.0
        """Seconds of training that the present weights have had."""
        self._trained = self._saving = 0.0
        self._since: float | None = None
        """Since when the job trains and saves, or None while it is down."""
        self._saves = [0.0]
        """Work in each checkpoint, ascending; the first is the start of the run."""
        self._damaged_at: float | None = None
        """Work at which the present weights were damaged."""
        self._starts = 0
        """How often the job has been started again."""
        self._process = environment.process(self._train())
        if math.isfinite(cluster.mtbf_s):
            environment.process(self._failures(failures))
        per_second = cluster.damages_per_day / DAY
        environment.process(self._in_training(per_second, damages, self._damage))
        per_second = care.needless_per_step / cluster.step_s
        environment.process(self._in_training(per_second, needless, self._needless))

    def spent(self) -> Spent:
        now = self._environment.now
        self._pause()
        good = self._work if self._damaged_at is None else self._damaged_at
        down = now - self._trained - self._saving
        # Training is slower by the forward passes, at all times alike.
        training = 1 / (1 + self._care.evidence_share)
        lost, evidence = training * (self._trained - good), (1 - training) * self._trained
        spent = (training * good, lost, evidence, self._saving, down)
        return Spent(*(each / now for each in spent))

    # -- the job ---------------------------------------------------------------------------------

    def _train(self) -> Waiting:
        down_s = 0.0
        while True:
            try:
                if down_s:
                    yield self._environment.timeout(down_s)
                    down_s = 0.0
                self._since = self._environment.now
                yield self._environment.event()  # until something happens
            except simpy.Interrupt as interruption:
                self._pause()
                # What interrupts a start or a restore begins it again.
                down_s = max(interruption.cause(), down_s)  # type: ignore[misc]

    def _progress(self) -> tuple[int, float]:
        """Saves since the job trains, and seconds since the last of them; needs `_since`."""
        elapsed = self._environment.now - (self._since or 0.0)
        saves, rest = divmod(elapsed, self._care.interval_s + self._care.save_s)
        return int(saves), rest

    def _pause(self) -> None:
        if self._since is None:
            return
        saves, rest = self._progress()
        interval_s = self._care.interval_s
        self._saves += [self._work + number * interval_s for number in range(1, saves + 1)]
        trained = saves * interval_s + min(rest, interval_s)
        self._work += trained
        self._trained += trained
        self._saving += saves * self._care.save_s + max(rest - interval_s, 0.0)
        self._since = None

    @property
    def _is_training(self) -> bool:
        """Whether the job runs, and does not save."""
        return self._since is not None and self._progress()[1] < self._care.interval_s

    def _restore(self, to: float, *, exactly: bool = False) -> None:
        """Restores the newest checkpoint with at most so much work, or with exactly so much."""
        del self._saves[bisect.bisect_right(self._saves, to) :]
        if exactly:
            self._saves.append(to)
        self._work = self._saves[-1]
        if self._damaged_at is not None and self._work <= self._damaged_at:
            self._damaged_at = None

    # -- what happens to it ------------------------------------------------------------------------

    def _failures(self, generator: np.random.Generator) -> Waiting:
        while True:
            yield self._environment.timeout(generator.exponential(self._cluster.mtbf_s))
            hangs = generator.random() < self._cluster.hang_share
            self._process.interrupt(lambda hangs=hangs: self._restarted(hangs))

    def _restarted(self, hangs: bool) -> float:
        self._starts += 1
        self._restore(math.inf)
        return self._cluster.restart_s + (self._care.hang_timeout_s if hangs else 0.0)

    def _in_training(
        self, per_second: float, generator: np.random.Generator, happens: Callable[[], None]
    ) -> Waiting:
        """Events at this rate; those that fall into a time without training are left out."""
        while per_second:
            yield self._environment.timeout(generator.exponential(1 / per_second))
            if self._is_training:
                happens()

    def _damage(self) -> None:
        if self._damaged_at is None:
            saves, rest = self._progress()
            self._damaged_at = self._work + saves * self._care.interval_s + rest
            self._environment.process(self._repaired(self._damaged_at))

    def _repaired(self, damage: float) -> Waiting:
        """A rollback by the policy, or else by a person."""
        care, starts, waited = self._care, self._starts, 0.0
        if self._policy.random() < care.rolled_back:
            waited, undone = care.rollbacks[self._policy.integers(len(care.rollbacks))]
            yield self._environment.timeout(waited)
            # A restart within this time loses the copies of the weights, and so the evidence.
            if self._damaged_at == damage and self._starts == starts:
                target = damage + waited - undone
                self._process.interrupt(lambda: self._rolled_back(target))
        yield self._environment.timeout(max(care.person_s - waited, 0.0))
        if self._damaged_at == damage:  # else a rollback or a crash has undone it
            self._process.interrupt(lambda: self._rolled_back_by_person(damage))

    def _needless(self) -> None:
        self._process.interrupt(lambda: self._rolled_back(self._work - self._care.needless_s))

    def _rolled_back(self, to: float) -> float:
        # The policy has its own checkpoints: how far it goes back is measured.
        self._restore(max(to, 0.0), exactly=True)
        return self._care.restore_s + self._care.evidence_s

    def _rolled_back_by_person(self, damage: float) -> float:
        self._restore(damage)  # the curve shows which checkpoint is good
        return self._care.restore_s
