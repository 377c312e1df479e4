"""The examples run unchanged, and their runs survive the faults in them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from examples import trackers
from healcore.policy import load
from healcore.tools.traces import open_traces
from tests import forked_programs
from tests.forked_programs import ROOT


@pytest.mark.parametrize("name", ["optax_loop", "torch_loop"])
def test_example(name):
    done = forked_programs.run(f"examples/{name}.py")
    assert done.returncode == 0, done.stderr
    match = re.fullmatch(r"loss (\S+), skips (\d+), cuts (\d+)\n", done.stdout)
    assert match, done.stdout
    loss, skips, cuts = match.groups()
    # Guessing the mean of sin() gives 0.5; a ruined run ends far above it, or in NaN.
    assert float(loss) < 0.4
    assert (int(skips), int(cuts)) == (4, 1)


def test_a_loss_spike_is_healed_as_the_page_says():
    done = forked_programs.run("examples/loss_spike.py")
    lines = dict(re.findall(r"^(.+?) +highest loss .*, final (\S+);", done.stdout, re.M))
    final = {name: float(loss) for name, loss in lines.items()}
    assert final["no protection"] == final["default"] > 3 * final["no bad batches"], done.stderr
    assert final["default, loss_fn"] < 1.05 * final["no bad batches"]
    assert final["pretraining"] < 1.1 * final["no bad batches"]


def test_a_run_that_moves_between_frameworks_is_healed_as_one_that_stays():
    done = forked_programs.run("examples/port_a_run.py")
    ported, stayed = done.stdout.splitlines()
    assert "alarms 2, skips 2" in ported, done.stderr
    assert ported.removeprefix("ported") == stayed.removeprefix("stayed")


def test_the_policy_of_the_examples_loads():
    assert load(ROOT / "examples" / "mine.toml").name == "mine"


def test_a_call_that_fails_twice_is_repeated():
    done = forked_programs.run("examples/retrying_hub.py")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"loss \S+, uploads 3\n", done.stdout)
    assert "HTTP 503, attempt 2" in done.stderr
    assert "upload has succeeded at attempt 3" in done.stderr


def test_trackers_get_every_step_and_the_files_of_tensorboard_are_replayed(tmp_path, capsys):
    trackers.main(str(tmp_path))
    out = capsys.readouterr().out
    assert out.startswith("steps 120, skipped 1, clipped 1: alarm alert end ")
    (trace,), unreadable = open_traces([str(tmp_path)])
    assert not unreadable
    table = trace.rows
    assert table.step.tolist() == list(range(120))
    assert np.flatnonzero(np.isnan(table.values["loss"])).tolist() == [trackers.RUINED]
    assert np.argmax(np.nan_to_num(table.values["grad_norm"])) == trackers.LARGE


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem
)
def test_an_example_is_short(path):
    loops = 3 if path.stem in ("tutorial_torch", "tutorial_jax") else 1  # one for each protection
    assert len(path.read_text().splitlines()) < (80 if loops == 1 else 120)
