"""The same bytes from NumPy, JAX and torch."""

from __future__ import annotations

import pytest

from healcore.policy import load, loads
from healcore.tools.replay import replay
from healcore.tools.replay.decided import decided_line, summary_line
from tests.tools.replay import logs

ROWS = 440
"""Few, for torch takes two milliseconds for each; a spike begins at row 120, another at 420."""

ADAGC = """
schema = 1
name = "adagc"
[clip]
kind = "adagc"
[detect.nonfinite]
[detect.loss_spike]
[[respond]]
to = ["nonfinite", "loss_spike"]
do = ["skip", "alert"]
[[respond]]
to = ["loss_spike"]
when = { sustained = true }
do = ["rollback", "cut_lr"]
"""

OVERFIT = """
schema = 1
name = "overfit"
[clip]
kind = "autoclip"
window = 50
[detect.nonfinite]
[detect.overfit]
max_gap = 0.5
[detect.update_spike]
[[respond]]
to = ["nonfinite", "update_spike"]
do = ["skip"]
[[respond]]
to = ["overfit"]
do = ["alert", "save"]
"""


def lines(trace, policy, backend):
    result = replay(trace, policy, backend=backend)
    decided = [decided_line(trace.name, result.policy, row) for row in result]
    return [*decided, summary_line(result.summary)]


def check(trace, policy, backends=("jax", "torch")):
    """All backends against NumPy; returns its lines."""
    wanted = lines(trace, policy, "numpy")
    for backend in backends:
        assert lines(trace, policy, backend) == wanted, backend
    return wanted


def test_rows_that_lack_signals_and_nan(tmp_path):
    output = check(logs.trace(logs.write(tmp_path / "a.csv", logs.eventful(ROWS))), "pretraining")
    text = "".join(output)
    for name in ("NONFINITE_LOSS", "NONFINITE_GRAD", "LOSS_SPIKE", "ROLLBACK", "CUT_LR"):
        assert name in text
    assert '"skip": true' in text
    assert '"unjudged": 0' not in output[-1]


def test_one_combination_only(tmp_path):
    run = logs.eventful(ROWS)
    run["loss"] = [x or 3.5 for x in run["loss"]]
    del run["grad_norm"]
    trace = logs.trace(logs.write(tmp_path / "a.csv", run))
    output = check(trace, "pretraining", backends=("jax",))
    assert '"ROLLBACK"' in "".join(output)


def test_a_resumed_run(tmp_path):
    """The second file goes back into the first, the third into the second's first half."""
    run = logs.eventful(ROWS)
    first = logs.write(tmp_path / "1.csv", logs.part(run, 0, 220))
    second = logs.write(tmp_path / "2.csv", logs.part(run, 140, 330), range(140, 330))
    third = logs.write(tmp_path / "3.csv", logs.part(run, 250, ROWS), range(250, ROWS))
    output = check(logs.trace(first, second, third), loads(ADAGC), backends=("torch",))
    assert [f'"attempt": {n}' in "".join(output[:-1]) for n in range(3)] == [True] * 3


def test_observing_orders_the_same(tmp_path):
    """Observe mode reports what the same policy does in heal mode.

    In NumPy: any policy has the same bits elsewhere (tests/parity/test_fuzz).
    """
    trace = logs.trace(logs.write(tmp_path / "a.csv", logs.eventful(ROWS)))
    healing = load("pretraining").model_copy(update={"mode": "heal", "name": "same"})
    watching = healing.model_copy(update={"mode": "observe"})
    watched = lines(trace, watching, "numpy")
    assert watched[:-1] == lines(trace, healing, "numpy")[:-1]


def test_adagc_without_norms_of_tensors(tmp_path):
    trace = logs.trace(logs.write(tmp_path / "a.csv", logs.eventful(ROWS)))
    output = check(trace, loads(ADAGC), backends=("torch",))
    assert '"clips": 0' in output[-1]
    assert '"group_norms": ["clip"]' in output[-1]
    assert '"ROLLBACK"' in "".join(output)
    assert "threshold" not in "".join(output[:-1])


def test_evaluations_and_updates(tmp_path):
    run = logs.eventful(ROWS)
    run["eval_loss"] = [5.5 if row % 50 == 49 else "" for row in range(ROWS)]
    run["update_norm"] = [
        (90.0 if row % 101 == 100 else 0.1) if row % 7 else "" for row in range(ROWS)
    ]
    trace = logs.trace(logs.write(tmp_path / "a.csv", run))
    output = "".join(check(trace, loads(OVERFIT), backends=("torch",)))
    assert "OVERFIT" in output
    assert "UPDATE_SPIKE" in output


def test_longer_than_a_chunk(tmp_path):
    """Rows on both sides of the edges of chunks, and a resume in the middle of one."""
    run = logs.eventful(5000)
    run["grad_norm"][4090:4102] = [5.0] * 12
    first = logs.write(tmp_path / "1.csv", logs.part(run, 0, 4700))
    second = logs.write(tmp_path / "2.csv", logs.part(run, 3900, 5000), range(3900, 5000))
    output = check(logs.trace(first, second), "zclip", backends=("jax",))
    assert all(f'"index": {index},' in "".join(output) for index in (4095, 4096, 4097))


@pytest.mark.parametrize("backend", ["numpy", "jax", "torch"])
def test_cutting_it_elsewhere_changes_nothing(tmp_path, monkeypatch, backend):
    from healcore.tools.replay import trace_replay

    trace = logs.trace(logs.write(tmp_path / "a.csv", logs.eventful(ROWS)))
    whole = lines(trace, loads(ADAGC), backend)
    monkeypatch.setattr(trace_replay, "MOST_ROWS", 33)
    assert lines(trace, loads(ADAGC), backend) == whole
