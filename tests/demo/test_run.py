"""The demo end to end, small: real training in both frameworks, table, picture and events."""

from __future__ import annotations

import importlib
import io
import json
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from rich.console import Console

from healcore.demo import corpus
from healcore.demo.history import ARMS, History
from healcore.demo.main import main
from healcore.demo.run import Result, run_demo
from healcore.demo.scenario import Scenario

STEPS = 40
TINY: dict[str, Any] = {"batch": 4, "context": 16, "layers": 1, "width": 16, "heads": 2}
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


class Demo(NamedTuple):
    result: Result
    out: Path
    printed: str

    def loss(self, framework: str, arm: str) -> np.ndarray:
        """Training losses of one of its runs."""
        (history,) = [
            one for one in self.result.histories if (one.framework, one.arm) == (framework, arm)
        ]
        return history.column("loss")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    printed = io.StringIO()
    console = Console(file=printed, width=80)
    result = run_demo(steps=STEPS, out=out, console=console, **TINY)
    return Demo(result, out, printed.getvalue())


def test_forty_tiny_steps_are_not_called_trained(demo):
    assert len(demo.result.broken) == 2
    printed = demo.printed.replace("\n", " ")
    for framework in FRAMEWORKS:
        assert f"the healed {framework} run of seed 0 did not train" in printed


def test_the_table_has_a_row_per_run(demo):
    rows = [line.split() for line in demo.printed.splitlines()]
    for framework in FRAMEWORKS:
        for arm in ARMS:
            start = [framework, *arm.split()]
            # The bars begin the same way; the row ends with the verdict.
            assert any(row[: len(start)] == start and "failed" in row for row in rows)


def test_the_picture_is_a_png_of_some_size(demo):
    png = (demo.out / "curves.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert width > 1500
    assert height > 1000


def test_the_events_are_json_lines(demo):
    lines = [json.loads(line) for line in (demo.out / "events.jsonl").read_text().splitlines()]
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


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nan_is_for_ever_without_healing_and_one_step_with_it(demo, text, framework):
    empty = Scenario(text, steps=STEPS, **TINY).empty_step
    plain, healed = demo.loss(framework, "unprotected"), demo.loss(framework, "healed")
    assert np.isfinite(plain[:empty]).all()
    assert np.isnan(plain[empty:]).all()
    assert np.isnan(healed[empty])
    assert np.isfinite(np.delete(healed, empty)).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_observing_changes_nothing(demo, text, framework):
    observed = _train(framework, Scenario(text, steps=STEPS, **TINY), "healed", "observe")
    np.testing.assert_array_equal(observed.column("loss"), demo.loss(framework, "unprotected"))


def test_both_frameworks_train_the_same_model_on_the_same_data(text):
    scenario = Scenario(text, batch=4, context=32, layers=2, width=32)
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


@pytest.mark.parametrize(
    "wrong", [["--seeds", "0"], ["--seed", "-1"], ["--seed", "1", "--seeds", "2"]]
)
def test_seeds_that_are_none_exit_with_2(wrong):
    with pytest.raises(SystemExit, match="2"):
        main(wrong)
