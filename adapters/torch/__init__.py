"""healcore for torch: one line makes any `torch.optim` optimizer clip, skip and heal.

    heal = healcore.torch.attach(optimizer, policy="default")
    heal.observe(loss)
    loss.backward()
    optimizer.step()

Clips and skips apply to the step that was judged, and a skip is an exact no-op. On an accelerator
fused Adam, AdamW, SGD and Adagrad need no host sync, other optimizers one sync per step.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from healcore.extras import require

require("torch", "torch")

from healcore.core.engine import StateError  # noqa: E402
from healcore.core.signals import SignalError  # noqa: E402
from healcore.core.verdict import Action, Cause, Decision  # noqa: E402
from healcore.torch.attachment import attach  # noqa: E402
from healcore.torch.errors import (  # noqa: E402
    AttachError,
    ParametersChangedError,
    RanksDisagreeError,
)
from healcore.torch.healing import Healing, Report  # noqa: E402

if TYPE_CHECKING:
    from healcore.runtime.healing_report import HealingReport
    from healcore.torch.store import DCPStore, Keep, MemoryStore
    from healcore.torch.trainers.arctic import arctic_callbacks
    from healcore.torch.trainers.deepspeed import engine_state, heal_engine
    from healcore.torch.trainers.huggingface.callback import HealingCallback, heal_trainer
    from healcore.torch.trainers.huggingface.dry_run import DryRun
    from healcore.torch.trainers.lightning.callback import LightningHealingCallback

__all__ = [
    "Action",
    "AttachError",
    "Cause",
    "DCPStore",
    "Decision",
    "DryRun",
    "Healing",
    "HealingCallback",
    "HealingReport",
    "Keep",
    "LightningHealingCallback",
    "MemoryStore",
    "ParametersChangedError",
    "RanksDisagreeError",
    "Report",
    "SignalError",
    "StateError",
    "arctic_callbacks",
    "attach",
    "engine_state",
    "heal_engine",
    "heal_trainer",
]

_ON_FIRST_USE = {
    **dict.fromkeys(("DCPStore", "Keep", "MemoryStore"), "healcore.torch.store"),
    "arctic_callbacks": "healcore.torch.trainers.arctic",
    **dict.fromkeys(("engine_state", "heal_engine"), "healcore.torch.trainers.deepspeed"),
    "DryRun": "healcore.torch.trainers.huggingface.dry_run",
    "HealingReport": "healcore.runtime.healing_report",
    **dict.fromkeys(
        ("HealingCallback", "heal_trainer"), "healcore.torch.trainers.huggingface.callback"
    ),
    "LightningHealingCallback": "healcore.torch.trainers.lightning.callback",
}
"""Public name -> its module: stores load torch's distributed checkpoints, trainers a library."""


def __getattr__(name: str) -> Any:
    """Imports names in `_ON_FIRST_USE` on first access (PEP 562)."""
    if name in _ON_FIRST_USE:
        return getattr(importlib.import_module(_ON_FIRST_USE[name]), name)
    raise AttributeError(f"module 'healcore.torch' has no attribute {name!r}; it has {__all__}")
