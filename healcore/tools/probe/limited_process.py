"""Probes checkpoints in a child process, within limits that the operating system sets.

The libraries that read a checkpoint allocate what the file asks for, and damage can end them. In a
child process that costs only the verdict of one path. The child gets memory and time in proportion
to the stored bytes, and may write small files only. It reads one path after the other, and is
replaced if it ends. Results come back as JSON.

A command has one thread and forks the child, which takes milliseconds. A program with more threads
could hang after a fork, so it starts a new Python.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

import healcore
from healcore.extras import MissingExtraError
from healcore.plugins.checkpoint_contents import Damaged, ProbeError, first_line
from healcore.tools.probe import inputs as inputs_of
from healcore.tools.probe.result import Check, NothingToProbe, ProbeResult, ProbeVerdict

try:
    import resource as _resource
except ImportError:  # Windows
    _resource = None
resource: Any = _resource

NO_LIMITS = "read without limits on memory and time: this system has none"
NO_MEMORY_LIMIT = "read without a limit on memory: this system enforces none"
_MEMORY, _MEMORY_A_BYTE = 4 << 30, 4
"""Bytes for any checkpoint, and for each stored byte, which may be compressed."""
_SECONDS, _BYTES_A_SECOND = 15, 4 << 20
"""Processor time for any checkpoint, including the import of torch, and for stored bytes."""
_WAIT = 10
"""Limit of the wall time, as a multiple of the processor time."""
_IDLE_SECONDS = 60
_LARGEST_OUTPUT = 1 << 20
"""Bytes of a file that the child writes: torch tests the temporary directory."""
_ERRORS = {each.__name__: each for each in (ProbeError, Damaged, NothingToProbe, MissingExtraError)}
_START = "import sys; from healcore.tools.probe import limited_process as its; its.serve(sys.argv)"


class Limits(NamedTuple):
    """Limits for one path."""

    memory: int
    """Bytes."""
    seconds: int
    """Seconds of processor time."""

    @classmethod
    def of(cls, path: Path) -> Limits:
        """The limits for a file or a directory, by its size."""
        files = [path] if path.is_file() else [
            Path(at, name) for at, _, names in os.walk(path) for name in names
        ]  # fmt: skip
        stored = 0
        for file in files:
            with contextlib.suppress(OSError):  # a run deletes checkpoints meanwhile
                stored += file.lstat().st_size
        return cls(_MEMORY + _MEMORY_A_BYTE * stored, _SECONDS + stored // _BYTES_A_SECOND)


def run_probe(probe: str, path: str | Path, inputs: BaseModel) -> ProbeResult:
    """Runs a probe, named as its module ("checkpoint" or "optimizer"), for one path.

    Raises ProbeError if the path cannot be read within its limits, and the errors of the probe.
    """
    path = Path(path)
    if resource is None:
        result = _judge(probe, path, inputs)
        return result._replace(notes=(*result.notes, NO_LIMITS))
    given = [probe, os.fspath(path), type(inputs).__name__, inputs.model_dump(mode="json")]
    with _lock:
        if _running and _running[-1].owner != os.getpid():
            _running.clear()  # a child of the parent of this forked process
        if not _running:
            _running.append(_Process())
        answer = _running[-1].ask(given, Limits.of(path))
        if answer is None:  # the child ended after being idle
            close()
            _running.append(_Process())
            answer = _running[-1].ask(given, Limits.of(path))
        if answer is None or "ended" in answer:
            _running.clear()
    answer = answer or {"ended": "it was killed"}
    if "ended" in answer:
        raise ProbeError(f"{path}: reading it ended the reader process ({answer['ended']})")
    if "error" in answer:
        raise _ERRORS[answer["error"]](answer["message"])
    found = answer["result"]
    found["checks"] = tuple(
        Check(name, ProbeVerdict(verdict), *rest) for name, verdict, *rest in found["checks"]
    )
    notes = (*found["notes"], *([NO_MEMORY_LIMIT] if sys.platform == "darwin" else []))
    return ProbeResult(**{**found, "notes": notes})


def close() -> None:
    """Ends the child process, if there is one."""
    while _running:
        _running.pop().end()


class _Process:
    """The child process, as its parent sees it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._channel, theirs = socket.socketpair()
        self._pid: int
        self._status: Callable[[], int]
        with theirs:
            if _threads() == 1:
                self._pid = os.fork()
                if not self._pid:
                    self._channel.close()
                    _answer_all(theirs)
                self._status = lambda: os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            else:
                found = (str(Path(healcore.__file__).parents[1]), *filter(None, sys.path))
                started = subprocess.Popen(
                    # -P: no import from the current directory.
                    [sys.executable, "-P", "-c", _START, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(found)},
                )
                self._pid, self._status = started.pid, started.wait
        self._answers = self._channel.makefile("rb")

    def ask(self, given: list[Any], limits: Limits) -> dict[str, Any] | None:
        """The answer, or why the child ended, or None if it had already ended."""
        wait = _WAIT * limits.seconds
        self._channel.settimeout(wait)
        try:
            self._channel.sendall(json.dumps([*given, limits]).encode() + b"\n")
            line = self._answers.readline()
        except TimeoutError:
            os.kill(self._pid, signal.SIGKILL)
            self.end()
            return {"ended": f"it took more than {wait} s"}
        except OSError:
            line = b""
        if line.endswith(b"\n"):
            return json.loads(line)
        status = self.end()
        if not status:
            return None
        if status == -signal.SIGXCPU:
            why = f"it takes more than {limits.seconds} s of processor time for what is stored"
        else:
            why = (signal.strsignal(-status) if status < 0 else None) or f"status {status}"
        return {"ended": why}

    def end(self) -> int:
        """Ends the child. Returns its exit status, or minus the number of a signal."""
        self._answers.close()
        self._channel.close()
        return self._status()


