"""Lightning's SpikeDetection and its port, decision by decision.

The original raises and the run is over; here it is caught, so that every step of a curve compares.
On positive, finite losses both report the same at every step, until the port's escape: after 25
rejections in a row the port takes the new level for the level, where the original rejects for ever.
"""

import tempfile

import numpy as np
import pytest
import torch

from healcore.core.decision import Cause
from tests.catalogue import curves

fabric = pytest.importorskip("lightning.fabric", reason="lightning is not installed")
spike = pytest.importorskip("lightning.fabric.utilities.spike")

pytestmark = [
    pytest.mark.slow,  # the policy is replayed beside its original
    pytest.mark.filterwarnings("ignore"),
]
ESCAPE = 25


def original(losses):
    """The unchanged callback: whether it raises at each step of a curve."""
    with tempfile.TemporaryDirectory() as folder:
        callback = spike.SpikeDetection(exclude_batches_path=f"{folder}/skip.json")
        trainer = fabric.Fabric(accelerator="cpu", devices=1)
        alarms = []
        for index, loss in enumerate(losses):
            try:
                callback.on_train_batch_end(trainer, torch.tensor(float(loss)), None, index)
                alarms.append(False)
            except spike.TrainingSpikeException:
                alarms.append(True)
    return np.array(alarms)


def port(losses):
    """Where the policy reports a spike or a loss that is not finite."""
    decisions = curves.decisions_of("lightning-spike-detection", losses)
    return decisions.reports(Cause.LOSS_SPIKE | Cause.NONFINITE_LOSS)


def compare(losses):
    """Compares until the port has rejected `ESCAPE` in a row. Returns spikes and steps."""
    ours = port(losses)
    theirs = original(losses)
    rows = np.convolve(ours, np.ones(ESCAPE), "full")[: len(ours)] == ESCAPE
    end = int(rows.argmax()) + 1 if rows.any() else len(ours)
    assert np.flatnonzero(ours[:end]).tolist() == np.flatnonzero(theirs[:end]).tolist()
    return int(theirs[:end].sum()), end


@pytest.mark.parametrize("name", curves.SYNTHETIC)
def test_the_port_equals_the_original_at_every_step(name):
    losses = curves.SYNTHETIC[name].copy()
    losses[300:303] = np.nan, np.inf, -np.inf
    assert original(losses)[300:303].tolist() == port(losses)[300:303].tolist() == [True] * 3
    found, compared = compare(curves.SYNTHETIC[name])
    assert compared == curves.STEPS or name.startswith("shift")
    if name.startswith(("healthy", "ramp")):
        assert found == 0
    elif name.startswith(("spikes", "heavy", "shift 0")):
        assert found
