"""Opens checkpoints of all formats, in a child process within limits of the operating system.

Writes nothing, takes no lock. The libraries that read a checkpoint allocate as much memory as the
file asks for, and a damaged file can crash them. The child gets memory and processor time in
proportion to the stored bytes. One child reads the paths of a command. If it ends, the path that it
read gets the verdict ERROR, and a new child reads the other paths.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from healcore import adapter_registry, regular_file
from healcore.checkpoint_contents import Array, Contents, Damaged, ProbeError, leaves_of
from healcore.runtime.store import array_format, manifest, values
from healcore.tools.probe.checks import ERROR, Check, NothingToProbe, Report, run_probe

_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt", ".tar", ".safetensors"}
_MAX_JSON_BYTES = 1 << 24
"""A `trainer_state.json` is large, because it has an entry for each logged step."""
_BASE_MEMORY, _MEMORY_PER_BYTE = 4 << 30, 4
"""Memory limit in bytes, plus bytes for each stored byte, which may be compressed."""
_BASE_SECONDS, _BYTES_PER_SECOND = 15, 4 << 20
"""Limit of processor time, including the import of torch, plus time to read the stored bytes."""


def open_contents(path: Path, step: int | None = None) -> Contents:
    """Opens a file of torch or safetensors, a directory of a trainer, DCP or Orbax, or a store.

    The arrays are not read yet: each has a function that reads it.

    Args:
        path: a file or a directory.
        step: step of a checkpoint of a store, or None for the newest known-good checkpoint. Without
            a known-good checkpoint, None is the newest.

    Returns:
        The leaves by their path, the name of the format, and notes on what was opened.

    Raises:
        ProbeError: the checkpoint cannot be read.
        MissingExtraError: the framework that wrote the checkpoint is not installed.
        Exception: any exception for a damaged file, see `checks.run_probe`.
    """
    if path.is_file():
        contents = _open_file(path)
        if contents is None:
            raise ProbeError(f"{path} is neither a torch checkpoint nor a safetensors file")
        return contents
    if not path.exists():
        raise ProbeError(f"{path}: no such file or directory")
    if manifest.folders_of(path):
        return _open_store(path, step)
    return _open_folder(path)


def _open_file(path: Path) -> Contents | None:
    """Opens a file of torch or safetensors; None for another file."""
    with open(path, "rb", opener=regular_file.opener) as file:
        start = file.read(9)
    if not start and path.suffix in _SUFFIXES:
        raise ProbeError(f"{path} is empty")
    # torch writes a zip archive; torch before 1.6 wrote a pickle of protocol 2. A safetensors file
    # has a JSON object after the length of its header.
    if start[:2] == b"PK" or start[:1] == b"\x80" or start[8:] == b"{":
        return adapter_registry.find("torch", "checkpoint_reader").open_file(path)
    return None


def _open_store(root: Path, step: int | None) -> Contents:
    """Opens one checkpoint of a store."""
    found, _ = manifest.scan(root)
    saves = {each.step: each for each in manifest.listed(found, ())}
    steps = ", ".join(map(str, saves)) or "none"
    if step is None:
        good = [each.step for each in saves.values() if each.status == "good"]
        step = max(good or saves, default=-1)
    if step not in saves:
        raise NothingToProbe(f"{root} has no checkpoint of step {step}; complete steps: {steps}")
    chosen = saves[step]
    note = f"step {step} ({chosen.status}); complete steps: {steps}; to probe another, pass --step"
    return _open_folder(Path(chosen.path or ""))._replace(notes=(note,))


def _open_folder(folder: Path) -> Contents:
    """Opens a directory that is one checkpoint."""
    if manifest.step_of(folder) is not None:
        return _open_saved(folder)
    if (folder / ".metadata").is_file():
        return adapter_registry.find("torch", "checkpoint_reader").open_directory(folder)
    if any(folder.glob("*.distcp")):
        raise ProbeError(f"{folder} has shards of torch.distributed.checkpoint, but no .metadata")
    steps = sorted(folder.glob("[0-9]*"), key=lambda path: (len(path.name), path.name))
    for root in (folder, *reversed(steps)):
        leaves: dict[tuple[str, ...], Any] = {}
        for index in sorted({*root.glob("_METADATA"), *root.glob("*/_METADATA")}):
            leaves |= _open_orbax(index.parent, index.parent.relative_to(root).parts)
        if leaves:
            return Contents("Orbax checkpoint", leaves, (f"read from {root}",))
    return _open_files(folder)


def _open_saved(folder: Path) -> Contents:
    """Opens a checkpoint of a store: its arrays, and the plain values in its state."""
    leaves: dict[tuple[str, ...], Any] = {}
    entries = json.loads(regular_file.read(folder / manifest.STATE))
    for entry in entries:
        for name, item in entry.items():
            tree = values.decode(item.get("tree"), lambda *_: None)
            leaves |= leaves_of(tree, (name,))
    data = folder / manifest.DATA
    raw = array_format.bytes_of_small_file(data)
    if raw is None:
        contents = _open_folder(data)
        return contents._replace(leaves={**leaves, **contents.leaves})
    for node in values.arrays_of([[*entry.values()] for entry in entries]):
        name, dtype = node["name"], node["dtype"].lstrip("<|>=")
        read = partial(_read_bytes, raw[name], dtype)
        leaves[tuple(name.split("."))] = Array(dtype, tuple(node["shape"]), read, name)
    return Contents("safetensors", leaves)


def _read_bytes(raw: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers of an array, 1-d. bfloat16 becomes float32, because NumPy lacks it."""
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(dtype)


