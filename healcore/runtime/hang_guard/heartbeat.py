"""The heartbeat of a training process: a few numbers in memory that its guard maps too.

Standard library only: the guard imports this file.
"""

from __future__ import annotations

import mmap
import time

SIZE = 4 * 8
"""Bytes: four int64, each written in one store."""

_SINCE, _LONGEST, _STEPPED, _STEP = range(4)


class Heartbeat:
    """The numbers in the memory of a file descriptor of `SIZE` bytes.

    The training process writes them and the guard reads them; neither waits.
    """

    def __init__(self, descriptor: int) -> None:
        self._numbers = memoryview(mmap.mmap(descriptor, SIZE)).cast("q")
        self._began = self._longest = 0

    # -- the training process -------------------------------------------------------------------

    def watch(self) -> None:
        """From now on the time counts, from 0."""
        self.pause()
        self._began = self._numbers[_SINCE] = time.monotonic_ns()

    def resume(self) -> None:
        """From now on the time counts, if it does not already."""
        if not self._began:
            self._began = self._numbers[_SINCE] = time.monotonic_ns()

    def pause(self) -> None:
        """From now on the time does not count."""
        if self._began:
            took = time.monotonic_ns() - self._began
            if took > self._longest:
                self._longest = self._numbers[_LONGEST] = took
            self._began = self._numbers[_SINCE] = 0

    def first_step_done(self) -> None:
        """This process has done an optimizer step."""
        self._numbers[_STEPPED] = 1

    def stepped(self, step: int) -> None:
        """The run has done so many optimizer steps."""
        self._numbers[_STEPPED] = 1
        self._numbers[_STEP] = step

    # -- the guard ------------------------------------------------------------------------------

    @property
    def since(self) -> int:
        """CLOCK_MONOTONIC in nanoseconds when the time began to count; 0: it does not count."""
        return self._numbers[_SINCE]

    @property
    def longest_s(self) -> float:
        """The longest time so far that counted and came to an end, in seconds."""
        return self._numbers[_LONGEST] / 1e9

    @property
    def has_stepped(self) -> bool:
        """Whether this process has done an optimizer step."""
        return bool(self._numbers[_STEPPED])

    @property
    def step(self) -> int:
        """Optimizer steps of the run, with those of earlier processes."""
        return self._numbers[_STEP]
