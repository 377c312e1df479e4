"""Names of the directories in a store and of work in progress, and whose they are."""

from __future__ import annotations

import functools
import os
import re
import secrets
import socket
from pathlib import Path
from typing import NamedTuple

import xxhash

_STEP = re.compile(r"step-(\d{10,})\.([0-9a-f]{8})")
_TEMPORARY = re.compile(r"\.tmp-healcore-(\d+)-([0-9a-f]{8})-([0-9a-f]{8})")

_mine: set[str] = set()
"""Temporary names that this process is at work in."""


class StepName(NamedTuple):
    """A checkpoint's directory: `step-0000000123.0a1b2c3d`."""

    step: int
    token: str
    """Random, so that every save has a directory of its own."""


def step_directory(step: int) -> str:
    """A new name for a checkpoint of `step`."""
    return f"step-{step:010d}.{secrets.token_hex(4)}"


def parse_step(name: str) -> StepName | None:
    """What `step_directory` put into a name; None for any other name."""
    found = _STEP.fullmatch(name)
    return StepName(int(found[1]), found[2]) if found else None


def new_temporary() -> str:
    """A new name for work in progress: `.tmp-healcore-<pid>-<place>-<random>`.

    It stands in the list of this process until `done_with`.
    """
    name = f".tmp-healcore-{os.getpid()}-{place()}-{secrets.token_hex(4)}"
    _mine.add(name)
    return name


def done_with(name: str) -> None:
    """Takes a temporary name off the list of this process."""
    _mine.discard(name)


def is_temporary(name: str) -> bool:
    """Whether a name has the shape of `new_temporary`."""
    return _TEMPORARY.fullmatch(name) is not None


def is_abandoned(name: str) -> bool:
    """Whether a temporary directory's process is gone, as far as that can be known from here.

    Directories of another machine or container are never called abandoned: its process cannot be
    seen from here. A process that has our own number and is not us was one before a restart, in a
    container where every run has the same number.
    """
    found = _TEMPORARY.fullmatch(name)
    if found is None or found[2] != place():
        return False
    number = int(found[1])
    if number == os.getpid():
        return name not in _mine
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return _is_zombie(number)


@functools.cache
def place() -> str:
    """Eight hex digits that stand for this machine or container."""
    try:
        machine = Path("/etc/machine-id").read_text().strip()
    except OSError:
        machine = ""
    return xxhash.xxh32_hexdigest(f"{socket.gethostname()}\n{machine}".encode())


def _is_zombie(number: int) -> bool:
    """A killed process whose parent has not asked for its status yet: it writes nothing more."""
    try:
        status = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[:1] == ["Z"]
