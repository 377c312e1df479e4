"""llm-foundry's KillLossSpike, Axolotl's watchdog and their ports, decision by decision.

Positive losses: while no outlier and no NaN lies in the original's window (and the port has not
escaped), an outlier is one for both, at every step. After one, the original's mean is raised by it,
so the port may call an outlier that the original does not; never the other way round.
"""

import numpy as np
import pytest

from healcore.core.decision import Action, Cause
from healcore.policy import load
from tests.catalogue import curves
from tests.catalogue.watch import originals

pytestmark = pytest.mark.slow  # each policy is replayed beside its original

WINDOW, ESCAPE = 100, 25


def port(losses):
    return curves.decisions_of("llm-foundry-kill-loss-spike", losses)


@pytest.mark.parametrize("name", curves.SYNTHETIC)
def test_the_port_finds_the_outliers_of_the_original(name):
    losses = curves.SYNTHETIC[name]
    theirs, _, _ = originals.kill_loss_spike(losses)
    ours = port(losses).reports(Cause.LOSS_SPIKE)
    clean = outliers = 0
    for i in range(len(losses)):
        past = slice(max(0, i - WINDOW), i)
        if ours[past].sum() >= ESCAPE:
            break
        if theirs[past].any() or ours[past].any():
            assert ours[i] or not theirs[i], f"step {i}: the original calls it, the port does not"
        else:
            assert ours[i] == theirs[i], f"step {i}"
            clean += 1
            outliers += bool(ours[i])
    assert clean >= WINDOW
    if name.startswith("healthy"):
        assert outliers == 0
        assert clean == curves.STEPS
    elif name.startswith(("spikes", "rows", "heavy", "shift")):
        assert outliers


def test_the_fifth_outlier_in_a_row_kills():
    losses = np.full(200, 2.0)
    losses[150:160] = 9.0
    _, spike, _ = originals.kill_loss_spike(losses)
    decisions = port(losses)
    assert curves.first(spike) == 154 == curves.first(decisions.orders(Action.STOP))
    losses[154] = 2.0  # the row is broken
    _, spike, _ = originals.kill_loss_spike(losses)
    assert curves.first(spike) == 159 == curves.first(port(losses).orders(Action.STOP))


def test_half_a_window_above_ten_kills():
    losses = np.full(400, 4.0)
    losses[:100] = 12.0  # an untrained model with a large vocabulary
    losses[300:] = 11.0
    losses[300::5] = 4.0  # so that it is no row
    _, spike, high = originals.kill_loss_spike(losses)
    decisions = port(losses)
    assert not spike[:150].any()
    ours = curves.first(decisions.reports(Cause.DIVERGENCE) & decisions.orders(Action.STOP))
    assert ours is not None
    assert curves.first(high) == ours + 1, "the original counts the steps before this one"


@pytest.mark.parametrize("threshold", [2.2, 3.0, 5.0])
def test_axolotl_stops_at_the_same_loss(threshold):
    """With `logging_steps = 1`: the original is asked before the step is logged, one step later."""
    policy = load("axolotl-watchdog", detect={"loss_ceiling": {"ceiling": threshold}})
    for name, losses in curves.SYNTHETIC.items():
        asked = curves.first(originals.loss_watchdog([*losses, losses[-1]], threshold))
        stop = curves.first(curves.decisions_of(policy, losses).orders(Action.STOP))
        assert stop == (None if asked is None else asked - 1), name
