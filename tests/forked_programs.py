"""Programs in processes of their own, without the seconds that every import of a framework takes.

A server imports the frameworks, and each program is a fork of it that ends as an interpreter does:
with its exit handlers, its uncaught exception and its exit status. Not for tests of imports, nor of
what a library reads from the environment when it is imported.
"""

import atexit
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import socket
import struct
import subprocess
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TORCH_AND_JAX = (
    "torch", "healcore.torch", "healcore.torch.driver", "healcore.torch.store",
    "jax", "optax", "healcore.jax", "healcore.jax.driver", "healcore.jax.store",
)  # fmt: skip
TRANSFORMERS = ("torch", "healcore.torch.trainers.huggingface", "transformers.trainer", "trl")


_Popen: Any = subprocess.Popen  # its private methods are in no stub


class ForkedProgram(subprocess.Popen[str]):
    """`subprocess.Popen` of `python COMMAND`, forked by a server.

    Args:
        *command: `-m MODULE ARGS`, `-c CODE ARGS` or `FILE ARGS`.
        imports: what the server has imported.
        **options: `cwd`, `env`, `start_new_session` and streams of `Popen`.
    """

    def __init__(
        self, *command: object, imports: tuple[str, ...] = TORCH_AND_JAX, **options: Any
    ) -> None:
        self._server = _server(imports)
        super().__init__(list(map(str, command)), text=True, **{"cwd": ROOT, **options})

    # The methods of Popen that start a process and wait for it; the others call these.

    def _execute_child(self, *args: Any) -> None:
        given = inspect.signature(_Popen._execute_child).bind(self, *args).arguments
        env = given["env"]
        request = {
            "command": given["args"],
            "cwd": os.fspath(given["cwd"]),
            "env": dict(os.environ if env is None else env),
            "session": given["start_new_session"],
        }
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [own if own >= 0 else default for default, own in enumerate(streams)]
        self._status, status = os.pipe()
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(request).encode())
            file.flush()
            socket.send_fds(self._server, [b"!"], [*streams, status, file.fileno()])
        os.close(status)
        self._child_created = True
        (self.pid,) = struct.unpack("i", os.read(self._status, 4))
        _Popen._close_pipe_fds(self, *(given[name] for name in pipes))

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags == os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        (status,) = struct.unpack("i", os.read(self._status, 4))
        os.close(self._status)
        return self.pid, status

    def _internal_poll(self, *args: Any, **options: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid == self.pid:
                _Popen._handle_exitstatus(self, status)
        return self.returncode


def run(*command: object, timeout: float = 600, **options: Any) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` with captured output returns, of a `ForkedProgram`."""
    pipe = subprocess.PIPE
    with ForkedProgram(*command, stdout=pipe, stderr=pipe, **options) as program:
        try:
            out, err = program.communicate(timeout=timeout)
        except BaseException:
            program.kill()
            raise
    return subprocess.CompletedProcess(program.args, program.returncode, out, err)


@cache
def _server(imports: tuple[str, ...]) -> socket.socket:
    """The connection to a server, which ends with this process."""
    ours, theirs = socket.socketpair()
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    server = subprocess.Popen(
        [sys.executable, "-m", __name__, str(theirs.fileno()), *imports],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()

    def close() -> None:
        ours.close()
        server.wait(60)

    atexit.register(close)
    return ours


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Forks until the tests end. Returns in the programs, with what they are to be."""
    supervisors: list[int] = []
    while True:
        byte, descriptors, _, _ = socket.recv_fds(connection, 1, 5)
        how = os.WNOHANG if byte else 0  # waiting adds their times to those of this process
        supervisors = [pid for pid in supervisors if os.waitpid(pid, how)[0] != pid]
        if not byte:
            return None
        supervisors.append(_fork())
        if not supervisors[-1]:
            connection.close()
            return _supervise(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _supervise(stdin: int, stdout: int, stderr: int, status: int, request: int) -> dict[str, Any]:
    """Reports the process id of a program and how it ended. Returns in the program."""
    if child := _fork():
        for descriptor in (stdin, stdout, stderr, request):
            os.close(descriptor)
        os.write(status, struct.pack("i", child))
        os.write(status, struct.pack("i", os.waitpid(child, 0)[1]))
        os._exit(0)
    os.close(status)
    os.lseek(request, 0, os.SEEK_SET)
    with os.fdopen(request) as file:
        program = json.load(file)
    for to, descriptor in enumerate((stdin, stdout, stderr)):
        os.dup2(descriptor, to)
        os.close(descriptor)
    return program


def _fork() -> int:
    with warnings.catch_warnings():  # JAX warns; none of its threads has been started
        warnings.simplefilter("ignore")
        return os.fork()


def _become(program: dict[str, Any]) -> None:
    """What `python COMMAND` does."""
    if program["session"]:
        os.setsid()
    os.chdir(program["cwd"])
    os.environ.clear()
    os.environ.update(program["env"])
    how, *rest = program["command"]
    sys.path[0] = program["cwd"]
    if how == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [how, *rest]
        sys.path[0] = str(Path(how).parent)
        runpy.run_path(how, run_name="__main__")


if __name__ == "__main__":
    gc.disable()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    program = _serve(socket.socket(fileno=int(sys.argv[1])))
    if program is not None:
        _become(program)
