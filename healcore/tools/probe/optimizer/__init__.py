"""The optimizer probe."""

from healcore.tools.probe.optimizer.probing import probe_optimizer
from healcore.tools.probe.optimizer.thresholds import OptimizerInputs

__all__ = ["OptimizerInputs", "probe_optimizer"]
