"""healbench: its statistics, its runs that fail, what it keeps and what it writes.

The tasks and arms are fakes without a framework, in this file: workers import them by name.
"""

from __future__ import annotations

import functools
import json
import math
import os
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.healbench import __main__ as command
from benchmarks.healbench import comparing, figure, running, table
from benchmarks.healbench.comparing import Verdict, compare, difference, rules
from benchmarks.healbench.running import Job, Result, Store, run_all

NAN, INF = math.nan, math.inf


# -- fakes -----------------------------------------------------------------------------------------


class FakeProblem:
    """Its metric is 1 and a little noise of the seed, and whatever the arm adds."""

    def __init__(self, seed: int) -> None:
        self.batches = range(10)
        self.metric = 1 + 0.01 * seed

    def evaluate(self) -> float:
        return self.metric


class FakeRun:
    """Does what its `does` argument names."""

    def __init__(self, problem: FakeProblem, does: str = "", policy: str = "default") -> None:
        if does == "unavailable":
            raise Unavailable("no such package")
        self.problem, self.does = problem, does
        self.steps, self.counts = 0, SimpleNamespace(**dict.fromkeys(COUNTS, 0), stopped="")

    def __enter__(self) -> FakeRun:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def train(self) -> None:
        if self.does == "raise":
            raise ValueError("no way")
        if self.does == "die":
            os.write(2, b"last output")
            os._exit(3)
        if self.does == "hang":
            time.sleep(600)
        self.steps = 4 if self.does == "stop" else 10
        self.counts.stopped = "enough" if self.does == "stop" else ""
        if self.does == "nan":
            self.problem.metric = NAN
        if self.does == "worse":
            self.problem.metric += 0.5


class Unavailable(Exception):
    pass


def without_policy(problem: FakeProblem) -> FakeRun:
    return FakeRun(problem)


COUNTS = ("clips", "finite_skips", "nonfinite_skips", "lr_cuts", "rollbacks")
TASKS = {
    name: SimpleNamespace(
        name=name,
        kind=kind,
        metric="loss",
        build=FakeProblem,
        about=f"The task {name}.",
        reference=reference,
        quick=quick,
    )
    for name, kind, reference, quick in (
        ("well", "healthy", "", False),
        ("fine", "healthy", "", True),
        ("ill", "sick", "well", True),
    )
}
DOES = ("raise", "die", "hang", "nan", "stop", "unavailable")
ARMS: dict[str, Any] = {
    **dict.fromkeys(("nothing", "fixed_clip", "clip_skip_nan"), without_policy),
    **{does: functools.partial(FakeRun, does=does) for does in DOES},
    **dict.fromkeys(("attach_default", "healer"), FakeRun),
}


def run_fake(job: Job) -> Result:
    """In a worker process, which does not see the fixture below."""
    running.FRAMEWORKS["jax"] = (__name__, __name__)
    return running.run_one(job)


@pytest.fixture
def fakes(monkeypatch):
    """The command, with the fakes in place of the real tasks and arms."""
    caches = (running.suite, running.policy_of, running.source_of)
    for each in caches:
        each.cache_clear()
    monkeypatch.setattr(running, "FRAMEWORKS", {"jax": (__name__, __name__)})
    monkeypatch.setattr(command, "FRAMEWORKS", {"jax": ()})
    monkeypatch.setattr(command, "run_all", functools.partial(run_all, run=run_fake))
    yield
    for each in caches:
        each.cache_clear()


def results_of(arms: dict[str, list[float]], task: str = "fine", **more: Any) -> list[Result]:
    """A result for each metric, by arm."""
    return [
        Result(
            "jax",
            task,
            arm,
            seed,
            metric=metric if math.isfinite(metric) else None,
            metric_text="" if math.isfinite(metric) else str(metric),
            **{"steps": 1000, "wall_s": 2.0, **more},
        )
        for arm, metrics in arms.items()
        for seed, metric in enumerate(metrics)
    ]


