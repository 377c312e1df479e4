"""Reads each hostile file in a forked child of this process.

Imports what the readers need once, and forks for each request, so that a file costs its own time
and memory only. A request is a line of JSON, and so is the answer.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import resource
import signal
import sys

LIMIT_SECONDS = 100
LIMIT_BYTES = 12 << 30
"""Limits of a reader, so that a failing test does not use up the machine."""


def cli(*args: str) -> dict:
    """`healcore ARGS`: its exit status and what it prints."""
    from healcore.tools.cli import app

    status: object = 0
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app(args)
        except SystemExit as stopped:
            status = stopped.code
    return {"status": status or 0, "out": out.getvalue(), "err": err.getvalue()}


def call(name: str, *args: str) -> dict:
    """`module:function(ARGS)`: the type of what it returns, or of what it raises."""
    module, function = name.split(":")
    try:
        found = getattr(importlib.import_module(module), function)(*args)
    except Exception as error:
        return {"raised": type(error).__name__, "message": str(error)[:500]}
    return {"returned": type(found).__name__, "length": len(found) if found is not None else 0}


def _child(request: dict, answer: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    signal.alarm(LIMIT_SECONDS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        outcome: dict = {"cli": cli, "call": call}[request["how"]](*request["args"])
    except BaseException as error:
        outcome = {"crashed": f"{type(error).__name__}: {error}"[:500]}
    # Of this process and its children: a busy machine makes nothing slower.
    outcome["seconds"] = sum(os.times()[:4])
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    outcome["mib"], outcome["children_mib"] = own / 1024, children / 1024
    with os.fdopen(answer, "w") as pipe:
        json.dump(outcome, pipe)


def main() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    print("ready", flush=True)
    for line in sys.stdin:
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            try:
                _child(json.loads(line), writing)
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        _, status = os.waitpid(pid, 0)
        print(
            text or json.dumps({"crashed": f"the process ended with status {status}"}), flush=True
        )


if __name__ == "__main__":
    main()