_running: list[_Process] = []
_lock = threading.Lock()


def _threads() -> int:
    """Number of threads of this process, or 0 if unknown."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


# -- in the child process --------------------------------------------------------------------------


def serve(arguments: list[str]) -> None:
    """Answers requests from the socket whose number is the last argument."""
    _answer_all(socket.socket(fileno=int(arguments[-1])))


def _answer_all(channel: socket.socket) -> None:
    """Answers requests until the channel is closed or idle, and exits."""
    try:
        faulthandler.disable()  # pytest's handler writes to a standard error of its own
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nothing, standard)
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_FSIZE, _LARGEST_OUTPUT)
        channel.settimeout(_IDLE_SECONDS)
        with channel.makefile("rb") as requests:
            for line in requests:
                channel.sendall(json.dumps(_answer(*json.loads(line)), default=_plain).encode())
                channel.sendall(b"\n")
    except OSError:
        pass  # the parent is gone
    finally:
        os._exit(0)


def _limit(kind: int, value: int) -> None:
    _, most = resource.getrlimit(kind)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses some
        resource.setrlimit(kind, (value if most < 0 else min(value, most), most))


def _answer(probe: str, at: str, kind: str, inputs: dict, limits: list[int]) -> dict[str, Any]:
    memory, seconds = limits
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_DATA, memory)
    _limit(resource.RLIMIT_CPU, seconds + int(used.ru_utime + used.ru_stime))
    try:
        result = _judge(probe, Path(at), getattr(inputs_of, kind)(**inputs))
        return {"result": result._asdict()}
    except tuple(_ERRORS.values()) as error:
        return {"error": type(error).__name__, "message": str(error)}
    except OSError as error:
        message = f"{at} cannot be read: {error.strerror or error}"
    except MemoryError:
        message = f"{at} asks for more memory than its limit of {memory} bytes"
    except Exception as error:  # the libraries may raise anything for damaged bytes
        message = f"{at} could not be judged: {type(error).__name__}: {first_line(error)}"
    return {"error": "ProbeError", "message": message}


def _judge(probe: str, path: Path, inputs: Any) -> ProbeResult:
    """Runs the function `judge` of a probe's module. A new Python has not imported that module."""
    if probe == "checkpoint":
        module = importlib.import_module("healcore.tools.probe.checkpoint")
    else:
        module = importlib.import_module("healcore.tools.probe.optimizer")
    return module.judge(path, inputs)


def _plain(value: Any) -> Any:
    """Converts a number or array of NumPy, an enum or a path for JSON."""
    if isinstance(value, ProbeVerdict):
        return value.value
    return value.tolist() if hasattr(value, "tolist") else str(value)
