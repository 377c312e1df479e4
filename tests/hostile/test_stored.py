"""Checkpoints of healcore's own stores in which the small files are crafted."""

from __future__ import annotations

import json
import os
import pickle

import pytest
import torch

from healcore.runtime.store import checksummed_json
from healcore.runtime.store.manifest import MANIFEST, SCHEMA
from healcore.tools.probe.saved_state import parse_key_path
from healcore.torch.store import DCPStore


@pytest.fixture
def folder(tmp_path):
    """One checkpoint of a store."""
    store = DCPStore(tmp_path / "store")
    store.save(1, {"model": {"w": torch.ones(8)}})
    store.wait()
    (found,) = (each for each in (tmp_path / "store").iterdir() if each.is_dir())
    return found


def changed(folder, **changes):
    """The manifest with other entries; its own digest holds."""
    content = checksummed_json.read(folder / MANIFEST)
    content.pop("digest", None)
    (folder / MANIFEST).write_bytes(
        checksummed_json.dumps({**content, "schema": SCHEMA, **changes})
    )


def test_the_checkpoint_is_valid(reader, folder):
    assert reader.probe("checkpoint", folder).status in (0, 1)


@pytest.mark.parametrize("name", ["/etc/passwd", "../../secret", "data/../../x", "", "."])
def test_a_manifest_that_lists_files_outside(reader, folder, name):
    digest = {"bytes": 1, "xxh3_128": "0" * 32}
    changed(folder, files={name: digest})
    outcome = reader.probe("checkpoint", folder)
    assert outcome.status == 2
    assert "outside" in outcome.messages()


def test_a_manifest_that_lists_nothing(reader, folder):
    changed(folder, files={})
    outcome = reader.probe("checkpoint", folder)
    assert outcome.status == 2
    assert "files" in outcome.messages()


ARRAY = {"name": "model.w", "dtype": "float32", "shape": [8], "kind": "torch"}
STATES = {
    "nested": '{"model": {"tree": ' + "[" * 300_000,
    "a shape of large numbers": json.dumps(
        {"model": {"tree": {"array": {**ARRAY, "shape": [10**4000] * 50}}}}
    ),
    "a shape below 0": json.dumps({"model": {"tree": {"array": {**ARRAY, "shape": [-8]}}}}),
    "a structure as dtype": json.dumps(
        {"model": {"tree": {"array": {**ARRAY, "dtype": "(99999999,)f8", "kind": "numpy"}}}}
    ),
    "no name": json.dumps({"model": {"tree": {"array": {"shape": [1]}}}}),
    "brackets": json.dumps({"model": {"leaves": [["[" * 900_000, {"float": "1"}]]}}),
    "quotes": json.dumps({"model": {"leaves": [["['" * 450_000, {"float": "1"}]]}}),
    "no literal": json.dumps({"model": {"leaves": [["['\\x']", {"float": "1"}]]}}),
    "dots": json.dumps({"model": {"tree": {"dict": [["." * 900_000, 1]]}}}),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_is_none(reader, folder, name):
    for each in folder.glob("state*.json"):
        each.write_text(STATES[name])
    assert reader.probe("optimizer", folder).status == 3


def test_a_pipe_in_the_place_of_the_state(reader, folder):
    for each in folder.glob("state*.json"):
        each.unlink()
        os.mkfifo(each)
    assert reader.probe("optimizer", folder).status == 3


def test_a_pipe_next_to_the_state(reader, folder):
    """Named like the state of another rank, and in no manifest: it is not read."""
    os.mkfifo(folder / "state-rank1.json")
    assert reader.probe("checkpoint", folder.parent).status == 1


def test_its_index_runs_nothing(reader, folder, tmp_path):
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {ran}",)

    (folder / "data" / ".metadata").write_bytes(pickle.dumps(Evil()))
    for probe in ("optimizer", "checkpoint"):
        assert reader.probe(probe, folder).status in (2, 3)
    assert not ran.exists()


def test_parts_of_a_path():
    assert parse_key_path(".opt_state[0].nu['dense'][\"it's\"][<flat index 3>]") == (
        "opt_state", "0", "nu", "dense", "it's", "3",
    )  # fmt: skip
    assert parse_key_path(".a?b.c") == ("a", "?b.c")