def cells_of(results: list[Result]) -> dict[str, comparing.Cell]:
    """Cells by arm of the task that the results are of."""
    tasks = {("jax", name): task for name, task in TASKS.items()}
    return {cell.arm: cell for cell in compare(results, tasks)}


def by_seed(*metrics: float) -> dict[int, float]:
    return dict(enumerate(metrics))


# -- statistics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [2, 3, 5, 8])
def test_the_paired_test_and_the_interval_are_those_of_scipy(seeds):
    from scipy import stats  # here: workers import this file, and need no half a second for that

    rng = np.random.default_rng(seeds)
    for shift in (-0.3, 0.0, 0.02, 5.0):
        theirs = rng.normal(2.0, 0.5, seeds)
        ours = theirs + shift + rng.normal(0, 0.1, seeds)
        found = difference(by_seed(*ours), by_seed(*theirs))
        worse = stats.ttest_rel(ours, theirs, alternative="greater")
        better = stats.ttest_rel(ours, theirs, alternative="less")
        interval = stats.ttest_rel(ours, theirs).confidence_interval(0.98)
        assert found.percent == pytest.approx(100 * np.mean(ours - theirs) / theirs.mean())
        assert found.p_worse == pytest.approx(worse.pvalue)
        assert found.p_better == pytest.approx(better.pvalue)
        scale = 100 / theirs.mean()
        assert (found.low, found.high) == pytest.approx(tuple(scale * np.array(interval)))
        # The interval's ends agree with the one-sided tests.
        assert (found.low > 0) == (found.p_worse < 0.01)
        assert (found.high < 0) == (found.p_better < 0.01)


def test_by_hand():
    found = difference(by_seed(11, 12, 13), by_seed(10, 10, 10))
    # Differences 1, 2, 3: mean 2, deviation 1, t = 2 sqrt(3); the 99 % point of t(2) is 6.9646.
    assert found.percent == pytest.approx(20)
    assert found.high - found.percent == pytest.approx(10 * 6.964557 / math.sqrt(3))
    assert found.p_worse == pytest.approx(0.03709, abs=1e-5)
    assert found.worse  # by the margin, not by the test
    assert found.pairs == 3


def test_only_seeds_that_both_have_are_compared():
    found = difference({0: 1.0, 2: 3.0, 7: 5.0}, {0: 1.1, 7: 5.2, 9: 100.0})
    assert found.pairs == 2
    assert found.percent == pytest.approx(100 * -0.15 / 3.15)


def test_ties_are_no_evidence():
    same = difference(by_seed(0.3, 0.4, 0.5), by_seed(0.3, 0.4, 0.5))
    assert (same.percent, same.low, same.high, same.p_worse) == (0, 0, 0, 1)
    rounding = difference(by_seed(*(1 + 1e-8 * k for k in (9, 10, 11))), by_seed(1, 1, 1))
    assert not rounding.worse
    assert rounding.p_worse == 1


def test_a_difference_without_any_noise_is_certain():
    worse = difference(by_seed(1.5, 2.5, 3.5), by_seed(1, 2, 3))
    assert (worse.p_worse, worse.p_better) == (0, 1)
    assert worse.low == worse.high == worse.percent == 25
    small = difference(by_seed(101, 201), by_seed(100, 200))
    assert small.percent < 2
    assert small.worse


def test_one_seed_is_judged_by_the_margin_alone():
    assert not difference(by_seed(1.01), by_seed(1.0)).worse
    assert difference(by_seed(1.03), by_seed(1.0)).worse
    assert math.isnan(difference(by_seed(1.03), by_seed(1.0)).p_worse)


def test_lower_is_better_below_zero_too():
    vae = difference(by_seed(-8.4, -8.5), by_seed(-16.3, -16.2))
    assert vae.percent == pytest.approx(48, abs=0.1)
    assert vae.worse
    assert difference(by_seed(-20.0, -20.1), by_seed(-16.3, -16.2)).percent < 0


