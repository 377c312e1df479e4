"""The demo end to end, small: real training in both frameworks, table, picture and events."""

from __future__ import annotations

import importlib
import io
import json
import math
import struct

import numpy as np
import pytest
from rich.console import Console

from healcore.demo import corpus
from healcore.demo.history import ARMS, History
from healcore.demo.main import main
from healcore.demo.run import run_demo
from healcore.demo.scenario import Scenario

TINY = {"batch": 4, "context": 16, "layers": 1, "width": 16, "heads": 2}
FRAMEWORKS = ("torch", "jax")

# Goes back at the first NaN.
GOES_BACK = """
schema = 1
name = "goes-back"

[clip]
kind = "none"

[detect.nonfinite]

[[respond]]
to = ["nonfinite"]
do = ["skip", "rollback", "cut_lr"]
"""


@pytest.fixture(scope="module")
def text():
    return corpus.load()


def _train(framework: str, scenario: Scenario, arm: str, policy: object = "default") -> History:
    loop = importlib.import_module(f"healcore.{framework}.demo.training")
    history = History(framework, arm, scenario.seed)
    for _ in loop.train(scenario, history, policy):
        pass
    return history


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    printed = io.StringIO()
    console = Console(file=printed, width=80)
    status = run_demo(steps=40, out=out, console=console, **TINY)
    return status, out, printed.getvalue()


def test_forty_tiny_steps_are_not_called_trained(demo):
    status, _, printed = demo
    assert status == 1
    for framework in FRAMEWORKS:
        assert f"the healed {framework} run of seed 0 did not train" in printed.replace("\n", " ")


def test_the_table_has_a_row_per_run(demo):
    _, _, printed = demo
    rows = [line.split() for line in printed.splitlines() if "roll" not in line]
    for framework in FRAMEWORKS:
        for arm in ARMS:
            assert any(row[: 1 + len(arm.split())] == [framework, *arm.split()] for row in rows)


def test_the_picture_is_a_png_of_some_size(demo):
    _, out, _ = demo
    png = (out / "curves.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert width > 1500
    assert height > 1000


def test_the_events_are_json_lines(demo):
    _, out, _ = demo
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert lines[0]["type"] == "start"
    assert lines[0]["policy"] == "default"
    empty = lines[0]["empty"]
    results = [line for line in lines if line["type"] == "result"]
    assert len(results) == 6
    for framework in FRAMEWORKS:
        (skip,) = [
            line
            for line in lines
            if line["type"] == "step"
            and line["framework"] == framework
            and line["run"] == "healed"
            and line["step"] == empty
        ]
        assert skip["skip"]
        assert skip["loss"] is None
        assert skip["cause"] == ["NONFINITE_LOSS", "NONFINITE_GRAD"]
        (dead,) = [
            line
            for line in lines
            if line["type"] == "step"
            and line["framework"] == framework
            and line["run"] == "unprotected"
        ]
        assert dead["step"] == empty  # once, though every later step is NaN too


def test_nan_is_for_ever_without_healing_and_one_step_with_it(text):
    scenario = Scenario(text, steps=40, **TINY)
    for framework in FRAMEWORKS:
        plain = _train(framework, scenario, "unprotected").column("loss")
        healed = _train(framework, scenario, "healed").column("loss")
        empty = scenario.empty_step
        assert np.isfinite(plain[:empty]).all()
        assert np.isnan(plain[empty:]).all()
        assert np.isnan(healed[empty])
        assert np.isfinite(np.delete(healed, empty)).all()


def test_both_frameworks_train_the_same_model_on_the_same_data(text):
    scenario = Scenario(text, steps=30, mistake=1.0)
    losses, norms = [], []
    for framework in FRAMEWORKS:
        loop = importlib.import_module(f"healcore.{framework}.demo.training")
        history = History(framework, "healed")
        for done in loop.train(scenario, history, "default"):
            if done == 5:
                break
        losses.append(history.column("loss"))
        norms.append(history.column("grad_norm"))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-3)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_observing_changes_nothing(text, framework):
    scenario = Scenario(text, steps=30, **TINY)
    plain = _train(framework, scenario, "unprotected").column("loss")
    observed = _train(framework, scenario, "healed", "observe").column("loss")
    np.testing.assert_array_equal(plain, observed)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_rollback_is_obeyed(text, framework, tmp_path):
    path = tmp_path / "goes-back.toml"
    path.write_text(GOES_BACK)
    scenario = Scenario(text, steps=60, **TINY)
    history = _train(framework, scenario, "healed", str(path))
    # The NaN is at 48; it is read a step later; 20 is the last copy with 20 calm steps after it.
    assert history.rollbacks == [(49, 20)]
    assert math.isfinite(history.held_out_loss)
    assert history.steps[47].lr_scale == 1.0
    assert history.steps[50].lr_scale < 1.0  # the cut survives the way back


def test_a_policy_that_is_none_exits_with_2(capsys, tmp_path):
    assert main(["--policy", "no-such-policy", "--out", str(tmp_path)]) == 2
    assert "no-such-policy" in capsys.readouterr().err


def test_too_few_steps_exit_with_2(capsys, tmp_path):
    assert main(["--steps", "5", "--out", str(tmp_path)]) == 2
    assert "at least 30" in capsys.readouterr().err
