"""Disk faults: small and read-only disks, where the system allows it, and flipped bits."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from healcore.runtime.store.manifest import step_of


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


def before_completion(monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], object]) -> None:
    """Calls `act` with a checkpoint's final path, before the rename that completes the checkpoint.

    `act` may wait, as a slow disk does, or raise the OSError of a full disk.
    """
    rename = os.rename

    def watched(source: Path, target: Path) -> None:
        if step_of(Path(target)) is not None:
            act(Path(target))
        rename(source, target)

    monkeypatch.setattr(os, "rename", watched)


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))
