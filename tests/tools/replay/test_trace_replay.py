"""Policies that observe, and a policy whose signal no log has."""

from __future__ import annotations

from healcore.policy import load, loads
from healcore.tools.replay import replay
from tests.tools.replay import logs

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


def lines(trace, policy):
    """The lines of JSON of a replay, the summary last."""
    return list(replay(trace, policy).lines())


def test_observing_orders_the_same(tmp_path):
    """Observe mode reports what the same policy does in heal mode."""
    trace = logs.trace(logs.write(tmp_path / "a.csv", logs.eventful(440)))
    healing = load("pretraining", mode="heal", name="same")
    watching = load(healing, mode="observe")
    assert lines(trace, watching)[:-1] == lines(trace, healing)[:-1]


def test_adagc_without_norms_of_tensors(tmp_path):
    trace = logs.trace(logs.write(tmp_path / "a.csv", logs.eventful(440)))
    output = lines(trace, loads(ADAGC))
    assert '"clips": 0' in output[-1]
    assert '"group_norms": ["clip"]' in output[-1]
    assert '"ROLLBACK"' in "".join(output)
    assert "threshold" not in "".join(output[:-1])
