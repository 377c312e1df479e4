"""`Cost`: what healing has cost a run. `Meter` measures the time of the training thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, get_args

Part = Literal["training", "between_steps", "saves", "restores", "comparisons"]
"""What the training thread does."""


class Cost(NamedTuple):
    """What healing has cost this process so far. `str()` returns one line.

    Times are seconds of the thread that trains. None means that a number is not known. With several
    ranks all numbers but `written_bytes` are those of this rank.
    """

    seconds: float = 0.0
    """Duration of the run in this process, or since `attach`."""
    steps: int = 0
    """Optimizer steps of this process, including steps that a rollback has undone."""
    in_steps_s: float | None = None
    """Time within optimizer steps: norms, the engine, clip. On an accelerator the time of the host
    only. None in JAX, where healing is part of the compiled step."""
    between_steps_s: float = 0.0
    """Time between two steps, without the other parts and without waiting for a step's numbers."""
    saves_s: float = 0.0
    """Time of saves, including waits for the device and for the disk. A write in the background
    costs no time here."""
    restores_s: float = 0.0
    """Time of restoring checkpoints, for rollbacks and at the start. The steps that the run repeats
    after a rollback are in `steps`."""
    comparisons_s: float = 0.0
    """Time of comparisons with earlier weights, including the wait for steps in progress."""
    forward_passes: int = 0
    """Calls of `loss_fn` by the Healer. `Healer.loss` calls it for training, which does not
    count."""
    host_syncs: int | None = None
    """Host syncs that healing has added within optimizer steps. Saves, restores and comparisons
    wait for the device too: their time includes this wait."""
    host_bytes: int | None = 0
    """Bytes of host memory that hold copies now: checkpoints and earlier weights. None if a store
    of your own does not count them."""
    written_bytes: int | None = 0
    """Bytes of the checkpoints written to disk, by all ranks together, also of those that were
    deleted later. None if a store of your own does not count them."""
    first_pass_s: float = 0.0
    """Part of `comparisons_s` for the first call of `loss_fn`, which may compile the function."""

    @property
    def total_s(self) -> float:
        """Sum of all times that are known, without `seconds`."""
        parts = self.between_steps_s + self.saves_s + self.restores_s + self.comparisons_s
        return parts + (self.in_steps_s or 0.0)

    @property
    def share(self) -> float:
        """`total_s` as a share of the run's duration, from 0 to 1."""
        return min(1.0, self.total_s / self.seconds) if self.seconds > 0 else 0.0

    def known(self) -> dict[str, float]:
        """Name -> value of the numbers that are known, times rounded to microseconds."""
        return {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in self._asdict().items()
            if value is not None
        }

    def __str__(self) -> str:
        from rich.filesize import decimal  # a local import, so that `attach` loads fast

        passes = self.forward_passes
        counted = f"{passes:,} forward pass{'' if passes == 1 else 'es'}"
        if self.first_pass_s > self.total_s / 2:
            counted += f"; {_short(self.first_pass_s)} s the first one, which may compile loss_fn"
        times = [
            (self.in_steps_s, "in steps"),
            (self.between_steps_s, "between steps"),
            (self.saves_s, "saves"),
            (self.restores_s, "restores"),
            (self.comparisons_s, f"comparisons ({counted})"),
        ]
        memory, disk = self.host_bytes, self.written_bytes
        parts = [
            *(f"{_short(each)} s {what}" for each, what in times if each),
            f"{self.host_syncs:,} host syncs" if self.host_syncs else "",
            f"{decimal(memory)} of host memory" if memory else "",
            f"{decimal(disk)} written" if disk else "",
        ]
        whole = f"healing took {_short(100 * self.share)} % of {_short(self.seconds)} s"
        return ": ".join(filter(None, (whole, ", ".join(filter(None, parts)))))


def _short(number: float) -> str:
    return f"{number:.2g}" if number < 10 else f"{number:,.0f}"


class Meter:
    """Divides the time of the training thread between the parts of a run.

    The time of an inner part does not count for the outer part. Not thread-safe.
    """

    def __init__(self) -> None:
        self.forward_passes = 0
        self._first_pass_s = 0.0
        self._seconds: dict[Part, float] = dict.fromkeys(get_args(Part), 0.0)
        self._waited = 0.0
        self._part: Part = "training"
        self._since = time.monotonic()

    def switch(self, part: Part, now: float) -> Part:
        """Begins a part at `now`, a value of `time.monotonic`. Returns the part that ends."""
        ended = self._part
        self._seconds[ended] += now - self._since
        self._part, self._since = part, now
        return ended

    def exclude(self, seconds: float) -> None:
        """Takes a wait for the device, which has just ended, out of the current part."""
        self._since += seconds
        self._waited += seconds

    @contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """A context whose time counts for `part`."""
        outer = self.switch(part, time.monotonic())
        try:
            yield
        finally:
            self.switch(outer, time.monotonic())
            if part == "comparisons":
                self._first_pass_s = self._first_pass_s or self._seconds[part]

    def add_to(self, cost: Cost) -> Cost:
        """Adds the times so far, and the forward passes, to a cost without them."""
        self.switch(self._part, time.monotonic())
        seconds = self._seconds
        return cost._replace(
            seconds=sum(seconds.values()) + self._waited,
            between_steps_s=seconds["between_steps"],
            saves_s=seconds["saves"],
            restores_s=seconds["restores"],
            comparisons_s=seconds["comparisons"],
            forward_passes=self.forward_passes,
            first_pass_s=self._first_pass_s,
        )