def test_a_metric_that_is_not_finite_is_infinitely_bad():
    one_nan = difference(by_seed(1.0, NAN, 1.0), by_seed(1.1, 1.1, 1.1))
    assert one_nan.percent == INF
    assert one_nan.worse
    assert not one_nan.better
    cured = difference(by_seed(1.0, 1.0, 1.0), by_seed(1.0, INF, NAN))
    assert cured.percent == -INF
    assert cured.better
    assert not cured.worse
    assert difference(by_seed(1.0, 1.0), by_seed(-INF, 1.0)).better  # no metric is that good
    assert difference(by_seed(1e9, NAN), by_seed(INF, 1e9)).percent != 0  # nothing left to compare


def test_as_many_that_are_not_finite_leave_the_rest_to_compare():
    partly = difference(by_seed(NAN, 1.2, 1.2), by_seed(1.0, 1.0, INF))
    assert partly.percent == pytest.approx(20)
    assert partly.pairs == 1
    all_lost = difference(by_seed(NAN, NAN), by_seed(INF, NAN))
    assert math.isnan(all_lost.percent)
    assert not all_lost.worse
    assert not all_lost.better


def test_huge_metrics_do_not_overflow():
    found = difference(by_seed(1e300, -1e300, 1e308), by_seed(1e308, 1e308, 1e308))
    assert not found.worse
    assert difference(by_seed(1e300, 1e305), by_seed(1.0, 1.0)).worse


def test_the_reference_is_the_better_of_two_and_a_nan_is_never_the_better():
    cells = cells_of(results_of({"nothing": [1, 2], "fixed_clip": [0.9, 1.9], "zclip": [1, 2.1]}))
    assert cells["zclip"].reference == "fixed_clip"
    assert cells["fixed_clip"].verdict == Verdict.REFERENCE
    assert cells["nothing"].worse
    cells = cells_of(results_of({"nothing": [0.1, NAN], "fixed_clip": [0.9, 1.9], "zclip": [1, 2]}))
    assert cells["zclip"].reference == "fixed_clip"
    assert cells["nothing"].verdict == Verdict.DIVERGED


def test_verdicts():
    noise = np.array([0, 0.01, -0.01, 0.02, -0.02])
    metrics = {
        "nothing": 1 + noise,
        "fixed_clip": 1.1 + noise,
        "same": 1.001 + noise[::-1],
        "slightly": 1.004 + noise + 0.1 * noise[::-1],
        "better": 0.9 + noise,
        "diverged": np.array([1, 1, 150, 1, 1]),
        "nan": np.array([1, 1, NAN, 1, 1]),
    }
    results = results_of({arm: list(map(float, each)) for arm, each in metrics.items()})
    results += results_of({"stopping": [1.0]}, stopped="enough", steps=3)
    results += results_of({"partly": [1.0, 1.0]})
    results.append(Result("jax", "fine", "partly", 2, status="timeout", error="longer"))
    results.append(Result("jax", "fine", "missing", 0, status="unavailable", error="not here"))
    found = {arm: cell.verdict for arm, cell in cells_of(results).items()}
    assert found == {
        "nothing": Verdict.REFERENCE,
        "fixed_clip": Verdict.WORSE,
        "same": Verdict.SAME,
        "slightly": Verdict.WORSE,
        "better": Verdict.BETTER,
        "diverged": Verdict.DIVERGED,
        "nan": Verdict.DIVERGED,
        "stopping": Verdict.STOPPED,
        "partly": Verdict.FAILED,
        "missing": Verdict.UNAVAILABLE,
    }
    worse = {arm for arm, cell in cells_of(results).items() if cell.worse}
    assert worse == {"fixed_clip", "slightly", "diverged", "nan", "partly"}


def test_without_a_reference_there_is_no_difference():
    cell = cells_of(results_of({"healer": [1.0, 2.0]}))["healer"]
    assert cell.verdict == Verdict.ALONE
    assert not cell.worse


