"""Results as strict JSON: no NaN, no Infinity, the same keys every time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from pydantic import BaseModel

from healcore.tools.probe.verdict import Check, Result, Verdict, worst

SCHEMA = 1


@runtime_checkable
class _Named(Protocol):
    """A named tuple."""

    def _asdict(self) -> dict[str, Any]: ...


def document(results: Sequence[Result], inputs: BaseModel) -> dict[str, Any]:
    """What `--json` prints.

    Args:
        results: one per subject.
        inputs: the thresholds that they were judged by.
    """
    verdict = worst(result.verdict for result in results)
    return {
        "schema": SCHEMA,
        "verdict": verdict.value,
        "exit_code": verdict.exit_code,
        "inputs": plain(inputs.model_dump()),
        "results": [
            {
                "probe": result.probe,
                "subject": result.subject,
                "verdict": result.verdict.value,
                "checks": [_check(check) for check in result.checks],
                "facts": plain(result.facts),
                "notes": list(result.notes),
            }
            for result in results
        ],
    }


def dumps(results: Sequence[Result], inputs: BaseModel) -> str:
    """The document as text."""
    text = json.dumps(document(results, inputs), indent=2, allow_nan=False, ensure_ascii=False)
    # Halves of surrogate pairs in a name cannot be written; \udc80 is JSON for one.
    return text.encode("utf-8", "backslashreplace").decode()


def plain(value: Any) -> Any:
    """A JSON-safe value: arrays as lists, numbers that are not finite as "nan", "inf", "-inf"."""
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, Verdict):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple) and isinstance(value, _Named):
        return plain(value._asdict())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


def _check(check: Check) -> dict[str, Any]:
    return {
        "name": check.name,
        "verdict": check.verdict.value,
        "decides": check.decides,
        "message": check.message,
        "value": plain(check.value),
        "bound": plain(check.bound),
    }
