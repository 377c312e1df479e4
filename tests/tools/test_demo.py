"""The demo end to end, small: real training in both frameworks, table, picture, pages, events."""

from __future__ import annotations

import importlib
import io
import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from rich.console import Console

from healcore import events
from healcore.demo.runs import ARMS, DemoRun
from healcore.demo.scenario import Scenario, load_corpus
from healcore.runtime.postmortem import postmortem
from healcore.tools.demo import DemoResult, run_demo
from tests.events.sample_events import problems

STEPS = 40
TINY: dict[str, Any] = {"batch": 4, "context": 16, "layers": 2, "width": 16, "heads": 2}
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
    return load_corpus()


class Demo(NamedTuple):
    result: DemoResult
    out: Path
    printed: str

    def run(self, framework: str, arm: str) -> DemoRun:
        """One of its runs."""
        (run,) = [run for run in self.result.runs if (run.framework, run.arm) == (framework, arm)]
        return run

    def loss(self, framework: str, arm: str) -> np.ndarray:
        """Training losses of one of its runs."""
        return self.run(framework, arm).column("loss")

    def broken(self) -> list[str]:
        """The claims that the results break."""
        return [claim.text for claim in self.result.claims if not claim.holds]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    printed = io.StringIO()
    console = Console(file=printed, width=80)
    result = run_demo(steps=STEPS, out=out, console=console, **TINY)
    return Demo(result, out, printed.getvalue())


def test_forty_tiny_steps_are_not_called_trained_nor_saved(demo):
    for framework in FRAMEWORKS:
        for what in ("trains", "rolls back while the learning rate is wrong: never"):
            (claim,) = [text for text in demo.broken() if f"{framework} healed: {what}" in text]
            assert f"BROKEN {claim}\n" in demo.printed


def test_claims_that_hold_are_printed_too(demo):
    for framework in FRAMEWORKS:
        assert f"ok     {framework} healed: runs to its end: completed\n" in demo.printed


def test_the_table_has_a_row_per_run(demo):
    rows = [line.split() for line in demo.printed.splitlines()]
    for framework in FRAMEWORKS:
        for arm in ARMS:
            start = [framework, *arm.split()]
            # The bars begin the same way; the row ends with the outcome.
            assert any(row[: len(start)] == start and row[-1] == "failed" for row in rows)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_table_has_the_numbers_of_the_run(demo, framework):
    rows = [line.split() for line in demo.printed.splitlines()]
    clipped = (demo.run(framework, "fixed clip").column("grad_norm") > 1).sum()
    (row,) = [row for row in rows if row[:3] == [framework, "fixed", "clip"] and len(row) == 8]
    assert row[4:7] == ["NaN", "0", str(clipped)]
    (row,) = [row for row in rows if row[:2] == [framework, "healed"] and row[-1] == "failed"]
    assert row[4] == "1"  # skips: the empty batch


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_healed_run_has_its_report(demo, framework):
    path = demo.out / f"{framework}-healed-seed0" / "events.report.html"
    assert f"page: {path}\n" in demo.printed
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert f"{framework}-healed-seed0/events.jsonl" in page
    assert "step skipped" in page or "steps skipped" in page


