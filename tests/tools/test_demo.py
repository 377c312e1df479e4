"""The demo end to end, small: real training in both frameworks, table, picture, pages, events."""

import io
import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from rich.console import Console

from healcore import events
from healcore.demo_runs import MIN_STEPS, DemoError, Scenario, load_corpus
from healcore.runtime.reporting import postmortem
from healcore.tools.cli import _new_folder
from healcore.tools.demo import DemoRun, run_demo
from healcore.tools.demo_process import FrameworkProcess
from tests.events.sample_events import problems

pytestmark = pytest.mark.slow  # about our own demo

STEPS = 40
TINY: dict[str, Any] = {"batch": 4, "context": 16, "layers": 2, "width": 16, "heads": 2}
FRAMEWORKS = ("torch", "jax")
SCENARIO = Scenario(load_corpus())
SHORT = Scenario(SCENARIO.corpus, steps=STEPS)
EMPTY = SHORT.empty_batch


class Demo(NamedTuple):
    runs: list[DemoRun]
    out: Path
    printed: str

    def run(self, framework: str, arm: str) -> DemoRun:
        (run,) = [run for run in self.runs if (run.framework, run.arm) == (framework, arm)]
        return run

    def column(self, framework: str, arm: str, name: str = "loss") -> np.ndarray:
        return np.asarray([getattr(step, name) for step in self.run(framework, arm).steps])


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "new"
    printed = io.StringIO()
    runs = run_demo(out, steps=STEPS, console=Console(file=printed, width=80), **TINY)
    return Demo(runs, out, printed.getvalue())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_table_has_the_numbers_of_each_run(demo, framework):
    rows = [line.split() for line in demo.printed.splitlines() if "━" not in line]
    clipped = (demo.column(framework, "fixed clip", "grad_norm") > 1).sum()
    (row,) = [row for row in rows if row[:3] == [framework, "fixed", "clip"] and len(row) == 7]
    assert row[4:] == ["NaN", "0", str(clipped)]
    (row,) = [row for row in rows if row[:2] == [framework, "healed"] and len(row) == 6]
    assert row[4] == "1"  # skips: the empty batch


def test_nan_is_for_ever_without_healing_and_one_step_with_it_in_both_frameworks(demo):
    for framework in FRAMEWORKS:
        plain, healed = (demo.column(framework, arm) for arm in ("unprotected", "healed"))
        assert np.isfinite(plain).tolist() == [step < EMPTY for step in range(STEPS)]
        assert np.isfinite(healed).tolist() == [step != EMPTY for step in range(STEPS)]
    for column, rtol in (("loss", 1e-4), ("grad_norm", 1e-3)):
        one, other = (demo.column(name, "healed", column)[:5] for name in FRAMEWORKS)
        np.testing.assert_allclose(one, other, rtol=rtol)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_events_and_the_postmortem_are_the_healers(demo, framework):
    folder = demo.out / f"{framework}-healed"
    history = events.read(folder / "events.jsonl")
    assert history.problems == []
    assert [each for event in history.events for each in problems(event)] == []
    (alarm,) = [one for one in history.events if one["kind"] == "alarm" and one["step"] == EMPTY]
    seen = (alarm["skip"], alarm["cause"], alarm["batches"])
    assert seen == (True, ["NONFINITE_LOSS", "NONFINITE_GRAD"], [[0, EMPTY]])
    (found,) = folder.glob("events.postmortem.*.json")
    assert postmortem.read(found)["ending"] == "completed"
    assert len(list((folder / "checkpoints").glob("step-*"))) > 1
    curves, rate = demo.run(framework, "healed").report.curves, SHORT.learning_rate
    np.testing.assert_allclose(curves.lr, [*map(rate, curves.step)], rtol=1e-6)
    assert "<svg" in (folder / "events.report.html").read_text()


def test_the_last_lines_name_the_pages_to_open(demo):
    *_, ask, torch_page, jax_page, rest = demo.printed.splitlines()
    assert ask == "open the report of a healed run in a browser:"
    pages = [Path(line.strip()) for line in (torch_page, jax_page)]
    assert [page.parent.name for page in pages] == ["torch-healed", "jax-healed"]
    assert all(page.is_absolute() and page.is_file() for page in pages)
    assert rest == f"events and checkpoints: {demo.out}"


def test_a_second_demo_takes_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _new_folder("healcore-demo") == Path("healcore-demo")
    Path("healcore-demo").mkdir()
    Path("healcore-demo-2").touch()
    assert _new_folder("healcore-demo") == Path("healcore-demo-3")
    with pytest.raises(DemoError, match="or leave out --out"):
        run_demo(Path("healcore-demo"), steps=STEPS, **TINY)


def test_a_process_that_cannot_train_says_why(tmp_path):
    with (
        FrameworkProcess("torch", tmp_path, MIN_STEPS - 1, TINY) as process,
        pytest.raises(DemoError, match="runs in torch failed: steps must be at least 30"),
    ):
        process.follow(print)
    with (
        FrameworkProcess("torch", tmp_path, STEPS, {"heads": 5}) as process,
        pytest.raises(DemoError, match=r"runs in torch failed: Traceback[^$]*Error"),
    ):
        process.follow(lambda step: None)


def test_a_process_that_is_killed_ends_the_demo(tmp_path):
    with (
        FrameworkProcess("torch", tmp_path, STEPS, TINY) as process,
        pytest.raises(DemoError, match="ended with status -9"),
    ):
        process.follow(lambda step: os.kill(process.pid, signal.SIGKILL))


def test_a_batch_and_a_learning_rate_depend_on_the_step_alone():
    again = Scenario(SCENARIO.corpus)
    for step in range(SCENARIO.steps):
        tokens, weights = SCENARIO.training_batch(step)
        assert (tokens.shape, tokens.dtype) == ((16, 65), np.int32)
        assert np.array_equal(tokens, again.training_batch(step).tokens)
        # Nearly all of the text is ASCII, and half of the random bytes are not.
        assert ((tokens >= 128).mean() > 0.3) == (step in SCENARIO.corrupted_batches)
        assert (weights.sum() == 0) == (step == SCENARIO.empty_batch)
    meant = Scenario(SCENARIO.corpus, lr_factor=1.0)
    factors = [SCENARIO.learning_rate(step) / meant.learning_rate(step) for step in range(300)]
    assert [round(factor) for factor in factors] == [
        16 if step in SCENARIO.wrong_lr_steps else 1 for step in range(300)
    ]
