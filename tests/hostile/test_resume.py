"""No file in a run directory runs code when a run resumes from it."""

from __future__ import annotations

import json
import pickle
import shutil
from functools import partial
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


@pytest.fixture
def ran(tmp_path) -> Path:
    """The folder that code in a checkpoint would make."""
    return tmp_path / "code-ran"


PARTS = ("python", "numpy", "framework", "data")
"""What healcore keeps of the process."""


def loader(state: Any) -> dict[str, Any]:
    """A position whose loader has this state."""
    position = {"version": 2, "kind": "sequence", "epoch": 0, "index": 1, "told_epoch": None}
    items = [*map(list, position.items()), ["state", state], ["left_out", {"list": []}]]
    return {"dict": [["0", {"dict": items}], ["count", 1]]}


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_random_states_and_positions_of_a_checkpoint_run_no_code(framework, tmp_path, ran):
    """An ordinary run writes no pickle except DCP's own index, and no run reads one."""
    cut_short(framework, tmp_path / "run")
    for folder in checkpoints(tmp_path / "run"):
        for file in sorted(folder.glob("state*.json")):
            assert '"pickle"' not in file.read_text()
            entries = json.loads(file.read_bytes())
            for name in PARTS if "healcore" in entries else ():
                assert "bytes" not in str(item_of(entries["healcore"], name)[1])[:12]
    pickled = base64_of(code(ran))
    crafted = [(part, {"bytes": pickled}, "healcore did not write it") for part in PARTS]
    for state in ({"bytes": pickled}, json.dumps({"pickle": pickled})):
        crafted.append(("data", loader(state), r"cannot be read|damaged"))
    for number, (part, node, message) in enumerate(crafted):
        root = shutil.copytree(tmp_path / "run", tmp_path / str(number))

        def change(entries, part=part, node=node):
            item_of(entries["healcore"], part)[1] = node

        change_state(root, change)
        with pytest.raises(HealcoreError, match=message):
            go_on(framework, root)
    assert not ran.exists()


def bytes_of_a_pickle(index: Path, metadata: Metadata, ran: Path) -> None:
    """DCP reads what its index calls bytes with pickle, whatever it is to be read into."""
    (name,) = metadata.state_dict_metadata
    (place,) = metadata.storage_data.values()
    file = index.parent / place.relative_path
    torch.save(Code(ran), file)
    place.offset, place.length = 0, file.stat().st_size
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    metadata.storage_data = {MetadataIndex(name): place}


def elsewhere(index: Path, metadata: Metadata, ran: Path, *, name: str) -> None:
    (place,) = metadata.storage_data.values()
    shutil.copy(index.parent / place.relative_path, ran.parent / "elsewhere")
    place.relative_path = name


def other_shape(index: Path, metadata: Metadata, ran: Path, *, length: int) -> None:
    (name,) = metadata.state_dict_metadata
    size = torch.Size([length])
    chunk = ChunkStorageMetadata(torch.Size([0]), size)
    properties = TensorProperties(torch.float32)
    metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, size, [chunk])


INDEXES = {
    "code": None,
    "a pickle in the place of a tensor": bytes_of_a_pickle,
    "leads out of the store": partial(elsewhere, name="../../../elsewhere"),
    "leads to no file": partial(elsewhere, name=""),
    "too long": partial(other_shape, length=1 << 62),
    "of negative length": partial(other_shape, length=-4),
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