def test_the_gap_of_a_sick_task_is_to_the_run_without_the_fault():
    results = results_of({"fixed_clip": [1.0, 2.0]}, "well")
    results += results_of({"clip_skip_nan": [2.0, 4.0], "healer": [1.5, 1.8]}, "ill")
    tasks = {("jax", "ill"): TASKS["ill"]}
    cells = {cell.arm: cell for cell in compare(results, tasks)}
    assert set(cells) == {"clip_skip_nan", "healer"}
    assert cells["healer"].gap == pytest.approx(10)
    assert cells["clip_skip_nan"].gap == pytest.approx(100)


# -- rules -----------------------------------------------------------------------------------------


def broken(results: list[Result]) -> dict[str, tuple[str, ...]]:
    tasks = {("jax", name): task for name, task in TASKS.items()}
    return {rule.text: rule.broken for rule in rules(compare(results, tasks)) if rule.broken}


def test_rules_hold_where_nothing_is_done():
    fair = {"nothing": [1.0, 1.1], "fixed_clip": [1.0, 1.1], "healer": [1.0, 1.1]}
    assert broken(results_of(fair) + results_of({**fair, "clip_skip_nan": [1.0, 1.1]}, "ill")) == {}


def test_each_rule_can_be_broken():
    plain = results_of({"nothing": [1.0, 1.1], "fixed_clip": [1.2, 1.3]})
    than_before, with_the_better_clip, as_it_comes = (
        "no healthy task worse than the same run without healcore",
        "no healthy task worse than the better of nothing and fixed clip, with the better clip "
        "on both sides",
        "no healthy task worse than the better of nothing and fixed clip, as healcore comes",
    )
    worse = plain + results_of({"healer": [1.1, 1.2]})
    assert list(broken(worse)) == [than_before, with_the_better_clip, as_it_comes]
    # Worse than without a clip, as the run was before.
    clipped = plain + results_of({"healer": [1.0, 1.1], "healer_clip": [1.2, 1.3]})
    assert broken(clipped) == {}
    (where,) = broken(clipped + results_of({"attach_clip": [1.3, 1.4]}))[than_before]
    assert where.startswith("fine (jax) attach_clip: +8.0 %")
    reached = results_of({"nothing": [1.2, 1.3], "fixed_clip": [1.0, 1.1]})
    reached += results_of({"healer": [1.2, 1.3], "healer_clip": [1.0, 1.1]})
    assert list(broken(reached)) == [as_it_comes]
    cutting = plain + results_of({"attach_default": [1.0, 1.1]}, lr_cuts=1)
    (where,) = broken(cutting)["no rollback, LR cut or stop on a healthy task"]
    assert where == "fine (jax) attach_default: lr_cuts 2"
    skipping = plain + results_of({"healer": [1.0, 1.1]}, finite_skips=1)
    ((text, (where,)),) = broken(skipping).items()
    assert "finite skip" in text
    assert where == "healer: 2 in 2,000 steps, 2 of them on fine (jax)"
    assert broken(plain + results_of({"healer": [1.0, 1.1]}, finite_skips=1, steps=10_000)) == {}
    dead = [*plain, Result("jax", "fine", "healer", 0, status="crashed", error="why")]
    assert broken(dead) == {
        "every run ends with a result": ("fine (jax) healer: 1 of 1 failed: why",)
    }


def test_a_stop_is_needless_where_another_arm_comes_near_the_cure():
    cured = results_of({"nothing": [1.0], "fixed_clip": [1.0]}, "well")
    stopped = results_of({"healer": [5.0]}, "ill", stopped="enough")
    hopeless = cured + stopped + results_of({"clip_skip_nan": [5.0]}, "ill")
    assert broken(hopeless) == {}
    near = cured + stopped + results_of({"clip_skip_nan": [5.0], "adagc": [1.05]}, "ill")
    (where,) = broken(near)["no stop where another arm completes well"]
    assert where == "ill (jax) healer: stopped, adagc completes"


