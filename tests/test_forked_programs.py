"""A forked program is to its caller what a new interpreter would be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.forked_programs import ForkedProgram

CODE = """
import atexit, os, sys
atexit.register(print, "at exit")
print(sys.argv[1:], os.getcwd(), os.environ.get("ONE"), os.getsid(0) == os.getpid(), input())
print("on stderr", file=sys.stderr)
{}
"""


@pytest.mark.parametrize(
    ("last", "status"),
    [
        ("raise SystemExit('said')", 1),
        ("1 / 0", 1),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("raise KeyboardInterrupt", -signal.SIGINT),
    ],
)
def test_streams_arguments_and_the_end_are_those_of_an_interpreter(last, status, tmp_path):
    command = ["-c", CODE.format(last), "a", "b c"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    options = {"cwd": tmp_path, "env": {**os.environ, "ONE": "1"}, "start_new_session": True}
    ended = []
    for start in (
        lambda: subprocess.Popen([sys.executable, *command], text=True, **options, **pipes),
        lambda: ForkedProgram(*command, imports=("json",), **options, **pipes),
    ):
        with start() as program:
            ended.append((*program.communicate("typed\n", timeout=600), program.returncode))
    new, forked = [(status, out, err) for out, err, status in ended]
    assert forked[:2] == new[:2]
    assert forked[0] == status
    assert forked[2].splitlines()[-1:] == new[2].splitlines()[-1:]
