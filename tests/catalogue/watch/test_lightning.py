"""Lightning's SpikeDetection and its port, decision by decision.

The original raises and the run is over; here it is caught, so that every step of a curve compares.
On positive, finite losses both report the same at every step, until the port's escape: after 25
rejections in a row the port takes the new level for the level, where the original rejects for ever.
"""

from __future__ import annotations

import numpy as np
import pytest

from healcore.core.verdict import Cause
from tests.catalogue.watch import curves
from tests.parity import recorded_runs

torch = pytest.importorskip("torch")
spike = pytest.importorskip("lightning.fabric.utilities.spike", reason="lightning is not installed")

NAME = "lightning-spike-detection"
ESCAPE = 25
SYNTHETIC = curves.synthetic()


@pytest.fixture
def original(tmp_path):
    """The unchanged callback: whether it raises at each step of a curve."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)

    def drive(losses):
        callback = spike.SpikeDetection(exclude_batches_path=str(tmp_path / "skip.json"))
        alarms = []
        for index, loss in enumerate(losses):
            try:
                callback.on_train_batch_end(fabric, torch.tensor(float(loss)), None, index)
                alarms.append(False)
            except spike.TrainingSpikeException:
                alarms.append(True)
        return np.array(alarms)

    return drive


def port(losses):
    """Where the policy reports a spike or a loss that is not finite."""
    return curves.decisions_of(NAME, losses).reports(Cause.LOSS_SPIKE | Cause.NONFINITE_LOSS)


def compare(losses, original):
    """Compares until the port has rejected `ESCAPE` in a row. Returns spikes and steps."""
    ours, theirs = port(losses), original(losses)
    rows = np.convolve(ours, np.ones(ESCAPE), "full")[: len(ours)] == ESCAPE
    end = int(rows.argmax()) + 1 if rows.any() else len(ours)
    assert np.flatnonzero(ours[:end]).tolist() == np.flatnonzero(theirs[:end]).tolist()
    return int(theirs[:end].sum()), end


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SYNTHETIC)
def test_the_same_at_every_step(name, original):
    found, compared = compare(SYNTHETIC[name], original)
    assert compared == curves.STEPS or name == "shift"
    if name.startswith(("healthy", "ramp")):
        assert found == 0
    elif not name.startswith("rows"):  # most of a row is below three means
        assert found


@pytest.mark.filterwarnings("ignore")
@recorded_runs.needed
@curves.SOME_AND_ALL
def test_the_same_on_recorded_runs(original, most):
    runs = curves.from_runs(250, most)
    assert len(runs) >= 10
    found = [compare(losses, original) for losses in runs.values()]
    spikes, steps = map(sum, zip(*found, strict=True))
    print(f"{len(runs)} runs, {steps} steps, {spikes} spikes for both")
    assert spikes >= 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_loss_that_is_not_finite_is_one_for_both(bad, original):
    losses = curves.healthy(60)
    losses[40] = bad
    assert np.flatnonzero(original(losses)).tolist() == [40]
    assert np.flatnonzero(port(losses)).tolist() == [40]
