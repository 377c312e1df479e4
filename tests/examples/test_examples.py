"""The examples run unchanged, and their runs survive the faults in them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from examples import trackers
from healcore.tools.traces import open_traces
from tests import forked_programs
from tests.forked_programs import ROOT, TRANSFORMERS


def output(name: str, **options: Any) -> tuple[str, str]:
    """What an example prints, and its messages."""
    done = forked_programs.run(f"examples/{name}.py", **options)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("name", ["optax_loop", "torch_loop"])
def test_example(name):
    out, _ = output(name)
    match = re.fullmatch(r"loss (\S+), skips (\d+), cuts (\d+)\n", out)
    assert match, out
    loss, skips, cuts = match.groups()
    # Guessing the mean of sin() gives 0.5; a ruined run ends far above it, or in NaN.
    assert float(loss) < 0.4
    assert (int(skips), int(cuts)) == (4, 1)


def test_a_loss_spike_is_healed_as_the_page_says():
    out, _ = output("loss_spike")
    lines = dict(re.findall(r"^(.+?) +highest loss .*, final (\S+);", out, re.M))
    final = {name: float(loss) for name, loss in lines.items()}
    assert final["no protection"] == final["default"] > 3 * final["no bad batches"], out
    assert final["default, loss_fn"] < 1.05 * final["no bad batches"]
    assert final["pretraining"] < 1.1 * final["no bad batches"]


def test_a_run_that_moves_between_frameworks_is_healed_as_one_that_stays():
    ported, stayed = output("port_a_run")[0].splitlines()
    assert "alarms 2, skips 2" in ported
    assert ported.removeprefix("ported") == stayed.removeprefix("stayed")


def test_a_call_that_fails_twice_is_repeated():
    out, messages = output("retrying_hub")
    assert re.fullmatch(r"loss \S+, uploads 3\n", out)
    assert "HTTP 503, attempt 2" in messages
    assert "upload has succeeded at attempt 3" in messages


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


def test_hf_trainer():
    out, _ = output("hf_trainer", imports=TRANSFORMERS)
    assert "steps skipped: 3" in out  # the one NaN label, in each of three epochs
    assert "weights finite: True" in out
    loss = re.search(r"loss (\S+)$", out.strip())
    assert loss is not None
    assert float(loss[1]) < 1.0  # guessing the mean gives 8


def test_trl_sft():
    out, _ = output("trl_sft", imports=TRANSFORMERS)
    assert "steps skipped: 0" in out
    losses = re.search(r"loss (\S+) -> (\S+)$", out.strip())
    assert losses is not None
    assert float(losses[2]) < 0.5 * float(losses[1])


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem
)
def test_an_example_is_short(path):
    loops = 3 if path.stem in ("tutorial_torch", "tutorial_jax") else 1  # one for each protection
    assert len(path.read_text().splitlines()) < (80 if loops == 1 else 120)
