"""Opens checkpoints of all formats, in a child process within limits of the operating system.

Writes nothing, takes no lock. The libraries that read a checkpoint allocate as much memory as the
file asks for, and a damaged file can crash them. The child gets memory and time in proportion to
the stored bytes. One child reads the paths of a command; if it ends, the path that it read gets the
verdict ERROR, and a new child reads the other paths.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from healcore import adapter_registry, regular_file
from healcore.adapter_registry import require
from healcore.checkpoint_contents import Array, Contents, Damaged, ProbeError, first_line
from healcore.runtime.store import array_format, manifest
from healcore.runtime.store.values import arrays_of
from healcore.tools.probe.checks import ERROR, Check, NothingToProbe, ProbeResult, run_probe

_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt", ".tar", ".safetensors"}
_MAX_JSON_BYTES = 1 << 24
"""A `trainer_state.json` is large, because it has an entry for each logged step."""


class _OtherFile(ProbeError):
    """The file is no checkpoint. Its directory may have other files that are one."""


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
    """
    if not path.exists():
        raise ProbeError(f"{path}: no such file or directory")
    if not path.is_dir():
        return _open_file(path)
    if any(manifest.step_of(folder) is not None for folder in path.iterdir()):
        return _open_store(path, step)
    contents = _open_folder(path)
    return contents._replace(leaves={**_trainer_values(path), **contents.leaves})


def _trainer_values(folder: Path) -> dict[tuple[str, ...], Any]:
    """Reads the numbers and flags in the JSON files of a directory, such as a trainer's state."""
    values: dict[tuple[str, ...], Any] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(regular_file.read(path, _MAX_JSON_BYTES))
        except (OSError, ValueError, RecursionError):
            continue
        if not isinstance(content, dict):
            continue
        for name, value in content.items():
            if isinstance(value, (bool, int, float)):
                values[path.stem, name] = value
    return values


def _open_file(path: Path) -> Contents:
    if path.name == ".metadata" or path.suffix == ".distcp":
        return _open_folder(path.parent)
    with open(path, "rb", opener=regular_file.opener) as file:
        start = file.read(9)
    if not start and path.suffix in _SUFFIXES:
        raise ProbeError(f"{path} is empty")
    # torch writes a zip archive; torch before 1.6 wrote a pickle of protocol 2. A safetensors file
    # has a JSON object after the length of its header.
    if start[:2] == b"PK" or start[:1] == b"\x80" or start[8:] == b"{":
        return adapter_registry.find("torch", "checkpoint_reader").open_file(path)
    raise _OtherFile(
        f"{path} is neither a torch checkpoint nor a safetensors file: pass such a file, or the "
        "directory of a checkpoint"
    )


def _open_store(root: Path, step: int | None) -> Contents:
    """Opens one checkpoint of a store."""
    found, _ = manifest.scan(root)
    saves = {each.step: each for each in manifest.listed(found, ())}
    steps = ", ".join(map(str, saves)) or "none"
    if not saves or (step is not None and step not in saves):
        which = "complete checkpoint" if step is None else f"checkpoint of step {step}"
        raise NothingToProbe(f"{root} has no {which}; complete steps: {steps}")
    if step is None:
        good = [each.step for each in saves.values() if each.status == "good"]
        step = max(good or saves)
    chosen = saves[step]
    contents = _open_folder(Path(chosen.path or ""))
    which = f"step {chosen.step} ({chosen.status})"
    note = f"{which}; complete steps: {steps}; to probe another, pass --step"
    return contents._replace(notes=(note, *contents.notes))


