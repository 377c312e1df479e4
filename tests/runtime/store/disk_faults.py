"""Disk faults: small and read-only disks, where the system allows it, and flipped bits."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[Path]:
    """A file system of its own, in memory. Skips the test where mounting is not allowed."""
    path.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={megabytes}m", "healcore-test", str(path))
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False)


@contextmanager
def read_only(path: Path) -> Iterator[Path]:
    """Makes a directory read-only: by its mode, for root by a mount over itself."""
    if os.geteuid() != 0:
        modes = {each: each.stat().st_mode for each in (path, *path.rglob("*")) if each.is_dir()}
        for each in modes:
            each.chmod(0o555)
        try:
            yield path
        finally:
            for each, mode in modes.items():
                each.chmod(mode)
        return
    _mount("--bind", str(path), str(path))
    try:
        _mount("-o", "remount,ro,bind", str(path))
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False)


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))
