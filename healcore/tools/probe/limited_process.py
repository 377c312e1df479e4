"""Probes checkpoints in a child process, within limits that the operating system enforces.

The libraries that read a checkpoint allocate as much memory as the file asks for, and a damaged
file can crash them. In a child process a crash costs only the verdict of one path. The child gets
memory and time in proportion to the stored bytes, and may write only small files. One child reads
many paths, and a new child replaces a child that ended. Results are sent as JSON.

A process with one thread forks the child, which takes milliseconds. A process with more threads
starts a new Python process, because a fork could deadlock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pkgutil
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

NO_LIMITS = "read without limits on memory and time: this system does not support them"
NO_MEMORY_LIMIT = "read without a limit on memory: this system does not enforce it"
_BASE_MEMORY, _MEMORY_PER_BYTE = 4 << 30, 4
"""Memory limit in bytes, plus bytes for each stored byte, which may be compressed."""
_BASE_SECONDS, _BYTES_PER_SECOND = 15, 4 << 20
"""Limit of processor time, including the import of torch, plus time to read the stored bytes."""
_WALL_TIME_FACTOR = 10
"""Limit of the wall time, as a multiple of the processor time."""
_IDLE_SECONDS = 60
_MAX_OUTPUT = 1 << 20
"""Largest file in bytes that the child may write: torch tests the temporary directory."""
_ERRORS = {kind.__name__: kind for kind in (ProbeError, Damaged, NothingToProbe, MissingExtraError)}
_START = "import sys; from healcore.tools.probe import limited_process as p; p.serve(sys.argv)"


class Limits(NamedTuple):
    """Limits for one path."""

    memory: int
    """Bytes."""
    seconds: int
    """Seconds of processor time."""

    @classmethod
    def of(cls, path: Path) -> Limits:
        """Returns the limits for a file or a directory, by its size."""
        files = [path] if path.is_file() else [
            Path(at, name) for at, _, names in os.walk(path) for name in names
        ]  # fmt: skip
        stored = 0
        for file in files:
            with contextlib.suppress(OSError):  # a run may delete checkpoints meanwhile
                stored += file.lstat().st_size
        return cls(
            _BASE_MEMORY + _MEMORY_PER_BYTE * stored,
            _BASE_SECONDS + stored // _BYTES_PER_SECOND,
        )


def run_probe(
    judge: Callable[[Path, Any], ProbeResult], path: str | Path, inputs: BaseModel
) -> ProbeResult:
    """Calls `judge`, a function of a module, with a path and inputs in the child process.

    Raises ProbeError if the path cannot be read within its limits, and the errors of `judge`.
    """
    path = Path(path)
    if resource is None:
        result = judge(path, inputs)
        return result._replace(notes=(*result.notes, NO_LIMITS))
    name = f"{judge.__module__}:{judge.__qualname__}"
    request = [name, os.fspath(path), type(inputs).__name__, inputs.model_dump(mode="json")]
    with _lock:
        if _running and _running[-1].owner != os.getpid():
            _running.clear()  # the child belongs to the parent of this forked process
        if not _running:
            _running.append(_Process())
        answer = _running[-1].ask(request, Limits.of(path))
        if answer is None:  # the idle child had already ended
            close()
            _running.append(_Process())
            answer = _running[-1].ask(request, Limits.of(path))
        if answer is None or "ended" in answer:
            _running.clear()
    answer = answer or {"ended": "killed"}
    if "ended" in answer:
        raise ProbeError(f"{path}: the reader process ended while reading it ({answer['ended']})")
    if "error" in answer:
        raise _ERRORS[answer["error"]](answer["message"])
    result = answer["result"]
    result["checks"] = tuple(
        Check(name, ProbeVerdict(verdict), *rest) for name, verdict, *rest in result["checks"]
    )
    notes = (*result["notes"], *([NO_MEMORY_LIMIT] if sys.platform == "darwin" else []))
    return ProbeResult(**{**result, "notes": notes})


def close() -> None:
    """Ends the child process, if there is one."""
    while _running:
        _running.pop().end()


class _Process:
    """A running child process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._channel, channel_of_child = socket.socketpair()
        self._pid: int
        self._status: Callable[[], int]
        with channel_of_child:
            if _threads() == 1:
                self._pid = os.fork()
                if not self._pid:
                    self._channel.close()
                    _answer_all(channel_of_child)
                self._status = lambda: os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            else:
                search_path = (str(Path(healcore.__file__).parents[1]), *filter(None, sys.path))
                process = subprocess.Popen(
                    # -P prevents imports from the current directory.
                    [sys.executable, "-P", "-c", _START, str(channel_of_child.fileno())],
                    pass_fds=[channel_of_child.fileno()],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(search_path)},
                )
                self._pid, self._status = process.pid, process.wait
        self._answers = self._channel.makefile("rb")

    def ask(self, request: list[Any], limits: Limits) -> dict[str, Any] | None:
        """Returns the answer, {"ended": reason} if the child ends, or None if it had ended."""
        wait = _WALL_TIME_FACTOR * limits.seconds
        self._channel.settimeout(wait)
        try:
            self._channel.sendall(json.dumps([*request, limits]).encode() + b"\n")
            line = self._answers.readline()
        except TimeoutError:
            os.kill(self._pid, signal.SIGKILL)
            self.end()
            return {"ended": f"no answer within {wait} s"}
        except OSError:
            line = b""
        if line.endswith(b"\n"):
            return json.loads(line)
        status = self.end()
        if not status:
            return None
        if status == -signal.SIGXCPU:
            reason = f"its limit for this size is {limits.seconds} s of processor time"
        else:
            reason = (signal.strsignal(-status) if status < 0 else None) or f"status {status}"
        return {"ended": reason}

    def end(self) -> int:
        """Ends the child. Returns its exit status, or the negative number of a signal."""
        self._answers.close()
        self._channel.close()
        return self._status()


