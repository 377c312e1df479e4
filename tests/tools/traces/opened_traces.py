"""Opens one trace in a test and reads all of it."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from healcore.tools.traces import Trace, open_traces


def open_one(path: str | os.PathLike[str], **options: Any) -> Trace:
    (trace,), unreadable = open_traces([os.fspath(path)], **options)
    assert not unreadable
    return trace


def refusal(path: str | os.PathLike[str], **options: Any) -> str:
    """The message that says why a path gives no trace."""
    traces, unreadable = open_traces([os.fspath(path)], **options)
    assert not traces
    assert [failure.path for failure in unreadable] == [os.fspath(path)]
    return unreadable[0].problem


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def problems_of(trace: Trace) -> list[tuple[int | None, str]]:
    """The problems of a trace: line and text."""
    pattern = re.compile(r".*?/[^/:]*?(?:, line (\d+))?: (.*)", re.S)
    found = [pattern.fullmatch(problem) for problem in trace.problems]
    return [(int(match[1]) if match[1] else None, match[2]) for match in found if match]


def column(values: Any) -> list[float | str]:
    """The values in a form that compares NaN as equal."""
    return ["nan" if np.isnan(value) else float(value) for value in np.asarray(values)]
