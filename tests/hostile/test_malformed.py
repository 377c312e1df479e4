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


@pytest.mark.parametrize("file", [MANIFEST, STATE, HEALING])
def test_a_malformed_small_file_is_a_damaged_checkpoint(file, tmp_path):
    store = DCPStore(tmp_path)
    state = {"model": {"w": torch.ones(2), "n": [1, (2.5, b"x")]}}
    for step in (1, 2):
        store.save(step, state, healing={"step": step})
        store.wait()
    newest = checkpoints(tmp_path)[-1]
    content = json.loads((newest / file).read_bytes())
    content.pop("digest", None)
    every = [*mutants(content), *((("whole", value), value) for value in JUNK)]
    raw = []
    for name, mutant in random.Random(0).sample(every, min(300, len(every))):
        if file == MANIFEST and isinstance(mutant, dict):
            (newest / MANIFEST).write_bytes(files.seal(mutant))
        elif file != MANIFEST:
            rewrite(newest, file, mutant)
        try:
            found = [each.step for each in store.steps()]
            assert found in ([1], [1, 2]), name
            assert all(str(error).isprintable() for error in store.damaged()), name
            store.verify(1)
            store.restore(2, state)
        except StoreError:
            pass
        except Exception as error:
            raw.append((name, error))
    assert raw == []


def position(content: Any) -> Any:
    data = item_of(content["healcore"], "data")[1]
    data["dict"] = [[key, 7] for key, _ in data["dict"]]
    return content


RANK = "state-rank-00000.json"
NOT_WRITTEN: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "incidents": (HEALING, lambda old: old | {"ledger": old["ledger"] | {"incidents": 7}}),
    "nothing of this rank": (RANK, lambda old: {}),
    "position": (RANK, position),
    **{
        name: (HEALING, lambda old, name=name, value=value: old | {name: value})
        for name, value in {
            "engines": "nan", "ledger": {"a": 1}, "world": "x", "step": 1, "settings": [],
            "part_limit": "", "forward": {"0": {"a": 1}}, "left_out": {"x": []}, "attempts": [""],
        }.items()
    },
}  # fmt: skip
OF_TORCH = {
    name: (STATE, lambda old, name=name, tree=tree: old | {name: old[name] | {"tree": tree}})
    for name, tree in {
        "model": 7, "optimizer": {"dict": [["param_groups", {"list": [{"dict": []}]}]]}
    }.items()
}  # fmt: skip


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
