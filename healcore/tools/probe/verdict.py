"""What a probe says: checks with verdicts, and the one verdict of them all."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from healcore.core.errors import HealcoreError


class Verdict(enum.Enum):
    """Of one check, or of a whole probe."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"
    """It cannot be said: too early, too short, or nothing of the kind to look at."""
    ERROR = "ERROR"
    """It could not be read."""

    @property
    def exit_code(self) -> int:
        """0 pass, 1 warn, 2 fail, 3 cannot say."""
        return _EXIT[self]


_EXIT = {Verdict.PASS: 0, Verdict.WARN: 1, Verdict.FAIL: 2, Verdict.SKIP: 3, Verdict.ERROR: 3}

_MILDEST_FIRST = (Verdict.PASS, Verdict.SKIP, Verdict.WARN, Verdict.ERROR, Verdict.FAIL)
"""A failure is one whatever else could not be said; what could not be read may hide one."""


class Check(NamedTuple):
    """One question and its answer."""

    name: str
    verdict: Verdict
    message: str
    """In words, with the number and the bound."""
    value: Any = None
    bound: Any = None
    """What `value` was held against; None where there is nothing to set."""
    decides: bool = True
    """Whether it counts for the verdict of the whole. One that could not be answered, and need not
    be, is told and does not count."""


class Result(NamedTuple):
    """What one probe found in one subject."""

    probe: str
    subject: str
    """The path as given."""
    checks: tuple[Check, ...]
    facts: Mapping[str, Any] = {}
    """What was measured beside the checks."""
    notes: tuple[str, ...] = ()
    """What a reader should know about how it was measured."""

    @property
    def verdict(self) -> Verdict:
        """The worst of the checks that count."""
        return worst(check.verdict for check in self.checks if check.decides)


class ProbeError(HealcoreError, ValueError):
    """Something cannot be probed: the message names it and says what to pass instead."""


class Damaged(ProbeError):
    """It can be read, and is not what any writer writes."""


class NothingToProbe(ProbeError):
    """It can be read, and holds nothing that this probe could judge."""


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of several together; that of none is SKIP."""
    return max(verdicts, key=_MILDEST_FIRST.index, default=Verdict.SKIP)


def unreadable(probe: str, subject: str, error: Exception) -> Result:
    """The result for something that could not be probed."""
    verdict = Verdict.ERROR
    if isinstance(error, NothingToProbe):
        verdict = Verdict.SKIP
    elif isinstance(error, Damaged):
        verdict = Verdict.FAIL
    return Result(probe, subject, (Check("readable", verdict, str(error)),))


def unforeseen(probe: str, subject: str, error: Exception) -> Result:
    """The result for a path whose reading raised what nobody had thought of.

    Damaged bytes raise anything, and a traceback has exit status 1, which is that of WARN.
    """
    lines = str(error).strip().splitlines()
    told = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
    return unreadable(probe, subject, ProbeError(f"{subject} could not be judged: {told}"))
