"""The checkpoint probe: every store, every kind of damage, and checkpoints that others wrote."""

import argparse
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from orbax.checkpoint import v1 as ocp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from healcore.runtime.store.claim import Claim
from healcore.tools.probe.checkpoint import probe_checkpoint
from healcore.tools.probe.checks import CheckpointInputs, Report, run_probe
from tests.runtime.store.store_cases import DISKS, TIERS, StoreCase, mark_good, over
from tests.tools.probe.trained_networks import verdicts


def probe(path: Path, **inputs: object) -> Report:
    given = CheckpointInputs.model_validate(inputs)
    return run_probe("checkpoint", str(path), probe_checkpoint, path, given)


def filled(case: StoreCase, root: Path, *statuses: str) -> list[Path]:
    """The checkpoints of a store whose first ones are known good."""
    store = case.make(root)
    for step in range(1, len(statuses) + 1):
        record = {"attempts": [0], "known_good_up_to": statuses.count("good")}
        store.save(step, case.state(step), record=record)
        store.wait()
    return sorted(root.glob("step-*"))


def picture(root: Path) -> dict[Path, tuple[int, int, bytes]]:
    """Everything in a directory, to see whether it was changed."""
    found = ((path, path.stat()) for path in root.rglob("*"))
    return {
        path: (stat.st_mtime_ns, stat.st_mode, path.read_bytes() if path.is_file() else b"")
        for path, stat in found
    }


@over(*DISKS, *TIERS)
def test_known_good_and_intact_passes_and_nothing_is_changed_or_locked(case, tmp_path):
    statuses = "good", "good", "candidate"
    filled(case, tmp_path, *statuses)
    (tmp_path / ".tmp-healcore-0000000000000000").mkdir()
    held = Claim(tmp_path)
    before = picture(tmp_path)
    result = probe(tmp_path)
    assert picture(tmp_path) == before
    held.release()
    assert result.verdict.value == "PASS", result.checks
    assert result.facts["newest_good"] == 2
    wanted = [(step, each, True, True) for step, each in enumerate(statuses, 1)]
    keys = "step", "status", "intact", "finite"
    rows = result.facts["checkpoints"]
    assert [tuple(row[key] for key in keys) for row in rows] == wanted


@over(*DISKS)
def test_damage_is_found_and_named_wherever_it_is(case, tmp_path):
    """A flipped bit in each file; and one file cut, empty and absent."""
    _, newer = filled(case, tmp_path, "good", "good")
    files = [path for path in newer.rglob("*") if path.is_file() and path.stat().st_size]
    rng = random.Random(20261120)
    damaged: list[tuple[Path, bytes | None]] = []
    for path in files:
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        damaged.append((path, bytes(data)))
    largest = max(files, key=lambda path: path.stat().st_size)
    damaged += [(largest, content) for content in (largest.read_bytes()[:-1], b"", None)]
    for path, content in damaged:
        whole = path.read_bytes()
        path.unlink() if content is None else path.write_bytes(content)
        result = probe(tmp_path)
        assert result.verdict.value == "FAIL", path
        assert path.relative_to(newer).as_posix() in result.checks[0].message
        assert result.facts["newest_good"] == 1
        assert probe(newer).verdict.value == "FAIL"
        assert probe(tmp_path, step=1).verdict.value == "PASS"
        path.write_bytes(whole)
    assert probe(tmp_path).verdict.value == "PASS"


@over(*DISKS)
def test_nan_is_reported_and_is_not_known_good(case, tmp_path):
    store = case.make(tmp_path)
    store.save(1, case.with_nan())
    store.wait()
    result = probe(tmp_path)
    assert verdicts(result)["finite"] == "FAIL"
    assert "weights.bfloat16" in result.checks[1].message
    assert result.facts["known_good"] is False
    meant = probe(tmp_path, nonfinite_ok=("weights.*",))
    assert verdicts(meant) == {"digests": "PASS", "finite": "PASS", "known_good": "WARN"}
    required = probe(tmp_path, nonfinite_ok=("weights.*",), require_good=True)
    assert verdicts(required)["known_good"] == "FAIL"
    store.save(2, case.state(2))
    store.wait()
    mark_good(store, 2)
    assert verdicts(probe(tmp_path))["finite"] == "WARN"  # there is one to go back to


def test_an_absent_checkpoint_is_skipped_or_an_error(tmp_path):
    assert probe(tmp_path).verdict.value == "SKIP"
    assert probe(tmp_path / "nowhere").verdict.value == "ERROR"
    filled(DISKS[0], tmp_path / "store", "good")
    result = probe(tmp_path / "store", step=9)
    assert (result.verdict.value, "step 9" in result.checks[0].message) == ("SKIP", True)


SAVES = {
    "torch": torch.save,
    "safetensors": save_file,
    "DCP": lambda state, path: save_dcp(state, checkpoint_id=path, no_dist=True),
    "Orbax": lambda state, path: ocp.save(path, {n: x.numpy() for n, x in state.items()}),
}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_a_checkpoint_that_no_store_wrote_is_finite_or_not(tmp_path, save):
    weights = {"a": torch.randn(300, 7), "b": torch.arange(5), "c": torch.randn(4).half()}
    save(weights, tmp_path / "well")
    result = probe(tmp_path / "well")
    assert result.verdict.value == "PASS", result.checks
    assert result.facts["known_good"] is None
    assert probe(tmp_path / "well", require_good=True).verdict.value == "SKIP"
    weights["a"][299, 6] = float("nan")
    save(weights, tmp_path / "ill")
    result = probe(tmp_path / "ill")
    assert result.verdict.value == "FAIL"
    (name,) = result.facts["nonfinite"]
    assert name.endswith("a")
    assert probe(tmp_path / "ill", nonfinite_ok=(name,)).verdict.value == "PASS"
    for shard in tmp_path.glob("well/*.distcp"):
        os.truncate(shard, 700)
        assert probe(tmp_path / "well").verdict.value == "ERROR"


def test_a_trainers_directory_that_a_kill_left_incomplete_fails(tmp_path):
    save_file({"w": torch.randn(9)}, tmp_path / "model-1.safetensors")
    torch.save({"w": torch.randn(999)}, tmp_path / "optimizer.pt")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    assert probe(tmp_path).verdict.value == "PASS"
    for size, damage in ((4000, "is damaged"), (0, "is empty"), (0, "is missing")):
        os.truncate(tmp_path / "optimizer.pt", size)
        if damage == "is missing":
            index.write_text(json.dumps({"weight_map": {"w": "model-2.safetensors"}}))
        check, *_ = probe(tmp_path).checks
        assert (check.verdict.value in ("ERROR", "FAIL"), damage in check.message) == (True, True)


def test_a_program_may_save_its_arguments_its_random_state_and_its_model(tmp_path):
    """No class is imported, and NaN is found in each tensor and each array of NumPy."""
    given = argparse.Namespace(lr=1e-3, ema=torch.ones(3), path=tmp_path)
    saved = {"args": given, "best": np.ones(2), "model": torch.nn.Linear(3, 2), "rng": np.arange(9)}
    torch.save(saved, tmp_path / "all.pt")
    assert probe(tmp_path / "all.pt").verdict.value == "PASS"
    for array in (given.ema, saved["best"], saved["model"].bias.data):
        array[1] = float("nan")
        torch.save(saved, tmp_path / "all.pt")
        result = probe(tmp_path / "all.pt")
        assert (result.verdict.value, [*result.facts["nonfinite"].values()]) == ("FAIL", [1])
        array[1] = 0
