"""Probes checkpoints in a process of its own, within limits that the operating system sets.

The libraries that read a checkpoint allocate what the file asks for, and damage can end them. Here
that costs one path its verdict. The process gets memory and time in proportion to the stored
bytes, and may write small files only. It reads one path after the other, and a new process follows
one that ended. Results come back as JSON.

A command has one thread, and its process is forked, which takes milliseconds. A program with more
threads could hang after a fork, so Python is started anew there.
"""

from __future__ import annotations

import contextlib
import faulthandler
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
"""Bytes for any checkpoint, and for each of its stored bytes: zeros of a chunk pack to nothing."""
_SECONDS, _BYTES_A_SECOND = 15, 4 << 20
"""Processor time for any checkpoint, with the import of torch, and for its stored bytes."""
_WAIT = 10
"""Limit of the time that passes, as a multiple of the processor time."""
_IDLE_SECONDS = 60
_LARGEST_OUTPUT = 1 << 20
"""Bytes of a file that it writes: torch tries out the temporary directory."""
_ERRORS = {each.__name__: each for each in (ProbeError, Damaged, NothingToProbe, MissingExtraError)}
_START = "import sys; from healcore.tools.probe import limited_process as its; its.serve(sys.argv)"


class Limits(NamedTuple):
    """What reading one path may take."""

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
    """The result of a probe ("checkpoint" or "optimizer") of one path.

    Raises ProbeError if the path cannot be read within its limits, and what the probe raises.
    """
    path = Path(path)
    if resource is None:
        result = _judge(probe, path, inputs)
        return result._replace(notes=(*result.notes, NO_LIMITS))
    given = [probe, os.fspath(path), type(inputs).__name__, inputs.model_dump(mode="json")]
    with _lock:
        if _running and _running[-1].owner != os.getpid():
            _running.clear()  # this process is a fork of the one that has it
        if not _running:
            _running.append(_Process())
        answer = _running[-1].ask(given, Limits.of(path))
        if answer is None:  # it had been idle for long
            close()
            _running.append(_Process())
            answer = _running[-1].ask(given, Limits.of(path))
        if answer is None or "ended" in answer:
            _running.clear()
    answer = answer or {"ended": "it was killed"}
    if "ended" in answer:
        raise ProbeError(f"{path}: reading it ended the process that reads it ({answer['ended']})")
    if "error" in answer:
        raise _ERRORS[answer["error"]](answer["message"])
    found = answer["result"]
    found["checks"] = tuple(
        Check(name, ProbeVerdict(verdict), *rest) for name, verdict, *rest in found["checks"]
    )
    notes = (*found["notes"], *([NO_MEMORY_LIMIT] if sys.platform == "darwin" else []))
    return ProbeResult(**{**found, "notes": notes})


def close() -> None:
    """Ends the process, if one waits for the next path."""
    while _running:
        _running.pop().end()


class _Process:
    """The process, seen from the one that asks."""

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
                    # -P: nothing is imported from the current directory.
                    [sys.executable, "-P", "-c", _START, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(found)},
                )
                self._pid, self._status = started.pid, started.wait
        self._answers = self._channel.makefile("rb")

    def ask(self, given: list[Any], limits: Limits) -> dict[str, Any] | None:
        """The answer, why the process ended, or None if it had ended before."""
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
        """Ends it; returns its exit status, or the negative number of the signal."""
        self._answers.close()
        self._channel.close()
        return self._status()


_running: list[_Process] = []
_lock = threading.Lock()


def _threads() -> int:
    """Threads of this process, 0 if that is not known."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


# -- in the process itself -------------------------------------------------------------------------


def serve(arguments: list[str]) -> None:
    """Answers requests from the socket whose number is the last argument."""
    _answer_all(socket.socket(fileno=int(arguments[-1])))


def _answer_all(channel: socket.socket) -> None:
    """Answers requests until the channel is closed or nothing comes for long, and exits."""
    try:
        faulthandler.disable()  # pytest's has a standard error of its own
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
        pass  # nobody asks any more
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
        message = f"{at} asks for more memory than the {memory} bytes that what is stored may take"
    except Exception as error:  # damaged bytes make the libraries raise anything
        message = f"{at} could not be judged: {type(error).__name__}: {first_line(error)}"
    return {"error": "ProbeError", "message": message}


def _judge(probe: str, path: Path, inputs: Any) -> ProbeResult:
    """Runs a probe; they are imported here because they import this module."""
    if probe == "checkpoint":
        from healcore.tools.probe.checkpoint import judge_checkpoint

        return judge_checkpoint(path, inputs)
    from healcore.tools.probe.optimizer import judge_optimizer

    return judge_optimizer(path, inputs)


def _plain(value: Any) -> Any:
    """A value that JSON has no form for: a number or array of NumPy, an enum, a path."""
    if isinstance(value, ProbeVerdict):
        return value.value
    return value.tolist() if hasattr(value, "tolist") else str(value)
