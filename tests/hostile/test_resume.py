"""No file in a run directory runs code when a run resumes from it, or raises a raw error.

Whoever can write a file can write its digest: the files here are sealed again. Such a checkpoint is
reported as damaged, and the run goes on from an older one.
"""

import copy
import json
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp

from healcore.core.errors import HealcoreError
from healcore.runtime.store.checkpoints import CheckpointDamaged, StoreError
from healcore.runtime.store.manifest import MANIFEST, STATE
from tests.healer.run_directory import events
from tests.hostile import run_directories as runs
from tests.runtime.store.store_cases import DCP, TORCH_FILE, over


@pytest.fixture
def ran(tmp_path) -> Path:
    """The folder that code in a checkpoint would make."""
    return tmp_path / "code-ran"


PARTS = ("random", "data")
"""What healcore keeps of the process."""


def loader(state: Any) -> dict[str, Any]:
    """A position whose loader has this state."""
    position = {"version": 2, "kind": "sequence", "epoch": 0, "index": 1, "told_epoch": None}
    items = [*map(list, position.items()), ["state", state], ["skipped", {"list": []}]]
    return {"dict": [["0", {"dict": items}], ["count", 1]]}


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_random_states_and_positions_of_a_checkpoint_run_no_code(framework, tmp_path, ran):
    """An ordinary run writes no pickle except DCP's own index, and no run reads one."""
    runs.cut_short(framework, tmp_path / "run")
    for folder in runs.checkpoints(tmp_path / "run"):
        shared, entries = runs.part(folder, STATE)
        assert '"pickle"' not in json.dumps([shared, entries])
        for name in PARTS:
            assert "bytes" not in str(runs.item_of(entries["healcore"], name)[1])[:12]
    pickled = runs.base64_of(runs.code(ran))
    crafted = [(part, {"bytes": pickled}, "healcore (did|does) not write") for part in PARTS]
    for state in ({"bytes": pickled}, json.dumps({"pickle": pickled})):
        crafted.append(("data", loader(state), r"cannot be read|damaged"))
    for number, (part, node, message) in enumerate(crafted):
        root = shutil.copytree(tmp_path / "run", tmp_path / str(number))

        def change(entries, part=part, node=node):
            runs.item_of(entries["healcore"], part)[1] = node

        runs.change_state(root, change)
        with pytest.raises(HealcoreError, match=message):
            runs.go_on(framework, root)
    assert not ran.exists()


def bytes_of_a_pickle(index: Path, metadata: dcp.Metadata, ran: Path) -> None:
    """DCP reads what its index calls bytes with pickle, whatever it is to be read into."""
    (name,) = metadata.state_dict_metadata
    (place,) = metadata.storage_data.values()
    file = index.parent / place.relative_path
    torch.save(runs.Code(ran), file)
    place.offset, place.length = 0, file.stat().st_size
    metadata.state_dict_metadata[name] = dcp.BytesStorageMetadata()
    metadata.storage_data = {dcp.MetadataIndex(name): place}


def elsewhere(index: Path, metadata: dcp.Metadata, ran: Path, *, name: str) -> None:
    (place,) = metadata.storage_data.values()
    shutil.copy(index.parent / place.relative_path, ran.parent / "elsewhere")
    place.relative_path = name


def other_shape(index: Path, metadata: dcp.Metadata, ran: Path, *, length: int) -> None:
    (name,) = metadata.state_dict_metadata
    size = torch.Size([length])
    chunk = dcp.ChunkStorageMetadata(torch.Size([0]), size)
    properties = dcp.TensorProperties(torch.float32)
    metadata.state_dict_metadata[name] = dcp.TensorStorageMetadata(properties, size, [chunk])


INDEXES = {
    "code": None,
    "no pickle": b"\x80\x04\x95\xff",
    "a pickle in the place of a tensor": bytes_of_a_pickle,
    "leads out of the store": partial(elsewhere, name="../../../elsewhere"),
    "leads to no file": partial(elsewhere, name=""),
    "too long": partial(other_shape, length=1 << 62),
    "of negative length": partial(other_shape, length=-4),
}


@pytest.mark.parametrize("change", INDEXES.values(), ids=INDEXES)
def test_an_index_of_dcp_that_healcore_does_not_write(change, tmp_path, ran):
    """Restoring fails, no code runs, and the tensor is unchanged."""
    store = DCP.make(tmp_path / "store")
    store.save(1, {"y": {"z": torch.arange(4.0)}})
    store.wait()
    index = runs.checkpoints(store.root)[0] / "data" / ".metadata"
    if change is None:
        index.write_bytes(runs.code(ran))
    elif isinstance(change, bytes):
        index.write_bytes(change)
    else:
        metadata = pickle.loads(index.read_bytes())
        change(index, metadata, ran)
        index.write_bytes(pickle.dumps(metadata))
    runs.sealed_again(index.parent.parent)
    live = torch.zeros(4)
    with pytest.raises(CheckpointDamaged):
        store.restore(1, {"y": {"z": live}})
    assert not live.any()
    assert not ran.exists()