def test_high_rates_are_measured_against_the_best_rate_and_the_healer_against_attach():
    tasks = {
        ("torch", "best"): SimpleNamespace(kind="healthy", reference=""),
        ("torch", "lr_10x"): SimpleNamespace(kind="sick", reference="best"),
    }
    kept = results_of({"fixed_clip": [1.0, 2.0]}, "best")
    kept += results_of({"attach_default": [1.04, 2.04], "healer": [1.2, 2.2]}, "lr_10x")
    kept = [Result(**{**vars(each), "framework": "torch"}) for each in kept]
    lr_rules = {rule.text: rule for rule in rules(compare(kept, tasks)) if "lr_10x" in rule.text}
    within, behind = lr_rules.values()
    assert within.broken == ("lr_10x healer: +13 %",)
    assert (within.checked, behind.checked) == (2, 1)
    assert behind.broken == ("lr_10x healer: +10 % (p = 2.2e-16, 2 pairs)",)


# -- runs ------------------------------------------------------------------------------------------


def test_no_run_stops_the_rest():
    jobs = [Job("jax", "fine", arm, 1) for arm in (*DOES, "nothing", "healer")]
    began = time.monotonic()
    found = {each.arm: each for each in run_all(jobs, workers=2, limit=3.0, run=run_fake)}
    assert time.monotonic() - began < 30
    statuses = {arm: result.status for arm, result in found.items()}
    assert statuses == {
        "raise": "error",
        "die": "crashed",
        "hang": "timeout",
        "nan": "done",
        "stop": "done",
        "unavailable": "unavailable",
        "nothing": "done",
        "healer": "done",
    }
    assert found["raise"].error == "ValueError: no way"
    assert found["die"].error == "the process ended with 3: last output"
    assert found["hang"].error == "longer than 3 s"
    assert (found["nan"].metric, found["nan"].metric_text) == (None, "nan")
    assert (found["stop"].stopped, found["stop"].steps, found["stop"].steps_lost) == (
        "enough",
        4,
        6,
    )
    assert (found["nothing"].metric, found["nothing"].steps) == (1.01, 10)


def test_results_survive_the_way_to_disk(tmp_path):
    store = Store(tmp_path)
    for value in (0.25, NAN, INF, -INF):
        (result,) = results_of({"healer": [value]})
        store.write(result)
        back = store.read(result.job)
        assert back is not None
        assert back == result
        assert back.value == pytest.approx(value, nan_ok=True)
    assert (tmp_path / ".gitignore").read_text() == "*\n"
    assert [path.name for path in tmp_path.rglob("*.json*")] == ["healer.0.json"]


def test_a_damaged_file_is_no_result_and_an_unknown_key_is_none_of_ours(tmp_path):
    store, (result,) = Store(tmp_path), results_of({"healer": [1.0]})
    store.write(result)
    path = store.path(result.job)
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": 1}))
    assert store.read(result.job) == result
    for text in ("", "{", "[]", "{}", "3"):
        path.write_text(text)
        assert store.read(result.job) is None


def test_a_result_is_kept_under_its_policy(tmp_path, fakes):
    default = running.policy_of("jax", "healer")
    assert len(default) == 16
    assert running.policy_of("jax", "nothing") == ""
    store, (result,) = Store(tmp_path), results_of({"healer": [1.0]}, policy=default)
    store.write(result)
    assert store.read(Job("jax", "fine", "healer", 0, default)) == result
    assert store.read(Job("jax", "fine", "healer", 0, "another")) is None


# -- what there really is --------------------------------------------------------------------------


def test_the_rules_name_existing_tasks_and_arms():
    there = running.suite("torch")
    assert [task.name for task in there.tasks.values()] == list(there.tasks)
    kinds = [task.kind for task in there.tasks.values()]
    assert kinds.count("healthy") >= 24
    assert kinds.count("sick") >= 12
    for task in there.tasks.values():
        assert task.about, task.name
        if task.reference:
            assert task.kind == "sick", task.name
            assert there.tasks[task.reference].kind == "healthy"
    named = {*comparing.HELD, *command.QUICK_ARMS, *sum(comparing.REFERENCES.values(), ())}
    assert named <= there.arms.keys()
    for patterns in comparing.GAPS:
        for pattern in patterns:
            measured = [t for name, t in there.tasks.items() if comparing.fits(name, [pattern])]
            assert measured, pattern
            assert all(task.reference for task in measured), pattern
    assert {arm for arm in there.arms if running.policy_of("torch", arm)} >= set(comparing.HELD)


