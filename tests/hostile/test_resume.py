"""No file in a run directory runs code when a run resumes from it."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from healcore.core.errors import HealcoreError
from healcore.runtime.store import StoreError
from healcore.torch.store import DCPStore
from tests.hostile.run_directories import (
    Code,
    base64_of,
    change_state,
    checkpoints,
    code,
    cut_short,
    go_on,
    item_of,
    sealed_again,
)

BOTH = pytest.mark.parametrize("framework", ["torch", "jax"])
PARTS = ("python", "numpy", "framework", "data")


@pytest.fixture
def ran(tmp_path) -> Path:
    """The folder that code in a checkpoint would make."""
    return tmp_path / "code-ran"


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "run"


# -- what healcore keeps of the process ------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("part", PARTS)
def test_random_states_and_positions_of_a_checkpoint_run_no_code(framework, part, root, ran):
    cut_short(framework, root)

    def change(entries):
        item_of(entries["healcore"], part)[1] = {"bytes": base64_of(code(ran))}

    change_state(root, change)
    with pytest.raises(StoreError, match="healcore did not write it"):
        go_on(framework, root)
    assert not ran.exists()


@BOTH
def test_the_state_of_a_loader_runs_no_code(framework, root, ran):
    """A position whose state is a pickle, as bytes and as JSON."""
    cut_short(framework, root)
    for state in ({"bytes": base64_of(code(ran))}, json.dumps({"pickle": base64_of(code(ran))})):

        def change(entries, state=state):
            bad = {"version": 2, "kind": "sequence", "epoch": 0, "index": 1, "told_epoch": None}
            items = [[key, value] for key, value in bad.items()]
            items += [["state", state], ["left_out", {"list": []}]]
            position = {"dict": [["0", {"dict": items}], ["count", 1]]}
            item_of(entries["healcore"], "data")[1] = position

        change_state(root, change)
        with pytest.raises(HealcoreError, match=r"cannot be read|damaged"):
            go_on(framework, root)
    assert not ran.exists()


@BOTH
def test_a_checkpoint_holds_no_pickle(framework, root):
    """An ordinary run writes no pickle except DCP's own index."""
    cut_short(framework, root)
    for folder in checkpoints(root):
        for file in sorted(folder.glob("state*.json")):
            entries = json.loads(file.read_bytes())
            assert '"pickle"' not in file.read_text()
            for name in PARTS if "healcore" in entries else ():
                assert "bytes" not in str(item_of(entries["healcore"], name)[1])[:12]


# -- objects of the user's state -------------------------------------------------------------------


class Keeps:
    """An object whose state holds something that only pickle can write."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"at": {"kept": self.value}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["at"]["kept"]


@pytest.mark.parametrize("tag", ["pickle", "subclass"])
def test_a_pickled_object_runs_no_code(tag, tmp_path, ran):
    store = DCPStore(tmp_path / "store")
    store.save(1, {"x": Keeps(3), "y": {"z": torch.ones(2)}})
    store.wait()
    made = {"made": base64_of(code(ran)), "shape": [2], "stride": [1], "parts": []}
    node = {tag: base64_of(code(ran)) if tag == "pickle" else made}

    def change(entries):
        item_of(entries["x"], "at")[1] = node

    change_state(store.root, change)
    with pytest.raises(StoreError, match="does not write"):
        store.restore(1, {"x": Keeps()})
    assert not ran.exists()


# -- the index of DCP ------------------------------------------------------------------------------


def bytes_of_a_pickle(index: Path, metadata: Metadata, ran: Path) -> None:
    """DCP reads what its index calls bytes with pickle, whatever it is to be read into."""
    (name,) = metadata.state_dict_metadata
    (place,) = metadata.storage_data.values()
    file = index.parent / place.relative_path
    torch.save(Code(ran), file)
    place.offset, place.length = 0, file.stat().st_size
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    metadata.storage_data = {MetadataIndex(name): place}


def elsewhere(name: str) -> Any:
    def change(index: Path, metadata: Metadata, ran: Path) -> None:
        (place,) = metadata.storage_data.values()
        shutil.copy(index.parent / place.relative_path, ran.parent / "elsewhere")
        place.relative_path = name

    return change


def other_shape(*shape: int) -> Any:
    def change(index: Path, metadata: Metadata, ran: Path) -> None:
        (name,) = metadata.state_dict_metadata
        size = torch.Size(shape)
        chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), size)
        properties = TensorProperties(torch.float32)
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, size, [chunk])

    return change


INDEXES = {
    "code": None,
    "a pickle in the place of a tensor": bytes_of_a_pickle,
    **{
        f"leads to {name!r}": elsewhere(name)
        for name in ("../../../elsewhere", "/etc/hostname", "")
    },
    **{f"of shape {size}": other_shape(size) for size in (5, 1 << 62, -4)},
}


@pytest.mark.parametrize("change", INDEXES.values(), ids=INDEXES)
def test_an_index_of_dcp_that_healcore_does_not_write(change, tmp_path, ran):
    """Restoring fails, no code runs, and the tensor is unchanged."""
    store = DCPStore(tmp_path / "store")
    store.save(1, {"y": {"z": torch.arange(4.0)}})
    store.wait()
    index = checkpoints(store.root)[0] / "data" / ".metadata"
    if change is None:
        index.write_bytes(code(ran))
    else:
        metadata = pickle.loads(index.read_bytes())
        change(index, metadata, ran)
        index.write_bytes(pickle.dumps(metadata))
    sealed_again(index.parent.parent)
    live = torch.zeros(4)
    with pytest.raises(StoreError, match=r"\.metadata"):
        store.restore(1, {"y": {"z": live}})
    assert not live.any()
    assert not ran.exists()