def _open_small_file(folder: Path) -> Contents:
    """Opens the arrays of a small checkpoint; needs neither torch nor JAX."""
    try:
        found = array_format.bytes_of_small_file(folder / manifest.DATA) or {}
        leaves: dict[tuple[str, ...], Any] = {}
        # In the order of the program.
        entries = json.loads(regular_file.read(folder / manifest.STATE))
        for node in arrays_of([[*each.values()] for each in entries]):
            name, dtype = node["name"], node["dtype"].lstrip("<|>=")
            read = partial(_numbers, found[name], dtype)
            leaves[tuple(name.split("."))] = Array(dtype, tuple(node["shape"]), read, name)
    except (*manifest.CRAFTED, OSError) as error:
        raise ProbeError(f"{folder} is damaged: {first_line(error)}") from None
    return Contents("safetensors", leaves)


def _numbers(raw: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers of an array, 1-d. Floats that NumPy lacks become float32."""
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(dtype)


def _plain_numbers(values: np.ndarray) -> np.ndarray:
    """Converts the floats of ml_dtypes, in which NumPy does not recognize NaN, to float32."""
    if values.dtype.kind in "fiubc":
        return values
    return values.astype(np.float32)


def _stored_values(folder: Path) -> dict[tuple[str, ...], Any]:
    """Reads the plain values in the state of a checkpoint, such as an optimizer's groups."""
    values: dict[tuple[str, ...], Any] = {}
    for entries in json.loads(regular_file.read(folder / manifest.STATE)):
        for name, entry in entries.items():
            values |= dict(_values(entry.get("tree", {}), (name,)))
    return values


def _values(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields path and value of each leaf below a node, whose containers have a tag."""
    if not isinstance(node, dict):
        yield path, node
        return
    for tag, content in node.items():
        if tag == "float":
            yield path, float(content)
        elif tag in ("dict", "list", "tuple"):
            for key, part in content if tag == "dict" else enumerate(content):
                yield from _values(part, (*path, *str(key).split(".")))


def _open_folder(path: Path) -> Contents:
    if manifest.step_of(path) is not None and (path / manifest.DATA).is_dir():
        if (path / manifest.DATA / array_format.SMALL_FILE).exists():
            contents = _open_small_file(path)
        else:
            contents = _open_folder(path / manifest.DATA)
        return contents._replace(leaves={**_stored_values(path), **contents.leaves})
    if (path / ".metadata").is_file():
        return adapter_registry.find("torch", "checkpoint_reader").open_directory(path)
    if any(path.glob("*.distcp")):
        raise ProbeError(
            f"{path} has shards of torch.distributed.checkpoint, but no .metadata with the list "
            "of their contents: the checkpoint was not written or copied completely"
        )
    if (path / "_METADATA").is_file() or any(path.glob("*/_METADATA")):
        return _open_orbax(path)
    steps = sorted((int(item.name), item) for item in path.iterdir() if item.name.isdecimal())
    for _, newest in reversed(steps):
        if newest.is_dir() and any(newest.glob("*/_METADATA")):
            note = f"the newest of {len(steps)} steps: {newest.name}"
            return _open_orbax(newest)._replace(notes=(note,))
    return _open_files(path)


def _open_orbax(folder: Path) -> Contents:
    """Opens an item of an Orbax checkpoint, or a checkpoint with all of its items.

    Uses TensorStore directly, because Orbax needs the devices of the run and reads whole trees.
    Raises ProbeError if the checkpoint is damaged.
    """
    if (folder / "_METADATA").exists():
        return Contents("Orbax checkpoint", dict(_open_item(folder, ())))
    items = sorted(path.parent for path in folder.glob("*/_METADATA"))
    leaves: dict[tuple[str, ...], Any] = {}
    for item in items:
        leaves |= _open_item(item, (item.name,))
    return Contents("Orbax checkpoint", leaves)


def _open_item(item: Path, prefix: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Opens the arrays of one item. Other values are None."""
    index = item / "_METADATA"
    try:
        content = json.loads(regular_file.read(index))
        entries: dict[tuple[str, ...], dict[str, Any]] = {}
        for entry in content["tree_metadata"].values():
            keys = tuple(str(key["key"]) for key in entry["key_metadata"])
            entries[keys] = {**entry["value_metadata"]}
        is_ocdbt = bool(content.get("use_ocdbt", (item / "manifest.ocdbt").exists()))
        driver = "zarr3" if content.get("use_zarr3", False) else "zarr"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ProbeError(f"{index} is damaged") from None
    require("jax", "tensorstore")
    import tensorstore

    # All arrays share the context, so that TensorStore reads their common index once.
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 64 << 20}})
    base = {"driver": "file", "path": f"{item}/"}
    for keys, entry in entries.items():
        # A key in healcore's own store is a dotted path.
        path = (*prefix, *".".join(keys).split("."))
        if entry.get("skip_deserialize") or entry.get("value_type") in ("None", "string"):
            yield path, None
            continue
        name = ".".join(keys)
        store: dict[str, Any] = {"driver": "file", "path": f"{item}/{name}/"}
        if is_ocdbt:
            store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        elif os.path.commonpath((item, os.path.normpath(store["path"]))) != str(item):
            raise ProbeError(f"{item}: {name[:200]} is outside this directory")
        spec = {"driver": driver, "kvstore": store}
        try:
            opened = tensorstore.open(spec, open=True, read=True, context=context).result()
        except Exception as error:  # TensorStore raises ValueError for any damage
            raise _damaged(item, name, error) from None

        def read(opened: Any = opened, name: str = name) -> np.ndarray:
            try:
                values = np.asarray(opened.read().result()).reshape(-1)
            except Exception as error:
                raise _damaged(item, name, error) from None
            return _plain_numbers(values)

        yield path, Array(opened.dtype.name, tuple(opened.shape), read)


