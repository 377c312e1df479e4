"""healbench: its statistics, its runs that fail, what it keeps and what it writes.

The tasks and arms are fakes without a framework, in this file: workers import them by name.
"""

from __future__ import annotations

import functools
import math
import os
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.healbench import __main__ as command
from benchmarks.healbench import comparing, decision_numbers, running, sensitivity, table
from benchmarks.healbench.code_digest import code_of, code_without_names
from benchmarks.healbench.comparing import compare, difference, rules
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
        self.problem, self.does, self.policy = problem, does, policy
        self.steps, self.counts = (
            0,
            SimpleNamespace(**dict.fromkeys(COUNTS, 0), stopped="", lr_scale=1.0),
        )

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
        if self.policy != "default":
            self.problem.metric *= 2


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
        family="fault" if kind == "sick" else "plain",
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
    **dict.fromkeys(("attach_default", "healer", "healer_ask"), FakeRun),
}


def run_fake(job: Job) -> Result:
    """In a worker process, which does not see the fixture below."""
    running.FRAMEWORKS["jax"] = (__name__, __name__)
    return running.run_one(job)


@pytest.fixture
def fakes(monkeypatch):
    """The command, with the fakes in place of the real tasks and arms."""
    caches = (running.suite, running.source_of)
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
            **{"steps": 1000, "cpu_s": 2.0, **more},
        )
        for arm, metrics in arms.items()
        for seed, metric in enumerate(metrics)
    ]


def cells_of(results: list[Result]) -> dict[str, comparing.Cell]:
    """Cells by arm of the task that the results are of."""
    return {cell.arm: cell for cell in compare(results, KEYED)}


def by_seed(*metrics: float) -> dict[int, float]:
    return dict(enumerate(metrics))


KEYED = {("jax", name): task for name, task in TASKS.items()}


# -- statistics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [2, 3, 5, 8])
def test_the_difference_and_its_error_are_those_of_scipy(seeds):
    from scipy import stats  # here: workers import this file, and need no half a second for that

    rng = np.random.default_rng(seeds)
    for shift in (-0.3, 0.0, 0.02, 5.0):
        off = rng.normal(2.0, 0.5, seeds)
        on = off + shift + rng.normal(0, 0.1, seeds)
        found = difference(by_seed(*on), by_seed(*off))
        assert found.percent == pytest.approx(100 * np.mean(on - off) / off.mean())
        assert found.error == pytest.approx(100 * stats.sem(on - off) / off.mean())


def test_by_hand():
    # Differences 1, 2, 3 of 10: mean 2, standard deviation 1, standard error 1 / sqrt(3).
    found = difference(by_seed(11, 12, 13), by_seed(10, 10, 10))
    assert (found.percent, found.pairs) == (pytest.approx(20), 3)
    assert found.error == pytest.approx(10 / math.sqrt(3))


@pytest.mark.parametrize(
    ("on", "worse"),
    [
        ((101.2, 101.2, 101.2), True),  # 1.2 % without any noise
        ((100.9, 100.9, 100.9), False),
        ((103.0, 99.0, 101.2), False),  # 1.07 %, standard error 1.2 %
        ((109.0, 97.0, 101.0), True),  # 2.3 %, whatever the noise
    ],
)
def test_worse_is_beyond_two_standard_errors_or_beyond_the_margin(on, worse):
    assert difference(by_seed(*on), by_seed(100, 100, 100)).worse == worse


def test_one_seed_is_judged_by_the_margin_alone():
    assert not difference(by_seed(1.015), by_seed(1.0)).worse
    assert difference(by_seed(1.03), by_seed(1.0)).worse


def test_only_seeds_that_both_have_are_compared():
    found = difference({0: 1.0, 2: 3.0, 7: 5.0}, {0: 1.1, 7: 5.2, 9: 100.0})
    assert found.pairs == 2
    assert found.percent == pytest.approx(100 * -0.15 / 3.15)