def test_a_real_run():
    import torch

    threads = torch.get_num_threads()
    try:
        found = running.run_one(Job("torch", "tabular_regression", "fixed_clip", 0))
    finally:
        torch.set_num_threads(threads)
    assert found.metric is not None
    assert found.status == "done"
    assert found.steps > 100
    assert found.steps_lost == 0
    assert found.wall_s > 0


# -- the command -----------------------------------------------------------------------------------


def test_the_command_runs_what_is_missing_and_writes_what_there_is(tmp_path, fakes, capsys):
    asked = ["--results", str(tmp_path), "--jobs", "1", "--seeds", "2"]
    few = [*asked, "--arms", "nothing", "fixed_clip", "clip_skip_nan", "attach_default", "healer"]
    assert command.main(few) == 0
    assert "30 runs, 30 of them to do" in capsys.readouterr().out
    page = (tmp_path / "healbench.md").read_text()
    (tmp_path / "healbench.md").write_text(
        f"# By hand\n\n{page.partition('# healbench')[2]}\nmore\n"
    )
    store = Store(tmp_path)
    store.path(Job("jax", "ill", "nothing", 1)).unlink()

    assert command.main(few) == 0
    out = capsys.readouterr().out
    assert "30 runs, 1 of them to do" in out
    assert "rules: 8 hold, 0 do not, 3 not checked" in out.splitlines()[-1]
    page = (tmp_path / "healbench.md").read_text()
    assert page.startswith("# By hand\n")
    assert page.endswith("more\n")
    assert page.count(table.BEGIN) == page.count(table.END) == 1
    assert "### Healthy tasks" in page
    assert "### Sick tasks" in page
    assert "The task ill." in page
    assert (tmp_path / "healbench.png").read_bytes()[:4] == b"\x89PNG"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(summary["cells"]) == 15

    assert command.main([*asked, "--tasks", "fine", "--arms", "stop"]) == 0
    assert "2 runs, 2 of them to do" in capsys.readouterr().out
    verdicts = {
        c["arm"]: c["verdict"] for c in json.loads((tmp_path / "summary.json").read_text())["cells"]
    }
    assert verdicts["stop"] == "stopped"  # in addition to the references that were there already
    assert verdicts["nothing"] == "reference"


def test_results_of_other_sources_are_reported_and_run_again_if_asked(tmp_path, fakes, capsys):
    asked = ["--results", str(tmp_path), "--jobs", "1", "--tasks", "fine", "--arms", "nothing"]
    store = Store(tmp_path)
    for result in results_of({"nothing": [1.0, 1.0]}):
        store.write(result)
    failed = Job("jax", "fine", "nothing", 2)
    store.write(running.failed(failed, "timeout", "longer"))
    assert command.main([*asked, "--report", "--seeds", "3"]) == 0
    assert "3 of 3 results were made by other sources" in capsys.readouterr().out
    command.main([*asked, "--seeds", "3", "--again", "failed"])
    assert "3 runs, 1 of them to do" in capsys.readouterr().out
    mended = store.read(failed)
    assert mended is not None
    assert mended.metric == pytest.approx(1.02)
    command.main([*asked, "--seeds", "3", "--again", "changed"])
    out = capsys.readouterr().out
    assert "3 runs, 2 of them to do" in out
    assert "other sources" not in out


