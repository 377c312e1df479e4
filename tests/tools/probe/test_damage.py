"""Damaged checkpoints of any format: an answer or an error message, never a traceback."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import random
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from orbax.checkpoint import v1 as ocp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from healcore.tools.probe import checkpoint, optimizer
from healcore.tools.probe.child import probe_paths
from healcore.tools.probe.inputs import CheckpointInputs, OptimizerInputs
from healcore.tools.probe.result import dumps
from tests.tools.cli.test_probe import strict
from tests.tools.probe.curves import probe_values
from tests.tools.probe.trained_networks import saved, trained


def torch_file(folder: Path) -> Path:
    return saved(folder, *trained(blocks=2))


def old_torch_file(folder: Path) -> Path:
    path = folder / "old.pt"
    state = {"optimizer": trained(blocks=2)[1].state_dict()}
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return path


def dcp(folder: Path) -> Path:
    net, optimizer = trained(blocks=2)
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    save_dcp(state, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def orbax(folder: Path) -> Path:
    params = {"a": jnp.ones((50, 6)), "b": {"c": jnp.ones(3)}}
    state = optax.adamw(1e-3).init(params)
    ocp.save(str(folder / "orbax"), {"params": params, "opt_state": state})
    return folder / "orbax"


@pytest.mark.parametrize("times", [15, pytest.param(200, marks=pytest.mark.stress)])
@pytest.mark.parametrize("make", [torch_file, old_torch_file, dcp, orbax])
def test_damage_of_every_kind(tmp_path, make, times):
    path = make(tmp_path)
    rng = random.Random(20261120)
    copies = []
    for number in range(times):
        copies.append(tmp_path / str(number) / path.name)
        if path.is_file():
            copies[-1].parent.mkdir()
            shutil.copy(path, copies[-1])
            file = copies[-1]
        else:
            shutil.copytree(path, copies[-1])
            files = [each for each in sorted(copies[-1].rglob("*")) if each.is_file()]
            file = rng.choice([each for each in files if each.stat().st_size])
        whole = file.read_bytes()
        spoilt, at = bytearray(whole), rng.randrange(len(whole))
        match rng.choice(["bit", "byte", "cut", "zeros"]):
            case "bit":
                spoilt[at] ^= 1 << rng.randrange(8)
            case "byte":
                spoilt[at] = rng.randrange(256)
            case "cut":
                del spoilt[at:]
            case "zeros":
                spoilt[at : at + 40] = bytes(len(spoilt[at : at + 40]))
        file.write_bytes(spoilt)
    for probe, judge, inputs in (
        ("optimizer", optimizer.judge, OptimizerInputs()),
        ("checkpoint", checkpoint.judge, CheckpointInputs()),
    ):
        results = probe_paths(probe, judge, copies, inputs)
        assert [result.subject for result in results] == list(map(str, copies))
        strict(dumps(results, inputs))
        for result in results:
            if result.checks[0].name == "readable":
                assert str(tmp_path) in result.checks[0].message


@settings(max_examples=60)
@given(st.lists(st.floats(width=32), max_size=120))
def test_any_curve_has_an_answer(tmp_path_factory, values):
    if not values:
        return
    result = probe_values(tmp_path_factory.mktemp("curve"), values)
    document = strict(dumps([result], CheckpointInputs()))
    finite = np.isfinite(values)
    if not finite[-1]:
        assert document["verdict"] == "FAIL"
    elif not finite.all():
        assert document["verdict"] in ("WARN", "FAIL")
    elif len(values) < 10:
        assert document["verdict"] == "SKIP"
