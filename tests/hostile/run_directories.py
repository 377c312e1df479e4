"""Run directories with crafted parts, sealed again: every digest in them holds."""

import base64
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from healcore.runtime.store import files, manifest
from tests.healer.training_loops import TrainingResult, broken_at, loop_of, rules, train

STEPS, LENGTH = 12, 18
RECORD = "record"
"""The record in the manifest of a checkpoint."""


class Code:
    """Pickled, it is code: reading it makes the folder `at`."""

    def __init__(self, at: Path) -> None:
        self.at = at

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.at),)


def code(at: Path) -> bytes:
    """A pickle that makes a folder when it is read."""
    return pickle.dumps(Code(at))


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def cut_short(framework: str, root: Path) -> None:
    """A run that was cut short: its checkpoints are there to go on from."""
    with pytest.raises(RuntimeError, match="power"):
        go_on(framework, root, before=broken_at(STEPS))


def go_on(framework: str, root: Path, **options: Any) -> TrainingResult:
    """The next process."""
    policy = rules()
    loop = loop_of(framework, policy=policy)
    return train(loop, policy, range(LENGTH), store=root, **options)


def checkpoints(root: Path) -> list[Path]:
    return sorted(root.glob("step-*"))


def part(folder: Path, file: str) -> Any:
    """The JSON of a file of a checkpoint."""
    if file == RECORD:
        return part(folder, manifest.MANIFEST)["record"]
    return json.loads((folder / file).read_bytes())


def rewrite(folder: Path, file: str, content: Any) -> None:
    """Replaces a JSON file of a checkpoint, by a value or by bytes, with the right digests."""
    if file == RECORD:
        file, content = manifest.MANIFEST, {**part(folder, manifest.MANIFEST), "record": content}
    if file == manifest.MANIFEST and isinstance(content, dict):
        content.pop("digest", None)
        (folder / file).write_bytes(files.seal(json.dumps(content).encode()))
        return
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / file).write_bytes(raw)
    if file != manifest.MANIFEST:
        sealed_again(folder)


def sealed_again(folder: Path) -> None:
    """The manifest of a checkpoint as its files are now: the digests are no secret."""
    content = part(folder, manifest.MANIFEST)
    digests = files.sync_and_digest(folder)
    content["files"] = {name: digests[name] for name in digests.keys() - {manifest.MANIFEST}}
    rewrite(folder, manifest.MANIFEST, content)


def change_state(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes name -> entry of every checkpoint of a small state."""
    for folder in checkpoints(root):
        entries = part(folder, manifest.STATE)
        for each in entries:
            if "healcore" in each:
                change(each)
        rewrite(folder, manifest.STATE, entries)


def item_of(entry: dict[str, Any], key: str) -> list[Any]:
    """The pair [key, node] of a dictionary that was saved."""
    return next(pair for pair in entry["tree"]["dict"] if pair[0] == key)
