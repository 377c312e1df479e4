"""healbench: its statistics, failing runs and output. Workers import the fakes of this file."""

import contextlib
import functools
import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.healbench import __main__ as command
from benchmarks.healbench import comparing, running, summary, table
from benchmarks.healbench.comparing import compare, difference, rules
from benchmarks.healbench.running import Job, Result, read_results, run_all, write_results
from benchmarks.healbench.training import Counts

NAN, INF = math.nan, math.inf
BEGIN, END = table.BEGIN.format("healbench"), table.END.format("healbench")


class FakeProblem:
    """Its metric is 1 and a little noise of the seed, and whatever the arm adds."""

    def __init__(self, seed: int) -> None:
        self.batches = range(10)
        self.metric = 1 + 0.01 * seed

    def evaluate(self) -> float:
        return self.metric


class FakeRun(contextlib.AbstractContextManager):
    def __init__(self, problem: FakeProblem, does: str = "") -> None:
        if does == "unavailable":
            raise Unavailable("no such package")
        self.problem, self.does = problem, does
        self.steps = 4 if does == "stop" else 10
        self.counts = Counts()

    def __exit__(self, *_: object) -> None:
        pass

    def train(self) -> None:
        if self.does == "raise":
            raise ValueError("no way")
        if self.does == "die" and not DIED.exists():
            DIED.touch()
            os._exit(3)
        if self.does == "hang":
            time.sleep(600)
        self.counts.stopped = "enough" if self.does == "stop" else ""
        self.problem.metric += NAN if self.does == "nan" else 0.0

    def weights(self) -> Iterator[bytes]:
        yield self.does.encode()


class Unavailable(Exception):
    pass


DIED = Path(tempfile.gettempdir()) / f"healbench-test-{os.environ.get('PYTEST_XDIST_TESTRUNUID')}"
"""Exists once the arm `die` has ended its process: workers inherit the environment."""


def healthy_task(name: str, *, quick: bool) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        kind="healthy",
        family="plain",
        reference="",
        quick=quick,
        metric="loss",
        build=FakeProblem,
        about=f"The task {name}.",
    )


def faulty_task(name: str, *, reference: str) -> SimpleNamespace:
    task = healthy_task(name, quick=True)
    task.kind, task.family, task.reference = "faulty", "fault", reference
    return task


TASKS = {
    "well": healthy_task("well", quick=False),
    "fine": healthy_task("fine", quick=True),
    "ill": faulty_task("ill", reference="well"),
}
DOES = ("raise", "die", "hang", "nan", "stop", "unavailable")
ARMS: dict[str, Any] = {
    **dict.fromkeys(("nothing", *comparing.OURS), FakeRun),
    "stop": functools.partial(FakeRun, does="stop"),
}


def run_fake(job: Job) -> Result:
    """In a worker process, which does not see the fixture below."""
    running.FRAMEWORKS["jax"] = (__name__, __name__)
    ARMS.update({does: functools.partial(FakeRun, does=does) for does in DOES})
    return running.run_one(job)


@pytest.fixture
def fakes(monkeypatch):
    """The command, with the fakes in place of the real tasks and arms."""
    running.suite.cache_clear()
    monkeypatch.setattr(running, "FRAMEWORKS", {"jax": (__name__, __name__)})
    monkeypatch.setattr(command, "FRAMEWORKS", {"jax": ()})
    monkeypatch.setattr(command, "run_all", functools.partial(run_all, run=run_fake))
    yield
    running.suite.cache_clear()


def results_of(arms: dict[str, list[float]], task: str = "fine", **more: Any) -> list[Result]:
    """A result for each metric, by arm."""
    fields: dict[str, Any] = {"steps": 1000, "cpu_s": 2.0, **more}
    results = []
    for arm, metrics in arms.items():
        for seed, metric in enumerate(metrics):
            number: dict[str, Any] = {"metric": metric, "metric_text": ""}
            if not math.isfinite(metric):
                number = {"metric": None, "metric_text": str(metric)}
            results.append(Result("jax", task, arm, seed, **number, **fields))
    return results


def by_seed(*metrics: float) -> dict[int, float]:
    return dict(enumerate(metrics))


KEYED = {("jax", name): task for name, task in TASKS.items()}


def test_the_difference_and_its_error_are_those_of_scipy():
    from scipy import stats  # here: workers import this file, and need no half a second for that

    rng = np.random.default_rng(0)
    for shift, seeds in ((-0.3, 2), (0.0, 3), (0.02, 5), (5.0, 8)):
        off = rng.normal(2.0, 0.5, seeds)
        on = off + shift + rng.normal(0, 0.1, seeds)
        found = difference(by_seed(*on), by_seed(*off))
        assert found.percent == pytest.approx(100 * np.mean(on - off) / off.mean())
        assert found.error == pytest.approx(100 * stats.sem(on - off) / off.mean())


@pytest.mark.parametrize(
    ("on", "worse"),
    [
        pytest.param((101.2, 101.2, 101.2), True, id="1.2 % without any noise"),
        pytest.param((100.9, 100.9, 100.9), False, id="0.9 % better"),
        pytest.param((103.0, 99.0, 101.2), False, id="1.07 %, standard error 1.2 %"),
        pytest.param((109.0, 97.0, 101.0), True, id="2.3 %, whatever the noise"),
    ],
)
def test_worse_is_beyond_two_standard_errors_or_beyond_the_margin(on, worse):
    assert difference(by_seed(*on), by_seed(100, 100, 100)).worse == worse
    below_zero = np.array([-17.0, -16.0, -15.0])  # the unit is the spread over seeds: 2 % are 0.2
    assert difference(by_seed(*(below_zero + 0.19)), by_seed(*below_zero)).percent < 2
    assert difference(by_seed(*(below_zero + 0.21)), by_seed(*below_zero)).worse