def test_a_broken_rule_is_the_exit_status(tmp_path, fakes, capsys):
    store = Store(tmp_path)
    for result in results_of({"nothing": [1.0, 1.1], "healer": [1.5, 1.6]}):
        policy = running.policy_of("jax", result.arm)
        store.write(Result(**{**vars(result), "policy": policy}))
    asked = ["--results", str(tmp_path), "--report", "--quick"]
    assert command.main(asked) == 1
    assert "fine (jax) healer: +48 %" in capsys.readouterr().out


def test_nothing_there_is_no_success(tmp_path, fakes, capsys):
    assert command.main(["--results", str(tmp_path), "--report"]) == 1
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        command.main(["--arms", "nothink"])
    assert "'nothink' is none of" in capsys.readouterr().err


def test_an_interrupt_leaves_what_is_done(tmp_path, fakes, monkeypatch, capsys):
    def interrupted(jobs, **_):
        for job in jobs[:2]:
            yield run_fake(job)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_all", interrupted)
    asked = ["--results", str(tmp_path), "--quick"]
    assert command.main(asked) == 130
    assert "interrupted" in capsys.readouterr().out
    assert len(list(tmp_path.rglob("jax/*/*.json"))) == 2
    assert (tmp_path / "summary.json").exists()


def test_only_everything_goes_to_the_docs(fakes):
    def places(*arguments: str) -> list[str]:
        options = command._parser().parse_args(list(arguments))
        return [str(path.relative_to(running.ROOT)) for path in command._places(options)]

    runs = "benchmarks/results/healbench/runs"
    docs = ["docs/healbench.md", "docs/healbench.png", "benchmarks/results/healbench/summary.json"]
    other = [f"{runs}/healbench.md", f"{runs}/healbench.png", f"{runs}/summary.json"]
    assert places() == places("--report") == places("--seeds", "8") == docs
    assert places("--quick") == places("--tasks", "a") == places("--arms", "a", "b") == other


# -- what is written -------------------------------------------------------------------------------


def test_a_page_with_half_of_the_marks_is_left_alone(tmp_path):
    page = tmp_path / "page.md"
    for text in (f"x\n{table.BEGIN}\n", f"{table.END}\n", f"{table.END}\n{table.BEGIN}\n"):
        page.write_text(text)
        with pytest.raises(ValueError, match="needs both marks"):
            table.write_between(page, "new")
        assert page.read_text() == text
    page.write_text("prose\n")
    table.write_between(page, "old")
    table.write_between(page, "new")
    assert page.read_text() == f"prose\n\n{table.BEGIN}\n\nnew\n{table.END}\n"


def test_tables_and_figure_take_whatever_comes(tmp_path):
    results = results_of({"nothing": [NAN, NAN], "fixed_clip": [1e300, 1.0], "healer": [1.0, 1.0]})
    results += results_of({"clip_skip_nan": [NAN, INF], "healer": [1e9, NAN]}, "ill", policy="p")
    results += results_of({"fixed_clip": [0.0, 0.0], "healer": [1.0, 2.0]}, "well", stopped="a|b")
    results.append(Result("jax", "ill", "selgis", 0, status="unavailable", error="no selgis"))
    tasks = {("jax", name): task for name, task in TASKS.items()}
    for some in (results, results[:1], []):
        cells = compare(some, tasks)
        held = rules(cells)
        text = table.as_markdown(cells, held, tasks, "x.png") if cells else ""
        assert "nan" not in text.replace("skip_nan", "").replace("non-finite", "")
        table.write_json(tmp_path / "all.json", table.as_data(cells, held))
        assert len(json.loads((tmp_path / "all.json").read_text())["cells"]) == len(cells)
        if cells:
            figure.draw(cells, tmp_path / "all.png")
            table.as_text(cells, held)


def test_percent_has_no_more_digits_than_it_needs():
    values = (0.04, -0.04, 3.14, -12.4, 1234.0, -INF, INF, NAN)
    expected = ["0.0 %", "0.0 %", "+3.1 %", "-12 %", "> +999 %", "< -999 %", "> +999 %", "?"]
    assert [comparing.percent(value) for value in values] == expected
