"""Probes checkpoints in a child process, within limits that the operating system enforces.

The libraries that read a checkpoint allocate as much memory as the file asks for, and a damaged
file can crash them. The child gets memory and time in proportion to the stored bytes. One child
reads the paths of a command; if it ends, the path that it read gets the verdict ERROR, and a new
child reads the other paths.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from healcore.tools.probe.checks import ERROR, Check, ProbeResult, judged

_BASE_MEMORY, _MEMORY_PER_BYTE = 4 << 30, 4
"""Memory limit in bytes, plus bytes for each stored byte, which may be compressed."""
_BASE_SECONDS, _BYTES_PER_SECOND = 15, 4 << 20
"""Limit of processor time, including the import of torch, plus time to read the stored bytes."""
_START = "from healcore.tools.probe.child import serve; serve()"


def probe_paths(
    probe: str,
    judge: Callable[[Path, Any], ProbeResult],
    paths: Sequence[str | Path],
    inputs: Any,
) -> list[ProbeResult]:
    """Calls `judge`, a function of a module, with each path and inputs in the child process."""
    paths, results = [Path(path) for path in paths], []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    while len(results) < len(paths):
        child = subprocess.run(
            [sys.executable, "-P", "-c", _START],  # -P: no imports from the current directory
            input=pickle.dumps((probe, judge, paths[len(results) :], inputs)),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            check=False,
        )
        answers = io.BytesIO(child.stdout)
        with contextlib.suppress(EOFError, pickle.UnpicklingError):
            while len(results) < len(paths):
                results.append(pickle.load(answers))
        if len(results) < len(paths):
            path, status = str(paths[len(results)]), child.returncode
            why = (signal.strsignal(-status) if status < 0 else None) or f"status {status}"
            message = f"{path}: the reader process ended while reading it ({why})"
            results.append(ProbeResult(probe, path, (Check("readable", ERROR, message),)))
    return results


def serve() -> None:
    """In the child: answers the request on standard input, with one result after the other."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print
    probe, judge, paths, inputs = pickle.load(sys.stdin.buffer)
    for path in paths:
        _set_limits(path)
        pickle.dump(judged(probe, str(path), judge, path, inputs), answers)
        answers.flush()


def _set_limits(path: Path) -> None:
    """In the child: sets the limits for a file or a directory, by its size."""
    if sys.platform == "win32":
        return
    import resource

    files = [path] if path.is_file() else [
        Path(at, name) for at, _, names in os.walk(path) for name in names
    ]  # fmt: skip
    stored = sum(file.lstat().st_size for file in files)
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + _BASE_SECONDS + stored // _BYTES_PER_SECOND
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_DATA, _BASE_MEMORY + _MEMORY_PER_BYTE * stored),
        (resource.RLIMIT_CPU, seconds),
    ):
        _, hard = resource.getrlimit(kind)
        with contextlib.suppress(ValueError, OSError):  # macOS rejects some limits
            resource.setrlimit(kind, (value if hard < 0 else min(value, hard), hard))