def test_a_metric_that_is_not_finite_is_infinitely_bad():
    one_nan = difference(by_seed(1.0, NAN, 1.0), by_seed(1.1, 1.1, 1.1))
    assert (one_nan.percent, one_nan.worse) == (INF, True)
    cured = difference(by_seed(1.0, 1.0, 1.0), by_seed(1.0, INF, NAN))
    assert (cured.better, cured.worse) == (True, False)
    all_lost = difference(by_seed(NAN, NAN), by_seed(INF, NAN))
    assert (math.isnan(all_lost.percent), all_lost.worse) == (True, False)


@pytest.mark.parametrize(
    ("metrics", "more", "said"),
    [
        pytest.param([1.1, 1.2], {}, ["no healthy task is worse"], id="worse metric"),
        pytest.param(
            [1.0, 1.1],
            {"lr_scale": 0.25},
            ["no healthy run ends at a learning rate"],
            id="lower rate",
        ),
        pytest.param([1.0, 1.1], {"rollbacks": 1}, ["at most 1 of 200"], id="rolled back"),
        pytest.param(
            [1.0, 1.13],
            {"rollbacks": 1},
            ["at most 1 of 200", "no healthy run that is rolled"],
            id="rolled back and worse",
        ),
        pytest.param(
            [1.0, 1.1], {"stopped": "enough"}, ["no healthy run is stopped"], id="stopped"
        ),
        pytest.param(
            [1.0, 1.1], {"status": "error", "error": "why"}, ["every run ends"], id="failed"
        ),
    ],
)
def test_each_part_of_the_promise_can_be_broken(metrics, more, said):
    # Of the noise of `metrics` alone, the second seed 3 % worse is within the promise.
    plain = results_of({"nothing": [1.0, 1.1]})
    cells = compare(plain + results_of({"healer": metrics}, **more), KEYED)
    found = {rule.text: rule.broken for rule in rules(cells) if rule.broken}
    assert [any(text.startswith(each) for text in found) for each in said] == [True] * len(said)
    assert len(found) == len(said)
    for wheres in found.values():
        assert all(where.startswith("fine (jax) healer: ") for where in wheres)


@pytest.mark.slow
def test_no_run_stops_the_rest():
    jobs = [Job("jax", "fine", arm, 1) for arm in (*DOES, "nothing", "healer")]
    DIED.unlink(missing_ok=True)
    try:
        found = {each.arm: each for each in run_all(jobs, workers=2, limit=3.0, run=run_fake)}
    finally:
        DIED.unlink(missing_ok=True)
    assert {arm: result.status for arm, result in found.items()} == {
        **dict.fromkeys(("raise", "hang"), "error"),
        **dict.fromkeys(("die", "nan", "stop", "nothing", "healer"), "done"),
        "unavailable": "unavailable",
    }
    errors = ("ValueError: no way", "TimeoutError: longer than 3 s")
    assert tuple(found[arm].error for arm in ("raise", "hang")) == errors
    assert (found["nan"].metric, found["nan"].metric_text) == (None, "nan")
    assert (found["stop"].stopped, found["stop"].steps) == ("enough", 4)
    assert (found["nothing"].metric, found["nothing"].steps) == (1.01, 10)
    assert found["nothing"].weights == found["healer"].weights != found["stop"].weights


@pytest.mark.slow
def test_a_real_run_and_the_first_rollback_of_its_damage():
    import torch

    threads = torch.get_num_threads()
    try:
        found = running.run_one(Job("torch", "layer_50x", "healer_ask", 0))
    finally:
        torch.set_num_threads(threads)
    assert found.status == "done"
    of = found.evidence
    there = running.suite("torch")
    assert {comparing.OFF, *comparing.OURS, *summary.PEERS} == there.arms.keys()
    assert of["steps"] == found.steps > of["later_steps"]
    assert of["fault"] == there.tasks["layer_50x"].build(0).fault
    assert of["target"] <= of["fault"] < of["rollback"]
    assert 0 < of["passes_to_rollback"] < of["passes"]


@pytest.mark.slow
def test_the_command_runs_everything_and_writes_file_and_page(tmp_path, fakes, capsys):
    page, file = tmp_path / "page.md", tmp_path / "results.jsonl"
    page.write_text("# By hand\n")
    options = ["--results", str(file), "--jobs", "1", "--page", str(page)]
    assert command.main(options) == 0
    # Two healthy tasks with two seeds and a faulty one with three, the undamaged run's third seed,
    # and the peers.
    assert "32 runs, 1 at a time" in capsys.readouterr().out
    text = page.read_text()
    assert text.startswith("# By hand\n")
    assert text.count(BEGIN) == text.count(END) == 1
    assert "\n`ill (jax)`,fault,loss,1.01 (× 1)," in page.with_suffix(".csv").read_text()
    results = results_of({"healer": [1.5, 1.6], "nothing": [1.0, 1.1], "stop": [NAN, INF, -INF]})
    write_results(file, reversed(results))
    assert read_results(file) == results
    assert command.main([*options, "--report"]) == 1, "a broken promise"
    assert "fine (jax) healer: +48 ± 0.0 %" in capsys.readouterr().out
