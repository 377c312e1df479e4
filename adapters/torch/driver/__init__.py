"""The torch side of `Healer`: live state, engines, and what a step was, without waiting for it."""

from __future__ import annotations

from healcore.torch.driver.driver import TorchDriver
from healcore.torch.driver.live_state import RngState

__all__ = ["RngState", "TorchDriver"]