def _damaged(item: Path, name: str, error: Exception) -> ProbeError:
    return ProbeError(f"{item}: {name[:200]} is damaged: {first_line(error)}")


def _open_files(folder: Path) -> Contents:
    """Combines all checkpoint files of a directory: Trainer and Accelerate write several files."""
    leaves: dict[tuple[str, ...], Any] = {}
    formats: list[str] = []
    notes: list[str] = []
    for index in folder.glob("*.index.json"):  # the parts of a large model
        for part in sorted({*json.loads(regular_file.read(index))["weight_map"].values()}):
            if not (folder / part).is_file():
                raise Damaged(f"{folder / part} is missing, which {index.name} lists")
    for path in _checkpoint_files(folder):
        try:
            part = _open_file(path)
        except _OtherFile as error:
            notes.append(str(error))
            continue
        name = path.name.partition(".")[0]
        for keys, leaf in part.leaves.items():
            leaves[name, *keys] = leaf
        formats.append(part.format)
        notes += part.notes
    if not formats and notes:
        raise ProbeError("; ".join(notes))
    if not formats:
        raise NothingToProbe(
            f"{folder} contains no checkpoint of a known format: no torch or safetensors file, "
            "no DCP or Orbax checkpoint, no healcore store"
        )
    return Contents(" and ".join(dict.fromkeys(formats)), leaves, tuple(notes))


def _checkpoint_files(folder: Path) -> list[Path]:
    return [at for at in sorted(folder.iterdir()) if at.suffix in _SUFFIXES and at.is_file()]


def damaged_archives(path: Path) -> list[str] | None:
    """Checks the CRC-32 of every record in archives of `torch.save`.

    torch may read wrong values from a damaged archive.

    Args:
        path: a file or a directory.

    Returns:
        A line for each damaged archive, or None if there is no archive.
    """
    files = [path] if path.is_file() else _checkpoint_files(path)
    archives = [file for file in files if file.suffix != ".distcp" and zipfile.is_zipfile(file)]
    if not archives:
        return None
    damage: list[str] = []
    for file in archives:
        try:
            with zipfile.ZipFile(file) as archive:
                record = archive.testzip()
            problem = record and f"{record} is damaged: its CRC-32 differs"
        except Exception as error:  # a flipped bit makes zipfile and zlib raise any exception
            problem = f"the archive is damaged: {error}"
        if problem:
            damage.append(f"{file.name}: {problem}")
    return damage