@pytest.mark.parametrize("offset", [0.0, -16.0, -1000.0])
def test_around_and_below_zero_the_unit_is_the_spread_over_seeds(offset):
    off = offset + np.array([-1.0, 0.0, 1.0])  # standard deviation 1: 2 % are 0.2
    assert difference(by_seed(*(off + 0.19)), by_seed(*off)).percent == pytest.approx(1.9)
    assert difference(by_seed(*(off + 0.21)), by_seed(*off)).worse
    assert difference(by_seed(*(off - 0.5)), by_seed(*off)).better


def test_without_any_spread_the_unit_is_the_size_of_the_metric_or_one():
    assert difference(by_seed(0, 0), by_seed(0, 0)).percent == 0
    assert difference(by_seed(0.0, 0.4), by_seed(0, 0)).percent == pytest.approx(20)
    assert difference(by_seed(-3.0, -3.0), by_seed(-4, -4)).percent == pytest.approx(25)


def test_a_metric_that_is_not_finite_is_infinitely_bad():
    one_nan = difference(by_seed(1.0, NAN, 1.0), by_seed(1.1, 1.1, 1.1))
    assert one_nan.percent == INF
    assert one_nan.worse
    cured = difference(by_seed(1.0, 1.0, 1.0), by_seed(1.0, INF, NAN))
    assert cured.better
    assert not cured.worse
    partly = difference(by_seed(NAN, 1.2, 1.2), by_seed(1.0, 1.0, INF))
    assert (partly.percent, partly.pairs) == (pytest.approx(20), 1)
    all_lost = difference(by_seed(NAN, NAN), by_seed(INF, NAN))
    assert math.isnan(all_lost.percent)
    assert not all_lost.worse


def test_on_is_compared_with_off_and_a_kept_clip_with_the_clip():
    cells = cells_of(
        results_of(
            {
                "nothing": [1.0, 2.0],
                "fixed_clip": [2.0, 4.0],
                "healer": [1.0, 2.0],
                "healer_clip": [1.0, 2.0],
                "zclip": [2.0, 4.0],
            }
        )
    )
    percents = {arm: cell.against.percent for arm, cell in cells.items()}
    assert percents == {
        "nothing": 0,
        "fixed_clip": 100,
        "healer": 0,
        "healer_clip": -50,
        "zclip": 100,
    }


def test_a_sick_run_is_measured_in_units_of_the_undamaged_run_of_its_own_off():
    results = results_of({"nothing": [1.0, 2.0], "fixed_clip": [0.5, 0.5]}, "well")
    results += results_of({"healer": [2.0, 16.0], "healer_clip": [1.0, 1.0]}, "ill")
    results += results_of({"attach_default": [NAN, 1e9]}, "ill")
    cells = {(cell.task.name, cell.arm): cell for cell in compare(results, KEYED)}
    assert cells["ill", "healer"].ratio == pytest.approx(4)  # 2 and 8
    assert cells["ill", "healer_clip"].ratio == pytest.approx(2)
    assert cells["ill", "attach_default"].ratio == pytest.approx(comparing.CAP)
    assert math.isnan(cells["well", "nothing"].ratio)


# -- the promise -----------------------------------------------------------------------------------


def broken(results: list[Result]) -> dict[str, tuple[str, ...]]:
    return {rule.text: rule.broken for rule in rules(compare(results, KEYED)) if rule.broken}


def test_the_promise_holds_where_nothing_is_done():
    same = {"nothing": [1.0, 1.1], "healer": [1.0, 1.1]}
    assert broken(results_of(same) + results_of({**same, "healer": [9.0, NAN]}, "ill")) == {}


