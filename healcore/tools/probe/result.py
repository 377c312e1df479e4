"""The result of a probe: checks with verdicts, the overall verdict, and strict JSON."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from healcore.checkpoint_contents import Damaged, ProbeError, first_line
from healcore.core.errors import HealcoreError
from healcore.events.log import to_json

_SCHEMA = 1


class ProbeVerdict(enum.Enum):
    """Verdict of one check or of a whole probe, from the least severe."""

    PASS = "PASS"
    SKIP = "SKIP"
    """No verdict is possible: too early, too short, or nothing to judge."""
    WARN = "WARN"
    ERROR = "ERROR"
    """Outweighs WARN, because unreadable data may hide a failure."""
    FAIL = "FAIL"

    @property
    def exit_code(self) -> int:
        """0 pass, 1 warn, 2 fail, 3 no verdict."""
        return {"PASS": 0, "WARN": 1, "FAIL": 2}.get(self.name, 3)


PASS, SKIP, WARN, ERROR, FAIL = ProbeVerdict
_CLOSENESS = {PASS: 1.0, WARN: 0.5, FAIL: 0.0}


class Check(NamedTuple):
    """One check and its verdict."""

    name: str
    verdict: ProbeVerdict
    message: str
    """A sentence with the value and the bound."""
    value: Any = None
    bound: Any = None
    """Bound of `value`, or None for no bound."""
    decides: bool = True
    """Whether the check counts for the overall verdict; optional checks without a value do not."""


class ProbeResult(NamedTuple):
    """Result of one probe for one subject."""

    probe: str
    subject: str
    checks: tuple[Check, ...]
    facts: Mapping[str, Any] = {}
    notes: tuple[str, ...] = ()
    """Remarks on how the subject was read and measured."""

    @property
    def verdict(self) -> ProbeVerdict:
        """The most severe verdict of the checks that count."""
        return worst(check.verdict for check in self.checks if check.decides)


class NothingToProbe(ProbeError):
    """The subject can be read but has nothing to judge."""


def worst(verdicts: Iterable[ProbeVerdict]) -> ProbeVerdict:
    """Returns the most severe verdict, or SKIP without verdicts."""
    return max(verdicts, key=list(ProbeVerdict).index, default=SKIP)


def judged(
    probe: str, subject: str, judge: Callable[..., ProbeResult], *arguments: Any
) -> ProbeResult:
    """Calls a probe. Damaged files can raise any exception, and each exception becomes a result."""
    verdict = ERROR
    try:
        return judge(*arguments)
    except (HealcoreError, OSError) as error:
        verdict = {NothingToProbe: SKIP, Damaged: FAIL}.get(type(error), ERROR)
        message = str(error)
    except MemoryError:
        message = "it needs more memory than its limit"
    except Exception as error:
        message = f"{type(error).__name__}: {first_line(error)}"
    where = "" if subject in message else f"{subject} could not be judged: "
    return ProbeResult(probe, subject, (Check("readable", verdict, where + message),))


def score(
    checks: Sequence[Check], fatal: Sequence[str], weights: Mapping[str, float] = {}
) -> float | None:
    """Returns the score of a subject from 0 to 1, or None if a check that counts has no verdict.

    The score is the weighted mean over the checks that count: 1 for PASS, 0.5 for WARN, 0 for FAIL.
    It is 0 if a check of `fatal` fails.
    """
    counted = [check for check in checks if check.decides]
    if any(check.name in fatal and check.verdict is FAIL for check in counted):
        return 0.0
    each = [weights.get(check.name, 1.0) for check in counted]
    if any(check.verdict not in _CLOSENESS for check in counted) or not sum(each) > 0:
        return None
    closeness = [
        _CLOSENESS[check.verdict] * weight for check, weight in zip(counted, each, strict=True)
    ]
    return sum(closeness) / sum(each)


def first_three(items: Sequence[str], separator: str = ", ") -> str:
    """Joins the first three items, and adds the number of the others."""
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return separator.join(items[:3]) + more


def dumps(results: Sequence[ProbeResult], inputs: BaseModel) -> str:
    """Returns the document that `--json` prints: strict JSON, without NaN and Infinity."""
    verdict = worst(result.verdict for result in results)
    document = {
        "schema": _SCHEMA,
        "verdict": verdict,
        "exit_code": verdict.exit_code,
        "inputs": inputs.model_dump(),
        "results": [{**result._asdict(), "verdict": result.verdict} for result in results],
    }
    text = json.dumps(to_json(document), indent=2, allow_nan=False, ensure_ascii=False)
    # A lone surrogate in a file name cannot be encoded; JSON writes it as \udc80.
    return text.encode("utf-8", "backslashreplace").decode()