_BASE_MEMORY, _MEMORY_PER_BYTE = 4 << 30, 4
"""Memory limit in bytes, plus bytes for each stored byte, which may be compressed."""
_BASE_SECONDS, _BYTES_PER_SECOND = 15, 4 << 20
"""Limit of processor time, including the import of torch, plus time to read the stored bytes."""
_WALL_TIME = 8
"""Limit of wall time as a multiple of the processor time: a file system may hang, and a machine be
busy."""
_START = "from healcore.tools.probe.checkpoint_files import serve; serve()"


def probe_paths(
    probe: str, judge: Callable[[Path, Any], ProbeResult], paths: Sequence[str | Path], inputs: Any
) -> list[ProbeResult]:
    """Judges checkpoints in a child process, which a damaged file may crash.

        command                         child
           |--- probe, paths, inputs ---->|   judges path 0, sends its result
           |<---------- result 0 ---------|   sets new limits, judges path 1
           |            (end)             x   crashes, or exceeds a limit
        ERROR for path 1
           |--- the other paths ---> a new child

    Args:
        probe: name of the probe in the results.
        judge: a function of a module, so that it can be pickled. It gets a path and the inputs.
        paths: files and directories.
        inputs: the inputs of the probe.

    Returns:
        A result for each path, in order.
    """
    paths = [Path(path) for path in paths]
    results = []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    while len(results) < len(paths):
        child = subprocess.run(
            [sys.executable, "-P", "-c", _START],  # -P: no imports from the current directory
            input=pickle.dumps((probe, judge, paths[len(results) :], inputs)),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            check=False,
        )
        answers = io.BytesIO(child.stdout)
        with contextlib.suppress(EOFError, pickle.UnpicklingError):
            while len(results) < len(paths):
                results.append(pickle.load(answers))
        if len(results) < len(paths):
            path = str(paths[len(results)])
            status = child.returncode
            why = f"status {status}"
            if status < 0:
                why = signal.strsignal(-status) or why
            if status == -getattr(signal, "SIGALRM", 0) and status:
                why = "it took longer than its limit of wall time"
            message = f"{path}: the reader process ended while reading it ({why})"
            results.append(ProbeResult(probe, path, (Check("readable", ERROR, message),)))
    return results


def serve() -> None:
    """In the child: answers the request on standard input, with one result after the other.

    The request is a pickle of `probe_paths`, and so is each answer on standard output. Each result
    is flushed at once, so that the command has the results of all paths before a path that ends the
    child.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print
    probe, judge, paths, inputs = pickle.load(sys.stdin.buffer)
    for path in paths:
        _set_limits(path)
        pickle.dump(run_probe(probe, str(path), judge, path, inputs), answers)
        answers.flush()


def _set_limits(path: Path) -> None:
    """In the child: sets the limits for a file or a directory, by its size."""
    if sys.platform == "win32":
        return
    import resource

    files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names] or [path]
    stored = sum(file.lstat().st_size for file in files)
    used = resource.getrusage(resource.RUSAGE_SELF)
    allowed = _BASE_SECONDS + stored // _BYTES_PER_SECOND
    seconds = int(used.ru_utime + used.ru_stime) + allowed
    signal.setitimer(signal.ITIMER_REAL, _WALL_TIME * allowed)  # SIGALRM ends the process
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_DATA, _BASE_MEMORY + _MEMORY_PER_BYTE * stored),
        (resource.RLIMIT_CPU, seconds),
    ):
        _, hard = resource.getrlimit(kind)
        if hard >= 0:  # below 0 is no limit
            value = min(value, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS rejects some limits
            resource.setrlimit(kind, (value, hard))