@pytest.mark.parametrize(
    ("metrics", "more", "said"),
    [
        ([1.1, 1.2], {}, ["no healthy task is worse"]),
        ([1.0, 1.1], {"lr_scale": 0.25}, ["no healthy run ends at a learning rate"]),
        ([1.0, 1.1], {"rollbacks": 1}, ["at most 1 of 200"]),
        ([1.0, 1.13], {"rollbacks": 1}, ["at most 1 of 200", "no healthy run that is rolled"]),
        ([1.0, 1.1], {"stopped": "enough"}, ["no healthy run is stopped"]),
        ([1.0, 1.1], {"status": "crashed", "error": "why"}, ["every run ends"]),
    ],
)
def test_each_part_of_the_promise_can_be_broken(metrics, more, said):
    # Of the noise of `metrics` alone, the second seed 3 % worse is within the promise.
    plain = results_of({"nothing": [1.0, 1.1]})
    found = broken(plain + results_of({"healer": metrics}, **more))
    assert [any(text.startswith(each) for text in found) for each in said] == [True] * len(said)
    assert len(found) == len(said)
    for wheres in found.values():
        assert all(where.startswith("fine (jax) healer: ") for where in wheres)


def test_one_rollback_in_200_runs_is_allowed():
    many = {"nothing": [1.0] * 200, "healer": [1.0] * 200}
    results = results_of(many)
    assert broken(results) == {}
    rolled_back = [Result(**{**vars(results[-1]), "rollbacks": 1})]
    assert broken([*results[:-1], *rolled_back]) == {}


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
    assert (found["stop"].stopped, found["stop"].steps) == ("enough", 4)
    assert (found["nothing"].metric, found["nothing"].steps) == (1.01, 10)


def test_results_survive_the_way_to_disk(tmp_path, fakes):
    store = Store(tmp_path)
    results = [
        *results_of({"healer": [0.25, NAN, INF, -INF]}, rollbacks=2, source="abc"),
        *results_of({"healer[lr.factor*0.75]": [1.0]}),
        *results_of({"healer": [1.0]}, "gone"),
    ]
    for result in results:
        store.write(result)
    for now in (Store(tmp_path), store):  # before and after the merge
        for result in results[:5]:
            back = now.read(result.job)
            assert back is not None
            assert back == result
            assert back.value == pytest.approx(result.value, nan_ok=True)
        store.merge()
    (file,) = tmp_path.rglob("*.jsonl")
    assert file == tmp_path / "jax" / "healer.jsonl"
    lines = file.read_text().splitlines()
    assert len(lines) == 5  # without that of a task that does not exist
    assert lines[0].startswith('{"task":"fine","seed":0,"source":"abc","metric":0.25,')
    assert not list(tmp_path.rglob("*.json"))


def test_a_merge_keeps_what_another_command_has_written(tmp_path, fakes):
    first, second = Store(tmp_path), Store(tmp_path)
    results = results_of({"healer": [1.0, 2.0]})
    first.write(results[0])
    second.write(results[1])
    second.merge()
    first.merge()
    assert [Store(tmp_path).read(each.job) for each in results] == results


def test_damaged_lines_and_unknown_keys_are_no_obstacle(tmp_path, fakes):
    store, (result,) = Store(tmp_path), results_of({"healer": [1.0]})
    store.write(result)
    store.merge()
    (file,) = tmp_path.rglob("*.jsonl")
    line = file.read_text().strip().replace("{", '{"later":1,')
    file.write_text(f"{{\n[]\n\n{line}\n3\n")
    assert Store(tmp_path).read(result.job) == result


# -- the digest ------------------------------------------------------------------------------------


def test_messages_are_not_code_and_keys_are(tmp_path):
    paths = [tmp_path / f"{number}.py" for number in range(3)]
    for path, message, key in zip(paths, ("too high", "rate of", "too high"), "aab", strict=True):
        path.write_text(f"def f(a):\n    print(f'{message} {{a}}', a['{key}'])\n")
    same, other, key = (code_of(path) for path in paths)
    assert same == other != key


def test_comments_docstrings_and_layout_are_not_code(tmp_path):
    plain, other = tmp_path / "plain.py", tmp_path / "other.py"
    plain.write_text("def f(a):\n    return a + 1\n")
    other.write_text('"""About."""\n# why\ndef f(a):\n    """Adds."""\n    return (a + 1)\n')
    assert code_of(plain) == code_of(other)
    other.write_text("def f(a):\n    return a + 2\n")
    assert code_of(plain) != code_of(other)