JUNK = (
    None, True, -1, 1 << 70, 10**400, 1.5, "", "x", "\0", "\ud800", "\x1b[2J", [], {}, [[]], [None],
    {"a": 1}, {"": {}}, {"x": {"bytes": 1}}, {"x\0": {"bytes": 1, "xxh3_128": "0" * 32}},
)  # fmt: skip
NO_JSON = (b"", b"\xff\0", b'{"model": ', b"[" * 100_000, b"9" * 5000)


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


@pytest.mark.slow
@over(DCP, TORCH_FILE)
@pytest.mark.parametrize("file", [MANIFEST, STATE])
def test_a_malformed_small_file_is_a_damaged_checkpoint(file, case, tmp_path):
    store = case.make(tmp_path)
    state = {"model": {"w": torch.ones(2), "n": [1, (2.5, b"x")]}}
    for step in (1, 2):
        store.save(step, state, record={"step": step})
        store.wait()
    newest = runs.checkpoints(tmp_path)[-1]
    content = runs.part(newest, file)
    if isinstance(content, dict):
        content.pop("digest", None)
    every = [*mutants(content), *((("whole", value), value) for value in (*JUNK, *NO_JSON))]
    raw = []
    chosen = random.Random(0).sample(every, min(300, len(every)))
    for name, mutant in [*chosen, *every[-len(NO_JSON) :]]:
        runs.rewrite(newest, file, mutant)
        try:
            found = [each.step for each in store.checkpoints()]
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
    data = runs.item_of(content["healcore"], "data")[1]
    data["dict"] = [[key, 7] for key, _ in data["dict"]]
    return content


def without_rank(content: Any) -> Any:
    return {name: entry for name, entry in content.items() if not entry.get("per_rank")}


def with_incidents(record: Any) -> Any:
    return record | {"ledger": record["ledger"] | {"incidents": 7}}


Change = Callable[[Any], Any]


def with_entry(name: str, value: Any) -> Change:
    """Replaces an entry of a file."""
    return lambda old: old | {name: value}


def with_tree(name: str, tree: Any) -> Change:
    """Replaces the tree of a part of the state."""
    return lambda old: old | {name: old[name] | {"tree": tree}}


def of_rank(change: Change) -> Change:
    """Changes the entries of the only rank."""
    return lambda parts: [parts[0], change(parts[1])]


def shared(change: Change) -> Change:
    """Changes the entries of values that all ranks share."""
    return lambda parts: [change(parts[0]), *parts[1:]]


NOT_WRITTEN: dict[str, tuple[str, Change]] = {
    "incidents": (runs.RECORD, with_incidents),
    "nothing of this rank": (STATE, of_rank(without_rank)),
    "position": (STATE, of_rank(position)),
    "engines": (runs.RECORD, with_entry("engines", "nan")),
    "ledger": (runs.RECORD, with_entry("ledger", {"a": 1})),
    "world": (runs.RECORD, with_entry("world", "x")),
    "step": (runs.RECORD, with_entry("step", 1)),
    "settings": (runs.RECORD, with_entry("settings", [])),
    "part_size": (runs.RECORD, with_entry("part_size", "")),
    "forward": (runs.RECORD, with_entry("forward", {"0": {"a": 1}})),
    "skipped": (runs.RECORD, with_entry("skipped", {"x": 7})),
    "attempts": (runs.RECORD, with_entry("attempts", [""])),
}
OF_TORCH: dict[str, tuple[str, Change]] = {
    "model": (STATE, shared(with_tree("model", 7))),
    "optimizer": (
        STATE,
        shared(with_tree("optimizer", {"dict": [["param_groups", {"list": [{"dict": []}]}]]})),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_values_that_healcore_does_not_write_are_damage(framework, tmp_path):
    """The digests hold: the checkpoint is restored, and what it holds cannot be loaded."""
    runs.cut_short(framework, tmp_path / "run")
    changes = NOT_WRITTEN | OF_TORCH if framework == "torch" else NOT_WRITTEN
    for name, (file, change) in changes.items():
        root = tmp_path / name
        shutil.copytree(tmp_path / "run", root)
        newest = runs.checkpoints(root)[-1]
        runs.rewrite(newest, file, change(runs.part(newest, file)))
        assert runs.go_on(framework, root).step == runs.LENGTH, name
        assert len(events(root, "damaged")) == 1, name
        (damaged,) = events(root, "damaged")
        assert damaged["step"] == int(newest.name[5:15]), name
        (resumed,) = events(root, "resume")
        assert resumed["step"] < damaged["step"], name
