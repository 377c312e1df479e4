"""`TorchDriver`: the live state of a torch run, its engines, and the records of its steps."""

from __future__ import annotations

from healcore.torch.driver.driver import TorchDriver

__all__ = ["TorchDriver"]
