"""The loss probe."""

from healcore.tools.probe.loss.probing import probe_loss
from healcore.tools.probe.loss.thresholds import LossInputs

__all__ = ["LossInputs", "probe_loss"]