def test_the_picture_is_a_png_of_some_size(demo):
    png = (demo.out / "curves.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert width > 1400
    assert height > 1000
    assert f"picture: {demo.out / 'curves.png'}\n" in demo.printed


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_events_and_the_postmortem_are_the_healers(demo, text, framework):
    folder = demo.out / f"{framework}-healed-seed0"
    history = events.read(folder / "events.jsonl")
    assert history.problems == []
    assert [each for event in history.events for each in problems(event)] == []
    empty = Scenario(text, steps=STEPS, **TINY).empty_batch
    (alarm,) = [one for one in history.events if one["kind"] == "alarm" and one["step"] == empty]
    assert alarm["skip"]
    assert alarm["cause"] == ["NONFINITE_LOSS", "NONFINITE_GRAD"]
    assert alarm["batches"] == [[0, empty]]
    (found,) = folder.glob("events.postmortem.*.json")
    assert postmortem.read(found)["ending"] == "completed"
    assert len(list((folder / "checkpoints").glob("step-*"))) > 1


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nan_is_for_ever_without_healing_and_one_step_with_it(demo, text, framework):
    empty = Scenario(text, steps=STEPS, **TINY).empty_batch
    plain, healed = demo.loss(framework, "unprotected"), demo.loss(framework, "healed")
    assert np.isfinite(plain[:empty]).all()
    assert np.isnan(plain[empty:]).all()
    assert np.isnan(healed[empty])
    assert np.isfinite(np.delete(healed, empty)).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_observing_changes_nothing(demo, text, framework, tmp_path):
    policy = tmp_path / "observe.toml"
    policy.write_text(GOES_BACK.replace("[clip]", 'mode = "observe"\n[clip]'))
    loop = importlib.import_module(f"healcore.{framework}.demo")
    observed = DemoRun(framework, "healed", 0)
    scenario = Scenario(text, steps=STEPS, **TINY)
    observed.steps.extend(loop.train(scenario, "healed", policy, tmp_path / "run"))
    np.testing.assert_array_equal(observed.column("loss"), demo.loss(framework, "unprotected"))


def test_both_frameworks_train_the_same_model_on_the_same_data(demo):
    one, other = (demo.run(name, "healed") for name in FRAMEWORKS)
    for column, rtol in (("loss", 1e-4), ("grad_norm", 1e-3)):
        np.testing.assert_allclose(one.column(column)[:5], other.column(column)[:5], rtol=rtol)


@pytest.fixture(scope="module")
def gone_back(tmp_path_factory):
    """A demo in which the policy goes back at the NaN."""
    out = tmp_path_factory.mktemp("gone-back")
    (out / "goes-back.toml").write_text(GOES_BACK)
    printed = io.StringIO()
    result = run_demo(
        arms=("healed",),
        steps=60,
        policy=out / "goes-back.toml",
        out=out,
        console=Console(file=printed, width=80),
        **TINY,
    )
    return Demo(result, out, printed.getvalue())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_rollback_goes_to_what_is_known_good_and_leaves_the_batch_out(gone_back, framework):
    healed = gone_back.run(framework, "healed")
    # The NaN is at 48; 20 is the last checkpoint with 20 healthy steps after it.
    (back,) = healed.rollbacks
    assert (back["onset"], back["checkpoint"], back["initial"]) == (48, 20, False)
    assert (back["lr_scale_before"], back["lr_scale"]) == (1.0, 0.5)
    left_out = [index for _, index in back["batches"]]
    assert left_out[0] == 48
    assert healed.ending == "completed"
    begin = next(i for i in range(1, len(healed.steps)) if healed.steps[i].step == 20 != i)
    first, second = healed.steps[:begin], healed.steps[begin:]
    assert [step.step for step in first] == list(range(back["step"]))
    assert [step.step for step in second] == list(range(20, 20 + len(second)))
    assert not {step.batch for step in second} & {*left_out}
    assert np.isfinite([step.loss for step in [*first[:20], *second]]).all()
    # The same batches from the same state: what is undone is taken again, bit by bit, but slower.
    assert second[0].loss == first[20].loss
    assert second[0].batch == first[20].batch
    lines = (healed.folder / "events.metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert [line["step"] for line in metrics[-len(second) :]] == [step.step for step in second]
    scales = {line["lr_scale"] for line in metrics[-len(second) :]}
    assert scales == {0.5}  # at once, and for the rest of the run


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_rollback_is_printed_while_it_happens_and_in_the_table(gone_back, framework):
    lines = gone_back.printed.splitlines()
    assert any(line.startswith(f"{framework}: step 48: nonfinite loss") for line in lines)
    rows = [" ".join(line.split()) for line in lines]
    assert any(row.startswith(f"{framework} healed") and "48 → 20 × 0.5" in row for row in rows)


def test_a_policy_that_stops_the_run_is_reported(tmp_path):
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
    (healed,) = result.runs
    assert healed.ending == "stopped"
    assert healed.steps[-1].step in (24, 25)  # the NaN is at 24, and read a step later
    assert "torch healed: runs to its end: stopped" in [
        claim.text for claim in result.claims if not claim.holds
    ]


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
