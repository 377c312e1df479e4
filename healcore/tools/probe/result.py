"""The result of a probe: checks with verdicts, the verdict of them all, and strict JSON of it."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel

from healcore.plugins.checkpoint_contents import Damaged, ProbeError, first_line

SCHEMA = 1
"""Of the JSON document."""


class ProbeVerdict(enum.Enum):
    """Of one check, or of a whole probe."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"
    """No verdict is possible: too early, too short, or nothing of the kind to look at."""
    ERROR = "ERROR"
    """It could not be read."""

    @property
    def exit_code(self) -> int:
        """0 pass, 1 warn, 2 fail, 3 no verdict."""
        return {"PASS": 0, "WARN": 1, "FAIL": 2}.get(self.name, 3)


PASS, WARN, FAIL, SKIP, ERROR = ProbeVerdict
_MILDEST_FIRST = (PASS, SKIP, WARN, ERROR, FAIL)
"""A failure stays one whatever else is unknown; what could not be read may hide one."""


class Check(NamedTuple):
    """One question and its answer."""

    name: str
    verdict: ProbeVerdict
    message: str
    """A sentence with the number and the bound."""
    value: Any = None
    bound: Any = None
    """What `value` was compared with; None where there is nothing to set."""
    decides: bool = True
    """Whether it counts for the verdict of the whole. A check that could not be answered, and need
    not be, is shown and does not count."""


class ProbeResult(NamedTuple):
    """What one probe found in one subject."""

    probe: str
    subject: str
    """The path as given."""
    checks: tuple[Check, ...]
    facts: Mapping[str, Any] = {}
    """Measurements besides the checks."""
    notes: tuple[str, ...] = ()
    """What a reader should know about how it was measured."""

    @property
    def verdict(self) -> ProbeVerdict:
        """The worst of the checks that count."""
        return worst(check.verdict for check in self.checks if check.decides)


class NothingToProbe(ProbeError):
    """It can be read, and holds nothing that this probe could judge."""


def worst(verdicts: Iterable[ProbeVerdict]) -> ProbeVerdict:
    """The verdict of several together; that of none is SKIP."""
    return max(verdicts, key=_MILDEST_FIRST.index, default=SKIP)


def unreadable(probe: str, subject: str, error: Exception) -> ProbeResult:
    """The result for something that could not be probed."""
    skip, fail = isinstance(error, NothingToProbe), isinstance(error, Damaged)
    verdict = SKIP if skip else FAIL if fail else ERROR
    return ProbeResult(probe, subject, (Check("readable", verdict, str(error)),))


def unforeseen(probe: str, subject: str, error: Exception) -> ProbeResult:
    """The result for a path whose reading raised an unexpected exception.

    Damaged bytes raise anything, and a traceback has exit status 1, which is that of WARN.
    """
    name, line = type(error).__name__, first_line(error)
    message = name if line == name else f"{name}: {line}"
    return unreadable(probe, subject, ProbeError(f"{subject} could not be judged: {message}"))


def several(items: Sequence[str], separator: str = ", ") -> str:
    """The first three of a list, and how many more there are."""
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return separator.join(items[:3]) + more


def dumps(results: Sequence[ProbeResult], inputs: BaseModel) -> str:
    """What `--json` prints: the same keys every time, no NaN and no Infinity.

    Args:
        results: one per subject.
        inputs: the thresholds that they were judged by.
    """
    verdict = worst(result.verdict for result in results)
    document = {
        "schema": SCHEMA,
        "verdict": verdict,
        "exit_code": verdict.exit_code,
        "inputs": inputs.model_dump(),
        "results": [{**result._asdict(), "verdict": result.verdict} for result in results],
    }
    text = json.dumps(_plain(document), indent=2, allow_nan=False, ensure_ascii=False)
    # Halves of surrogate pairs in a name cannot be written; \udc80 is JSON for one.
    return text.encode("utf-8", "backslashreplace").decode()


def _plain(value: Any) -> Any:
    """A JSON-safe value: arrays as lists, numbers that are not finite as "nan", "inf", "-inf"."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())  # type: ignore[attr-defined]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value
