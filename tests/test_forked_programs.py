"""A forked program is to its caller what a new interpreter would be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests import forked_programs
from tests.forked_programs import ROOT, ForkedProgram

CODE = """
import atexit, os, sys
atexit.register(print, "at exit")
print(sys.argv[1:], os.getcwd(), os.environ.get("ONE"), os.getsid(0) == os.getpid(), input())
print("on stderr", file=sys.stderr)
{}
"""


def both(code: str, *arguments: str, **options: object) -> list[tuple[int, str, str]]:
    """Status, output and errors with a new interpreter and forked."""
    given = {"env": {**os.environ, "ONE": "1"}, "start_new_session": True, **options}
    command = ["-c", code, *arguments]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    ended = []
    for start in (
        lambda: subprocess.Popen([sys.executable, *command], text=True, **given, **pipes),
        lambda: ForkedProgram(*command, imports=("json",), **given, **pipes),
    ):
        with start() as program:
            out, err = program.communicate("typed\n", timeout=600)
            ended.append((program.returncode, out, err))
    return ended


@pytest.mark.parametrize(
    ("last", "status"),
    [
        ("", 0),
        ("sys.exit(7)", 7),
        ("raise SystemExit('said')", 1),
        ("1 / 0", 1),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("raise KeyboardInterrupt", -signal.SIGINT),
    ],
)
def test_streams_arguments_and_the_end_are_those_of_an_interpreter(last, status, tmp_path):
    new, forked = both(CODE.format(last), "a", "b c", cwd=tmp_path)
    assert forked[:2] == new[:2]
    assert forked[0] == status
    assert forked[2].splitlines()[-1:] == new[2].splitlines()[-1:]


def test_a_program_can_be_signalled_and_waited_for():
    pipe = subprocess.PIPE
    code = "import time; print('begun', flush=True); time.sleep(600)"
    with ForkedProgram("-c", code, imports=("json",), stdout=pipe) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "begun\n"
        assert program.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(0.1)
        program.terminate()
        assert program.wait(600) == -signal.SIGTERM
        assert program.poll() == -signal.SIGTERM


def test_a_module_is_main():
    done = forked_programs.run("-m", "json.tool", "--help", imports=("json",), cwd=ROOT)
    assert done.returncode == 0
    assert "usage:" in done.stdout
