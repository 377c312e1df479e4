"""Reads Orbax checkpoints array by array, one chunk in memory at a time.

It uses TensorStore directly: Orbax itself needs the devices of the run and reads whole trees.
TensorStore runs in a process of its own, see `orbax_process`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from healcore import regular_file
from healcore.extras import require
from healcore.plugins.checkpoint_contents import Array, Contents, PathBudget, ProbeError, shape_of

_ITEM = "state"
_SCRIPT = Path(__file__).with_name("orbax_process.py")
_SECONDS = 30
_BYTES_A_SECOND = 4 << 20
"""A process gets a second of processor time per so many stored bytes, on top of `_SECONDS`."""
_LEAST_MEMORY = 4 << 30
_MOST_STARTS = 3
"""How often the process of one item is started, because damaged arrays can end it."""


def open_orbax(folder: Path) -> Contents:
    """Opens an item of an Orbax checkpoint, or a checkpoint with all of its items.

    The size of a stored chunk does not bound its unpacked size (a chunk of zeros is tiny), so the
    process may use half of the machine's memory, and time in proportion to the stored bytes.
    Raises ProbeError if it is damaged, or of an older format without `_METADATA`.
    """
    items = (
        [folder]
        if (folder / "_METADATA").exists()
        else sorted(path.parent for path in folder.glob("*/_METADATA"))
    )
    if not items:
        raise ProbeError(f"{folder} has no _METADATA: it is no Orbax checkpoint of today's format")
    arrays, values = [], {}
    for item in items:
        prefix = () if item == folder else (item.name,)
        tree = _Tree(item)
        for keys, entry in tree.entries.items():
            path = (*prefix, *keys)
            if entry.get("skip_deserialize") or entry.get("value_type") in ("None", "string"):
                values[path] = None
                continue
            arrays.append(tree.array(path, ".".join(keys)))
    return Contents("Orbax checkpoint", arrays, values)


def stored_arrays(data: Path, names: Iterable[str]) -> dict[str, Array]:
    """Arrays in the directory `data` of an `OrbaxStore` checkpoint; missing names are left out."""
    tree = _Tree(data / _ITEM)
    wanted = {name: (_escaped(name),) for name in names}
    return {
        name: tree.array(keys, keys[0]) for name, keys in wanted.items() if keys in tree.entries
    }


class _Tree:
    def __init__(self, item: Path) -> None:
        at = item / "_METADATA"
        try:
            if not at.is_file():
                raise ValueError
            data = regular_file.read(at)
            content, budget = json.loads(data), PathBudget(len(data))
            self.entries: dict[tuple[str, ...], Mapping[str, Any]] = {
                budget.take(tuple(str(key["key"])[:1000] for key in entry["key_metadata"])): {
                    **entry["value_metadata"]
                }
                for entry in content["tree_metadata"].values()
            }
            ocdbt = bool(content.get("use_ocdbt", (item / "manifest.ocdbt").exists()))
            zarr3 = bool(content.get("use_zarr3", False))
        except OSError as error:
            raise ProbeError(f"{at} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ProbeError(f"{at} is damaged") from None
        self._item = item
        self._process = _Process(item, ocdbt=ocdbt, zarr3=zarr3)

    def array(self, path: tuple[str, ...], name: str) -> Array:
        """Opens one array, or raises ProbeError if it is damaged."""
        try:
            opened = self._process.open(name)
            dtype, shape = str(opened["dtype"]), shape_of(opened["shape"])
        except (ValueError, KeyError, TypeError) as error:
            raise ProbeError(f"{self._item}: {name[:200]} is damaged: {error}") from None
        return Array(path, dtype, shape, self._reader(name))

    def _reader(self, name: str) -> Callable[[], Iterator[np.ndarray]]:
        def read() -> Iterator[np.ndarray]:
            try:
                yield from self._process.read(name)
            except ValueError as error:
                raise ProbeError(f"{self._item}: {name[:200]} is damaged: {error}") from None

        return read


class _ArrayError(ValueError):
    """An array is damaged, but the process still runs."""


class _Process:
    """The process that reads the arrays of one item, restarted if an array ends it."""

    def __init__(self, item: Path, *, ocdbt: bool, zarr3: bool) -> None:
        require("jax", "tensorstore")
        stored = sum(
            os.lstat(os.path.join(at, name)).st_size
            for at, _, names in os.walk(item)
            for name in names
        )
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._options = {
            "item": str(item),
            "ocdbt": ocdbt,
            "zarr3": zarr3,
            "memory": max(_LEAST_MEMORY, memory // 2),
            "seconds": _SECONDS + stored // _BYTES_A_SECOND,
        }
        self._running: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def open(self, name: str) -> Mapping[str, Any]:
        """Dtype and shape of an array, or ValueError if it is damaged."""
        self._send(open=name)
        return self._answer()

    def read(self, name: str) -> Iterator[np.ndarray]:
        """The elements of an array in pieces, or ValueError if it is damaged; one at a time."""
        self._send(read=name)
        ended = False
        try:
            answer = self._answer()
            while "end" not in answer:
                piece = np.frombuffer(self._bytes(answer["bytes"]), np.dtype(answer["dtype"]))
                answer = self._answer()
                ended = "end" in answer
                yield piece
            ended = True
        except _ArrayError:
            ended = True
            raise
        finally:
            if not ended:
                self._stop()

    def _send(self, **what: str) -> None:
        if self._running is None:
            if self._starts == _MOST_STARTS:
                raise ValueError("it was not read, others of it ended the process that reads them")
            self._starts += 1
            # -P: nothing is imported from the folder of the script.
            self._running = subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT), json.dumps(self._options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            weakref.finalize(self, _end, self._running)
        assert self._running.stdin is not None
        try:
            self._running.stdin.write(json.dumps(what).encode() + b"\n")
            self._running.stdin.flush()
        except BrokenPipeError:
            self._ended()

    def _answer(self) -> Mapping[str, Any]:
        assert self._running is not None
        assert self._running.stdout is not None
        text = self._running.stdout.readline()
        if not text.endswith(b"\n"):
            self._ended()
        answer = json.loads(text)
        if "error" in answer:
            raise _ArrayError(answer["error"])
        return answer

    def _bytes(self, count: int) -> bytes:
        assert self._running is not None
        assert self._running.stdout is not None
        data = self._running.stdout.read(count)
        if len(data) != count:
            self._ended()
        return data

    def _ended(self) -> None:
        status = self._stop()
        why = "out of memory, or a file of it is missing" if status >= 0 else "killed"
        if status == -signal.SIGXCPU:
            why = "it takes too long for what is stored of it"
        elif status < 0:
            why = signal.strsignal(-status) or why
        raise ValueError(f"reading it ended the process that reads it ({why})")

    def _stop(self) -> int:
        running, self._running = self._running, None
        return 0 if running is None else _end(running)


def _end(running: subprocess.Popen[bytes]) -> int:
    for pipe in (running.stdin, running.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                continue
    try:
        return running.wait(1)
    except subprocess.TimeoutExpired:
        running.kill()
        return running.wait()


def _escaped(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.\-]", lambda found: f"%{ord(found[0]):02X}", name)