CLASS = """
import numpy as np
class Peak:
    def __init__(self, low):
        self.low, self.high = low, low
    def update(self, value):
        def outer():
            return value
        self.high = np.fmax(self.high, outer() - self.low)
        return [each for each in (self.low, self.high)]
def run(values, low=0):
    peak = Peak(low=low)
    return [peak.update(value) for value in values if value > peak.high]
"""


def test_a_consistent_new_name_is_the_same_code(tmp_path):
    file = tmp_path / "peak.py"
    file.write_text(CLASS)
    before = code_without_names([file])
    renamed = CLASS.replace("Peak", "Maximum").replace("low", "floor").replace("each", "entry")
    renamed = renamed.replace("outer", "current").replace("run", "maxima").replace("update", "add")
    file.write_text(renamed)
    assert code_without_names([file]) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("np.fmax", "np.fmin"),  # a function of a library
        ("outer() - self.low", "outer() - self.high"),
        ("outer() - self.low", "self.low - outer()"),
        ("(self.low, self.high)", "(self.high, self.low)"),
        ("value > peak.high", "value > peak.low"),
        ("value > peak.high", "value >= peak.high"),
        ("low=0", "low=1"),
        ("return value", "return self.low"),
        ("self.low, self.high = low, low", "self.high, self.low = low, low"),
    ],
)
def test_other_code_has_another_text(old, new, tmp_path):
    file = tmp_path / "peak.py"
    file.write_text(CLASS)
    before = code_without_names([file])
    assert CLASS.count(old) == 1
    file.write_text(CLASS.replace(old, new))
    assert code_without_names([file]) != before


def test_the_digest_is_of_the_task_the_arm_and_what_they_import():
    tasks = running.ROOT / "benchmarks" / "healbench" / "tasks"
    found = running._with_imports({tasks / "sick_data.py"})
    assert {tasks / "sick_data.py", tasks / "learning_rates.py", tasks / "models.py"} <= found
    assert tasks / "noisy.py" not in found
    assert running.source_of("torch", "lr_3x", "nothing") != running.source_of(
        "torch", "lm_bytes", "nothing"
    )
    healer = running.source_of("torch", "lr_3x", "healer")
    assert healer != running.source_of("torch", "lr_3x", "healer_clip")  # another policy


def test_only_the_arms_of_healcore_depend_on_healcore(monkeypatch):
    arms = ("nothing", "fixed_clip", "healer", "attach_default")
    running.source_of.cache_clear()
    before = {arm: running.source_of("torch", "lr_3x", arm) for arm in arms}
    monkeypatch.setattr(running, "_healcore", lambda framework: "other rules")
    running.source_of.cache_clear()
    changed = {arm for arm in arms if running.source_of("torch", "lr_3x", arm) != before[arm]}
    running.source_of.cache_clear()
    assert changed == {"healer", "attach_default"}


# -- what there really is --------------------------------------------------------------------------


def test_tasks_and_arms_that_are_named_exist():
    there = running.suite("torch")
    assert [task.name for task in there.tasks.values()] == list(there.tasks)
    kinds: dict[str, set[str]] = {}
    for task in there.tasks.values():
        assert task.about, task.name
        assert task.family, task.name
        kinds.setdefault(task.kind, set()).add(task.family)
        if task.kind == "sick":
            assert there.tasks[task.reference].kind == "healthy"
    assert kinds["sick"] == {"learning rate", "damage", "poisoned data", "arithmetic"}
    assert not kinds["sick"] & kinds["healthy"]
    named = {*comparing.OFF, *comparing.OFF.values(), *comparing.HINDSIGHT, *command.ARMS}
    assert named <= there.arms.keys()
    assert set(sensitivity.TASKS) <= there.tasks.keys()


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
    assert found.cpu_s > 0


