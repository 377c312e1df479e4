"""Checks the events of a run that was killed again and again."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from healcore.events import read
from healcore.runtime.postmortem import postmortem

NAME = "healcore.events.jsonl"


def forked(target: Callable[[], None], errors: Path | None = None) -> int:
    """Calls `target` in a forked child; returns its process id. The child ends as Python does.

    Standard error goes to the file `errors`. SIGUSR1 shows there where the child is.
    """
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        if errors is not None:
            os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
        faulthandler.register(signal.SIGUSR1)
        target()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        print(ended, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def steps_of(root: Path) -> dict[tuple[int, int, int], list[Any]]:
    """(rank, rollbacks so far, steps done) -> the next batch and digests of weights and engines.

    Steps that a later process has repeated must have come out the same.
    """
    found: dict[tuple[int, int, int], list[Any]] = {}
    for path in sorted(root.glob("trace-*")):
        for line in path.read_text().splitlines():
            rollbacks, step, *state = json.loads(line)
            place = int(path.name[6:]), rollbacks, step
            earlier = found.setdefault(place, state)
            assert earlier == state, f"{root}: {place}: {earlier}, {state}"
    return found


def same_as(root: Path, clean: dict[tuple[int, int, int], list[Any]]) -> None:
    """Every step came out as in the run that was not killed."""
    for at, state in steps_of(root).items():
        assert clean.get(at) == state, f"{root}: {at} {state} {clean.get(at)}"


def logged_changes(root: Path) -> set[tuple[Any, ...]]:
    """Each rollback (number, onset, checkpoint) and change of the rate's multiplier, as logged."""
    found: set[tuple[Any, ...]] = set()
    numbers: list[int] = []
    for event in read(root / "store" / NAME).events:
        if event["kind"] == "rollback":
            numbers.append(event["number"])
            found.add((event["number"], event["onset"], event["checkpoint"]))
        if event["kind"] == "lr":
            found.add(("lr", event["step"], event["lr_scale_before"], event["lr_scale"]))
    assert len({*numbers}) == len(numbers), f"{root}: a rollback is logged twice: {numbers}"
    return found


def goes_on(root: Path, before: bytes) -> bytes:
    """The events file now; checks that its earlier content is unchanged."""
    path = root / "store" / NAME
    now = path.read_bytes() if path.exists() else b""
    assert now.startswith(before), f"{root}: earlier events have changed"
    if now:
        history = read(path)
        assert history.problems == [], history.problems
        for events in history.runs().values():
            numbers = [event["seq"] for event in events]
            assert numbers == list(range(len(numbers))), f"{root}: {numbers}"
    return now


def whole(root: Path, clean: Path) -> None:
    """At the end: only rollbacks of the run that was not killed, and each death has its cause.

    A kill between the commit of a rollback and its event loses the event.
    """
    logged, expected = logged_changes(root), logged_changes(clean)
    assert logged <= expected, f"{root}: {logged}, not {expected}"
    path = root / "store" / NAME
    for name, events in read(path).runs().items():
        if events[0]["kind"] != "start":
            continue
        ends = [event["ending"] for event in events if event["kind"] == "end"]
        found = postmortem.read(postmortem.path_for(path, name))
        assert found["ending"] in (ends or ["killed"]), f"{root}: run {name}"