def _open_orbax(item: Path, prefix: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Opens the arrays of one item of an Orbax checkpoint.

    Uses TensorStore directly, because Orbax needs the devices of the run and reads whole trees.
    """
    adapter_registry.require("jax", "tensorstore")
    import tensorstore

    index = json.loads(regular_file.read(item / "_METADATA"))
    base = {"driver": "file", "path": f"{item}/"}
    # All arrays share the context, so that TensorStore reads their common index once.
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 64 << 20}})
    for entry in index["tree_metadata"].values():
        name = ".".join(str(key["key"]) for key in entry["key_metadata"])
        kind = entry["value_metadata"]
        if kind.get("skip_deserialize") or kind.get("value_type") in ("None", "string"):
            continue
        if "/" in name or not name.strip("."):
            raise ProbeError(f"{item}: {name[:200]} is outside this directory")
        store = {**base, "path": f"{item}/{name}/"}
        if index.get("use_ocdbt", (item / "manifest.ocdbt").exists()):
            store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        driver = "zarr"
        if index.get("use_zarr3"):
            driver = "zarr3"
        spec = {"driver": driver, "kvstore": store}
        opened = tensorstore.open(spec, open=True, read=True, context=context).result()
        read = partial(_read_tensorstore, opened)
        yield (*prefix, *name.split(".")), Array(opened.dtype.name, tuple(opened.shape), read)


def _read_tensorstore(opened: Any) -> np.ndarray:
    """The numbers of an array, 1-d. Types that NumPy lacks become float32."""
    numbers = np.asarray(opened.read().result()).reshape(-1)
    if numbers.dtype.kind in "fiubc":
        return numbers
    return numbers.astype(np.float32)


def _open_files(folder: Path) -> Contents:
    """Combines all files of a directory: Trainer and Accelerate write several files."""
    leaves: dict[tuple[str, ...], Any] = {}
    formats: list[str] = []
    notes: list[str] = []
    for index in folder.glob("*.index.json"):  # the parts of a large model
        for part in sorted({*json.loads(regular_file.read(index))["weight_map"].values()}):
            if not (folder / part).is_file():
                raise Damaged(f"{folder / part} is missing, which {index.name} lists")
    for path in _checkpoint_files(folder):
        part = _open_file(path)
        if part is None:
            notes.append(f"{path} is neither a torch checkpoint nor a safetensors file")
            continue
        for keys, leaf in part.leaves.items():
            leaves[path.name.partition(".")[0], *keys] = leaf
        formats.append(part.format)
        notes += part.notes
    if not formats:
        raise NothingToProbe("; ".join([f"{folder} contains no checkpoint", *notes]))
    for path in folder.glob("*.json"):  # the numbers and flags of a trainer's state
        with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError):
            for name, value in json.loads(regular_file.read(path, _MAX_JSON_BYTES)).items():
                if isinstance(value, (bool, int, float)):
                    leaves[path.stem, name] = value
    return Contents(" and ".join(dict.fromkeys(formats)), leaves, tuple(notes))


def _checkpoint_files(folder: Path) -> list[Path]:
    return [at for at in sorted(folder.iterdir()) if at.suffix in _SUFFIXES and at.is_file()]


def damaged_archives(path: Path) -> list[str]:
    """Checks the CRC-32 of every record in archives of `torch.save`, which torch does not.

    Args:
        path: a file or a directory.

    Returns:
        A line for each damaged archive.
    """
    files = [path]
    if path.is_dir():
        files = _checkpoint_files(path)
    damage: list[str] = []
    for file in files:
        problem = None
        try:
            if zipfile.is_zipfile(file):
                problem = zipfile.ZipFile(file).testzip()
        except Exception as error:  # a flipped bit makes zipfile and zlib raise any exception
            problem = str(error)
        if problem:
            damage.append(f"{file.name} is damaged: {problem}")
    return damage


def probe_paths(
    name: str, judge: Callable[[Path, Any], Report], paths: Sequence[Path], inputs: Any
) -> list[Report]:
    """Judges checkpoints in a child process, which a damaged file may crash.

    Args:
        name: name of the probe.
        judge: a function of a module, which gets a path and the inputs.
        paths: files and directories.
        inputs: the inputs of the probe.

    Returns:
        A report for each path, in order.
    """
    reports: list[Report] = []
    os.environ["PYTHONSAFEPATH"] = "1"  # the child imports nothing from the current directory
    context = multiprocessing.get_context("spawn")  # a fork would have the caller's threads
    while len(reports) < len(paths):
        receiver, sender = context.Pipe(duplex=False)
        arguments = sender, name, judge, paths[len(reports) :], inputs
        child = context.Process(target=_serve, args=arguments, daemon=True)
        child.start()
        sender.close()
        with contextlib.suppress(EOFError):
            while len(reports) < len(paths):
                reports.append(receiver.recv())
        child.join()
        if len(reports) < len(paths):
            path = str(paths[len(reports)])
            status = child.exitcode or 0
            why: str | None = f"status {status}"
            if status < 0:
                why = signal.strsignal(-status)
            message = f"{path}: the reader process ended while reading it ({why})"
            reports.append(Report(name, path, (Check("readable", ERROR, message),)))
    return reports


def _serve(
    sender: Any, name: str, judge: Callable[..., Report], paths: Sequence[Path], inputs: Any
) -> None:
    """In the child: sends the report of each path at once."""
    for stream in (1, 2):  # libraries may print
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    for path in paths:
        _set_limits(path)
        sender.send(run_probe(name, str(path), judge, path, inputs))


def _set_limits(path: Path) -> None:
    """In the child: sets the limits for a file or a directory, by its size."""
    if sys.platform == "win32":
        return
    import resource

    files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names] or [path]
    stored = sum(file.lstat().st_size for file in files)
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + _BASE_SECONDS + stored // _BYTES_PER_SECOND
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_DATA, _BASE_MEMORY + _MEMORY_PER_BYTE * stored),
        (resource.RLIMIT_CPU, seconds),
    ):
        _, hard = resource.getrlimit(kind)
        with contextlib.suppress(ValueError, OSError):  # macOS rejects some limits
            resource.setrlimit(kind, (value, hard))