_running: list[_Process] = []
_lock = threading.Lock()


def _threads() -> int:
    """Returns the number of threads of the current process, or 0 if unknown."""
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
        faulthandler.disable()  # the handler of pytest would write to its own standard error
        null = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(null, standard)
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_FSIZE, _MAX_OUTPUT)
        channel.settimeout(_IDLE_SECONDS)
        with channel.makefile("rb") as requests:
            for line in requests:
                channel.sendall(
                    json.dumps(_answer(*json.loads(line)), default=_json_default).encode()
                )
                channel.sendall(b"\n")
    except OSError:
        pass  # the parent has ended
    finally:
        os._exit(0)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    with contextlib.suppress(ValueError, OSError):  # macOS rejects some limits
        resource.setrlimit(kind, (value if hard < 0 else min(value, hard), hard))


def _answer(judge: str, at: str, kind: str, inputs: dict, limits: list[int]) -> dict[str, Any]:
    memory, seconds = limits
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_DATA, memory)
    _limit(resource.RLIMIT_CPU, seconds + int(used.ru_utime + used.ru_stime))
    try:
        result = pkgutil.resolve_name(judge)(Path(at), getattr(inputs_of, kind)(**inputs))
        return {"result": result._asdict()}
    except tuple(_ERRORS.values()) as error:
        return {"error": type(error).__name__, "message": str(error)}
    except OSError as error:
        message = f"{at} cannot be read: {error.strerror or error}"
    except MemoryError:
        message = f"{at} needs more memory than its limit of {memory} bytes"
    except Exception as error:  # the libraries may raise anything for damaged bytes
        message = f"{at} could not be judged: {type(error).__name__}: {first_line(error)}"
    return {"error": "ProbeError", "message": message}


def _json_default(value: Any) -> Any:
    """Converts a NumPy number or array, an enum or a path for JSON."""
    if isinstance(value, ProbeVerdict):
        return value.value
    return value.tolist() if hasattr(value, "tolist") else str(value)
