"""The demo end to end, small: real training in both frameworks, table, picture and events."""

from __future__ import annotations

import importlib
import io
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from rich.console import Console

from healcore.demo import corpus
from healcore.demo.acts import ranges
from healcore.demo.history import ARMS, History
from healcore.demo.main import main
from healcore.demo.run import Result, run_demo
from healcore.demo.scenario import Scenario
from healcore.runtime import events
from healcore.runtime.events.schema import problems
from healcore.runtime.postmortem import postmortem

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


def _train(framework: str, scenario: Scenario, policy: str, folder: Path) -> History:
    """A whole healed run."""
    loop = importlib.import_module(f"healcore.{framework}.demo.training")
    history = History(framework, "healed", scenario.seed)
    for _ in loop.train(scenario, history, policy, folder):
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


def test_forty_tiny_steps_are_not_called_trained_nor_saved(demo):
    printed = demo.printed.replace("\n", " ")
    for framework in FRAMEWORKS:
        which = f"the healed {framework} run of seed 0"
        for what in ("did not train", "did not go back"):
            assert f"{which} {what}" in printed
            assert any(f"{which} {what}" in sentence for sentence in demo.result.broken)


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


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_events_and_the_postmortem_are_the_healers(demo, text, framework):
    folder = demo.out / f"{framework}-healed-seed0"
    history = events.read(folder / "events.jsonl")
    assert history.problems == []
    assert [each for event in history.events for each in problems(event)] == []
    empty = Scenario(text, steps=STEPS, **TINY).empty
    (alarm,) = [one for one in history.events if one["kind"] == "alarm" and one["step"] == empty]
    assert alarm["skip"]
    assert alarm["cause"] == ["NONFINITE_LOSS", "NONFINITE_GRAD"]
    assert alarm["batches"] == [[0, empty]]
    (found,) = folder.glob("events.postmortem.*.json")
    assert postmortem.read(found)["ending"] == "completed"
    assert len(list((folder / "checkpoints").glob("step-*"))) > 1


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nan_is_for_ever_without_healing_and_one_step_with_it(demo, text, framework):
    empty = Scenario(text, steps=STEPS, **TINY).empty
    plain, healed = demo.loss(framework, "unprotected"), demo.loss(framework, "healed")
    assert np.isfinite(plain[:empty]).all()
    assert np.isnan(plain[empty:]).all()
    assert np.isnan(healed[empty])
    assert np.isfinite(np.delete(healed, empty)).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_observing_changes_nothing(demo, text, framework, tmp_path):
    observed = _train(framework, Scenario(text, steps=STEPS, **TINY), "observe", tmp_path)
    np.testing.assert_array_equal(observed.column("loss"), demo.loss(framework, "unprotected"))


def test_both_frameworks_train_the_same_model_on_the_same_data(text, tmp_path):
    scenario = Scenario(text, batch=4, context=32, layers=2, width=32)
    losses, norms = [], []
    for framework in FRAMEWORKS:
        loop = importlib.import_module(f"healcore.{framework}.demo.training")
        history = History(framework, "healed")
        for done in loop.train(scenario, history, "default", tmp_path / framework):
            if done == 5:
                break
        losses.append(history.column("loss"))
        norms.append(history.column("grad_norm"))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-3)


@pytest.fixture(scope="module")
def gone_back(tmp_path_factory):
    """A demo in which the policy goes back at the NaN."""
    out = tmp_path_factory.mktemp("gone-back")
    (out / "goes-back.toml").write_text(GOES_BACK)
    printed = io.StringIO()
    result = run_demo(
        arms=("unprotected", "healed"),
        steps=60,
        policy=out / "goes-back.toml",
        out=out,
        console=Console(file=printed, width=80),
        **TINY,
    )
    return Demo(result, out, printed.getvalue())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_rollback_goes_to_what_is_known_good_and_leaves_the_batch_out(gone_back, framework):
    (healed,) = [
        one
        for one in gone_back.result.histories
        if (one.framework, one.arm) == (framework, "healed")
    ]
    # The NaN is at 48; 20 is the last checkpoint with 20 healthy steps after it.
    (back,) = healed.rollbacks
    assert (back.onset, back.checkpoint, back.known_good) == (48, 20, True)
    assert (back.lr_scale_before, back.lr_scale) == (1.0, 0.5)
    assert back.batches[0] == 48
    assert healed.ending == "completed"
    first, second = healed.branches
    assert first[-1].step == back.step - 1
    assert second[0].step == 20
    assert {step.lr_scale for step in second} == {0.5}  # at once, and for the rest of the run
    assert not {step.batch for step in second} & {*back.batches}
    assert np.isfinite([step.loss for step in healed.kept]).all()
    # The same batches from the same state: what is undone is taken again, bit by bit, but slower.
    assert second[0].loss == first[20].loss
    assert second[0].batch == first[20].batch


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_rollback_is_told_while_it_happens_and_in_the_third_act(gone_back, framework):
    lines = gone_back.printed.splitlines()
    assert any(line.startswith(f"{framework}: step 48: nonfinite loss") for line in lines)
    third = lines[next(i for i, line in enumerate(lines) if line.startswith("Act 3")) :]
    row = next(line.split() for line in third if line.split()[:1] == [framework])
    assert row[1] == "48"
    assert row[3:5] == ["step", "20"]
    assert row[-1].startswith("48")


def test_a_policy_that_stops_the_run_is_told(tmp_path):
    path = tmp_path / "stops.toml"
    path.write_text(GOES_BACK.replace('"rollback", "cut_lr"', '"stop"'))
    result = run_demo(
        frameworks=("torch",),
        arms=("healed",),
        steps=30,
        policy=path,
        out=tmp_path,
        console=Console(file=io.StringIO()),
        **TINY,
    )
    (healed,) = result.histories
    assert healed.stopped
    assert healed.steps[-1].step in (24, 25)  # the NaN is at 24, and read a step later
    (sentence,) = result.broken
    assert sentence.startswith("the healed torch run of seed 0 was stopped")


def test_ranges():
    assert ranges([112, 113, 114, 120]) == "112-114, 120"
    assert ranges([]) == "none"


def test_an_earlier_demo_makes_room(gone_back):
    folder = gone_back.out / "torch-healed-seed0"
    (folder / "of an earlier demo").touch()
    run_demo(
        frameworks=("torch",),
        arms=("healed",),
        steps=30,
        out=gone_back.out,
        console=Console(file=io.StringIO()),
        **TINY,
    )
    assert not (folder / "of an earlier demo").exists()
    assert (folder / "events.jsonl").exists()


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
