"""The metrics file: a line per step, true to what the engine saw, rollbacks and deaths included."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from healcore.core.decision import Cause
from healcore.events.metrics import MetricsLog
from healcore.runtime.healer import Healer
from healcore.runtime.run.incidents.metrics import changed_since
from tests.healer.step_records import record
from tests.healer.training_loops import SKIPS, Faults, loop_of, rules, same, train

PAGE = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
TABLE = re.findall(r"^`.*?\|", PAGE.split("## The metrics file")[1].split("\n## ")[0], re.M)
KNOWN = set(re.findall(r"`(\w+)`", " ".join(TABLE)))
BOTH = pytest.mark.parametrize("framework", ["torch", "jax"])


def lines(path: Path) -> list[dict[str, Any]]:
    """Strictly JSON with the fields that docs/events.md lists, or the test fails."""
    text = path.read_text().splitlines()
    found = [json.loads(line, parse_constant=pytest.fail) for line in text]
    for line in found:
        assert line.keys() <= KNOWN
    return found


@BOTH
def test_a_line_per_step_and_the_undone_ones_stay(framework, tmp_path):
    path = tmp_path / "run.metrics.jsonl"  # by default next to the events
    loop = loop_of(framework, Faults(once=[23]), rules())
    result = train(loop, rules(), range(40), events=tmp_path / "run.events.jsonl")

    # Every step has a line, the undone ones too.
    found = lines(path)
    steps = [line["step"] for line in found]
    back = next(i for i, (a, b) in enumerate(itertools.pairwise(steps)) if b <= a) + 1
    assert steps[:back] == list(range(24)), "each step until the bad one"
    assert steps[back:] == list(range(steps[back], result.step))

    # The line of the bad step, and the cut after the rollback.
    bad = found[23]
    assert (bad["loss"], bad["skip"]) == ("nan", True)
    assert "ROLLBACK" in bad["action"]
    assert "NONFINITE_LOSS" in bad["cause"]
    assert all(isinstance(line["loss"], float) for line in found if line is not bad)
    assert {line["lr_scale"] for line in found[back : back + 2]} == {0.5}
    assert len({line["run"] for line in found}) == 1

    # The same run without a file.
    plain = loop_of(framework, Faults(once=[23]), rules())
    events = tmp_path / "a.events.jsonl"
    train(plain, rules(), range(40), events=events, metrics=None)
    assert same(plain.weights(), loop.weights()), "writing changes nothing"
    assert not list(tmp_path.glob("a.metrics*"))


def test_the_numbers_are_those_of_the_loop(tmp_path, monkeypatch):
    """Losses bit for bit as float32, norms as torch computes them."""
    loop = loop_of("torch")
    path = tmp_path / "m.jsonl"
    losses = []
    norms = []
    observe = Healer.observe

    def observed(healer: Healer, loss: torch.Tensor) -> None:
        losses.append(loss.item())
        observe(healer, loss)

    def before_the_step(*_: Any) -> None:
        gradients = [each.grad for each in loop.model.parameters() if each.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())

    monkeypatch.setattr(Healer, "observe", observed)
    loop.optimizer.register_step_pre_hook(before_the_step)
    train(loop, rules(), range(12), metrics=path)
    found = lines(path)
    assert [line["loss"] for line in found] == losses
    assert [line["grad_norm"] for line in found] == pytest.approx(norms, rel=1e-6)


@BOTH
def test_an_evaluation_and_the_height_of_each_loss_are_metrics(framework, tmp_path):
    path = tmp_path / "m.jsonl"
    logged = []

    def before(healer: Healer, number: int) -> None:
        logged.append(healer.metrics() if number else {})
        if number == 6:
            healer.observe(eval_loss=9.0)

    loop = loop_of(framework, Faults(once=[4]), SKIPS)
    train(loop, SKIPS, range(12), metrics=path, before=before)
    mean, count = 0.0, 0
    for row in lines(path):
        assert ("loss_ratio" in row) == (row["loss"] != "nan")
        if "eval_loss" in row:
            assert (row["eval_loss"], row["eval_gap"]) == (9.0, pytest.approx(9.0 - mean))
        if row["loss"] != "nan":
            assert row["loss_ratio"] == pytest.approx(row["loss"] / mean if count else 1.0)
            count += 1
            mean += (row["loss"] - mean) / count
    assert sum("eval_loss" in row for row in lines(path)) == 1
    assert "heal/eval_gap" not in logged[6]
    assert logged[-1]["heal/eval_loss"] == 9.0
    last: dict[str, float] = {}
    rows = [changed_since(last, metrics) for metrics in logged[:12]]
    assert len([row for row in rows if "heal/eval_gap" in row]) == 1
    assert rows[-1] == {}, "nothing has changed"


def test_a_long_run_is_thinned_and_marked_so(tmp_path, monkeypatch):
    monkeypatch.setattr("healcore.events.metrics._UNTHINNED", 100)
    path = tmp_path / "m.jsonl"
    metrics = MetricsLog(path, process_id="r", automatic=True)
    for step in range(400):
        cause = Cause.LOSS_SPIKE if step % 15 == 0 else Cause(0)
        judged = record(step=step + 1, cause=cause, loss=1.0, grad_norm=1.0)
        metrics.write(step, judged, several=False)
    metrics.flush()
    assert [each["step"] for each in lines(path) if each["cause"]] == list(range(0, 400, 15))
    plain = {each["step"]: each.get("every", 1) for each in lines(path) if not each["cause"]}
    assert plain == {
        step: every
        for steps, every in ((range(100), 1), (range(100, 200), 2), (range(200, 400), 4))
        for step in steps[::every]
        if step % 15
    }
