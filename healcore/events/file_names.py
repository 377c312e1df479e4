"""Names of the files of a run, which are next to its events file."""

from __future__ import annotations

import os
import re
from pathlib import Path


def stem(path: Path) -> str:
    """The common part of the names of a run's files: `run` for `run.events.jsonl`."""
    return re.sub(r"(\.events|\.metrics)?\.jsonl?$", "", path.name)


def metrics_path(events: Path) -> Path:
    """The path of the metrics file that belongs to an events file."""
    return events.with_name(f"{stem(events)}.metrics.jsonl")


def process_path(events: str | os.PathLike[str], process: str, kind: str, suffix: str = "") -> Path:
    """The path of a file that one process of a run writes.

    Args:
        events: the events file, `run.events.jsonl`.
        process: id of the process, which another program may have chosen. Characters that do not
            belong into a file name are replaced.
        kind: what the file contains, such as "postmortem".
        suffix: end of the name, such as ".json".

    Returns:
        `run.<kind>.<process id><suffix>` in the same directory.
    """
    path = Path(events)
    safe_process = re.sub(r"[^\w.-]", "_", process)
    return path.with_name(f"{stem(path)}.{kind}.{safe_process}{suffix}")