# -- the command -----------------------------------------------------------------------------------


def test_the_command_runs_what_is_missing_and_writes_what_there_is(tmp_path, fakes, capsys):
    page = tmp_path / "page.md"
    page.write_text("# By hand\n")
    whole = ["--results", str(tmp_path / "runs"), "--jobs", "1", "--page", str(page)]
    assert command.main(whole) == 0
    assert "45 runs, 45 of them to do" in capsys.readouterr().out
    text = page.read_text()
    assert text.startswith("# By hand\n")
    assert text.count(BEGIN) == text.count(END) == 1
    assert "**45 of 45 runs have a result.**" in text
    assert "| plain | 2 of 2; worst 0.0 % |" in text
    assert "| fault | 1.000; worst 1 (ill (jax)) |" in text
    assert "The task ill." in text

    file = tmp_path / "runs" / "jax" / "nothing.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))
    assert command.main(whole) == 0
    assert "45 runs, 1 of them to do" in capsys.readouterr().out

    page.unlink()
    assert command.main([*whole, "--tasks", "fine", "--arms", "healer", "stop"]) == 0
    assert "6 runs, 3 of them to do" in capsys.readouterr().out
    assert not page.exists()  # a part is only printed
    assert command.main([*whole, "--report"]) == 0
    assert "**45 of 45 runs" in page.read_text()
    assert "### Healthy tasks, other arms" in page.read_text()  # those run by name are there


def test_runs_of_other_code_are_run_again(tmp_path, fakes, capsys):
    asked = ["--results", str(tmp_path), "--jobs", "1", "--tasks", "fine", "--arms", "nothing"]
    store = Store(tmp_path)
    for result in results_of({"nothing": [9.0, 9.0]}, source="old"):
        store.write(result)
    store.merge()
    assert command.main([*asked, "--seeds", "1"]) == 0
    assert "1 runs, 1 of them to do" in capsys.readouterr().out
    assert command.main([*asked, "--seeds", "2", "--report"]) == 0
    assert "**2 of 2 runs have a result.**" in capsys.readouterr().out
    new = Store(tmp_path).read(Job("jax", "fine", "nothing", 0))
    assert new is not None
    assert new.value == 1.0


def test_what_failed_runs_again_if_asked(tmp_path, fakes, capsys):
    asked = ["--results", str(tmp_path), "--jobs", "1", "--tasks", "fine", "--arms", "nothing"]
    store = Store(tmp_path)
    source = running.source_of("jax", "fine", "nothing")
    store.write(Result("jax", "fine", "nothing", 0, source, status="timeout", error="longer"))
    command.main([*asked, "--seeds", "1"])
    assert "1 runs, 0 of them to do" in capsys.readouterr().out
    command.main([*asked, "--seeds", "1", "--failed"])
    assert "1 runs, 1 of them to do" in capsys.readouterr().out


def test_a_broken_promise_is_the_exit_status(tmp_path, fakes, capsys):
    store = Store(tmp_path)
    for result in results_of({"nothing": [1.0, 1.1], "healer": [1.5, 1.6]}):
        source = running.source_of("jax", result.task, result.arm)
        store.write(Result(**{**vars(result), "source": source}))
    assert command.main(["--results", str(tmp_path), "--report", "--quick"]) == 1
    assert "fine (jax) healer: +48 ± 0.0 %" in capsys.readouterr().out


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
    assert command.main(["--results", str(tmp_path), "--quick"]) == 130
    assert "interrupted" in capsys.readouterr().out
    lines = [line for file in tmp_path.rglob("*.jsonl") for line in file.open()]
    assert len(lines) == 2


# -- other values of the numbers -------------------------------------------------------------------


