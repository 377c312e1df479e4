"""Small files of a run directory with values that healcore does not write, sealed again.

Whoever can write a file can write its digest. Such a checkpoint is reported as damaged, the run
goes on from an older one, and no error is a raw one.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from healcore.runtime.store import StoreError, files
from healcore.runtime.store.manifest import HEALING, MANIFEST, STATE
from healcore.torch.store import DCPStore
from tests.healer.run_directory import events
from tests.hostile.run_directories import (
    checkpoints,
    cut_short,
    go_on,
    item_of,
    rewrite,
)

JUNK = (
    None, True, -1, 1 << 70, 10**400, 1.5, "", "x", "\0", "\ud800", "\x1b[2J", [], {}, [[]], [None],
    {"a": 1}, {"": {}}, {"x": {"bytes": 1}}, {"x\0": {"bytes": 1, "xxh3_128": "0" * 32}},
)  # fmt: skip


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON document."""
    if path:
        yield path
    if isinstance(node, dict | list):
        for key in node if isinstance(node, dict) else range(len(node)):
            yield from places(node[key], (*path, key))


def mutants(content: Any) -> Iterator[tuple[Any, Any]]:
    """(place and value, document) with one value replaced or left out."""
    for path in places(content):
        for value in (*JUNK, ...):
            mutant = copy.deepcopy(content)
            inner = mutant
            for key in path[:-1]:
                inner = inner[key]
            if value is not ...:
                inner[path[-1]] = value
            else:
                del inner[path[-1]]
            yield (path, value), mutant


def two_checkpoints(root: Path) -> tuple[DCPStore, Path, dict[str, Any]]:
    """A store, its newest checkpoint and a state to restore into."""
    store = DCPStore(root)
    state = {"model": {"w": torch.ones(2), "n": [1, (2.5, b"x")]}}
    for step in (1, 2):
        store.save(step, state, healing={"step": step})
        store.wait()
    return store, checkpoints(root)[-1], state


def test_a_malformed_manifest_is_a_damaged_checkpoint(tmp_path):
    store, newest, state = two_checkpoints(tmp_path)
    content = files.read_sealed(newest / MANIFEST)
    raw = []
    for name, mutant in mutants(content):
        (newest / MANIFEST).write_bytes(files.seal(mutant))
        try:
            found = [each.step for each in store.steps()]
            assert found in ([1], [1, 2]), name
            assert (found == [1]) == bool(store.damaged()), name
            assert all(str(error).isprintable() for error in store.damaged()), name
            store.verify(1)
            if found == [1, 2]:
                store.restore(2, state)
        except StoreError:
            pass
        except Exception as error:
            raw.append((name, error))
    assert raw == []


@pytest.mark.parametrize("file", [STATE, HEALING])
def test_a_malformed_small_file_is_a_damaged_checkpoint(file, tmp_path):
    store, newest, state = two_checkpoints(tmp_path)
    content = json.loads((newest / file).read_bytes())
    content.pop("digest", None)
    every = [*mutants(content), *((("whole", value), value) for value in JUNK)]
    raw = []
    for name, mutant in random.Random(0).sample(every, min(150, len(every))):
        rewrite(newest, file, mutant)
        try:
            store.steps()
            store.damaged()
            store.restore(2, state)
        except StoreError:
            pass
        except Exception as error:
            raw.append((name, error))
    assert raw == []


def in_healing(**changes: Any) -> tuple[str, Callable[[Any], Any]]:
    return HEALING, lambda content: content | changes


def in_ledger(**changes: Any) -> tuple[str, Callable[[Any], Any]]:
    return HEALING, lambda content: content | {"ledger": content["ledger"] | changes}


def tree(name: str, value: Any) -> tuple[str, Callable[[Any], Any]]:
    return STATE, lambda content: content | {name: content[name] | {"tree": value}}


def first_weight(content: Any) -> Any:
    content["model"]["tree"]["dict"][0][1] = "x"
    return content


def position(content: Any) -> Any:
    data = item_of(content["healcore"], "data")[1]
    data["dict"] = [[key, 7] for key, _ in data["dict"]]
    return content


RANK = "state-rank-00000.json"
NOT_WRITTEN = {
    "engines": in_healing(engines="nan"),
    "ledger": in_healing(ledger={"a": 1}),
    "incidents": in_ledger(incidents=7),
    "skips": in_ledger(undone_skips=""),
    "world": in_healing(world="x"),
    "step": in_healing(step=1),
    "settings": in_healing(settings=[]),
    "sizes": in_healing(part_limit=""),
    "forward": in_healing(forward={"0": {"a": 1}}),
    "left out": in_healing(left_out={"x": []}),
    "attempts": in_healing(attempts=[""]),
    "nothing of this rank": (RANK, lambda content: {}),
    "position": (RANK, position),
}
OF_TORCH = {
    "model": tree("model", 7),
    "weight": (STATE, first_weight),
    "optimizer": tree("optimizer", {"dict": [["param_groups", {"list": [{"dict": []}]}]]}),
}


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_values_that_healcore_does_not_write_are_damage(framework, tmp_path):
    """The digests hold: the checkpoint is restored, and what it holds cannot be loaded."""
    cut_short(framework, tmp_path / "run")
    for name, (file, change) in (NOT_WRITTEN | (OF_TORCH if framework == "torch" else {})).items():
        root = tmp_path / name
        shutil.copytree(tmp_path / "run", root)
        newest = checkpoints(root)[-1]
        rewrite(newest, file, change(json.loads((newest / file).read_bytes())))
        assert go_on(framework, root)["step"] == 36, name
        (damaged,) = events(root, "damaged")
        assert damaged["step"] == int(newest.name[5:15]), name
        (resumed,) = events(root, "resume")
        assert resumed["step"] < damaged["step"], name