def test_the_numbers_are_those_of_the_policy_and_each_can_be_changed():
    from healcore.policy import load, to_dict

    found = {each.name: each for each in decision_numbers.numbers()}
    assert found["lr.factor"].value == load("default").lr.factor
    for each in found.values():
        value = decision_numbers.changed(each.value, 1.25)
        assert value > each.value or each.value < 0
        assert isinstance(value, int) == isinstance(each.value, int)
    with decision_numbers.applied("lr.factor*0.75") as options:
        varied, usual = to_dict(options["policy"]), to_dict(load("default"))
    assert varied["lr"].pop("factor") == 0.75 * usual["lr"].pop("factor")
    assert varied == usual
    with pytest.raises(ValueError, match="no number"), decision_numbers.applied("nothing*2"):
        pass


def test_a_constant_is_changed_for_one_run_only(monkeypatch):
    monkeypatch.setattr(decision_numbers, "CONSTANTS", (f"{__name__}:CONSTANT",))
    name = f"{__name__}:CONSTANT"
    seen = []

    def fails() -> None:
        with decision_numbers.applied(f"{name}*1.25"):
            seen.append(CONSTANT)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert (seen, CONSTANT) == ([5], 4)


CONSTANT = 4


def test_the_table_of_the_numbers(tmp_path, monkeypatch, fakes, capsys):
    monkeypatch.setattr(sensitivity, "suite", lambda _: running.Suite(TASKS, ARMS))
    monkeypatch.setattr(sensitivity, "Job", lambda _, *rest: Job("jax", *rest))
    monkeypatch.setattr(sensitivity, "TASKS", ("fine", "ill"))
    page = tmp_path / "page.md"
    asked = ["--results", str(tmp_path), "--page", str(page), "--jobs", "1", "--seeds", "2"]
    asked += ["--numbers", "lr.factor", "--arms", "healer"]
    assert sensitivity.main(asked) == 0
    assert "12 runs, 12 of them to do" in capsys.readouterr().out
    row = "| `lr.factor` | 0.25 | 0.1875 | +100 % (fine, healer) | +0 | × 2.000 | 0.3125 |"
    assert row in page.read_text()
    assert sensitivity.main(asked) == 0
    assert "12 runs, 0 of them to do" in capsys.readouterr().out


# -- what is written -------------------------------------------------------------------------------


BEGIN, END = table.BEGIN.format("healbench"), table.END.format("healbench")


def test_a_page_with_half_of_the_marks_is_left_alone(tmp_path):
    page = tmp_path / "page.md"
    for text in (f"x\n{BEGIN}\n", f"{END}\n", f"{END}\n{BEGIN}\n"):
        page.write_text(text)
        with pytest.raises(ValueError, match="needs both marks"):
            table.write_between(page, "new")
        assert page.read_text() == text
    page.write_text("prose\n")
    table.write_between(page, "old")
    table.write_between(page, "new")
    assert page.read_text() == f"prose\n\n{BEGIN}\n\nnew\n{END}\n"


def test_tables_take_whatever_comes():
    results = results_of({"nothing": [NAN, NAN], "fixed_clip": [1e300, 1.0], "healer": [1.0, 1.0]})
    results += results_of({"clip_skip_nan": [NAN, INF], "healer": [1e9, NAN]}, "ill")
    results += results_of({"fixed_clip": [0.0, 0.0], "healer": [1.0, 2.0]}, "well", stopped="a|b")
    results.append(Result("jax", "ill", "selgis", 0, status="unavailable", error="no selgis"))
    for some in (results, results[:1], []):
        cells = compare(some, KEYED)
        jobs = [result.job for result in some]
        text = table.as_markdown(cells, rules(cells), jobs, jobs)
        assert "nan" not in text.replace("skip_nan", "").replace("non-finite", "")


def test_percent_has_no_more_digits_than_it_needs():
    values = (0.04, -0.04, 3.14, -12.4, 1234.0, -INF, INF, NAN)
    expected = ["0.0 %", "0.0 %", "+3.1 %", "-12 %", "> +999 %", "< -999 %", "> +999 %", "?"]
    assert [comparing.percent(value) for value in values] == expected
