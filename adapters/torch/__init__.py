"""healcore for torch: one line makes any `torch.optim` optimizer clip, skip and heal.

    heal = healcore.torch.attach(optimizer, policy="default")
    heal.observe(loss)
    loss.backward()
    optimizer.step()

Clip and skip happen in the same step. Fused Adam, AdamW, SGD and Adagrad take both without the
host; every other optimizer takes an exact no-op, at one declared sync on an accelerator.
"""

from __future__ import annotations

from healcore.extras import require

require("torch", "torch")

from healcore.core.engine import StateError  # noqa: E402
from healcore.core.signals import SignalError  # noqa: E402
from healcore.core.verdict import Action, Cause, Decision  # noqa: E402
from healcore.torch import namespace  # noqa: E402
from healcore.torch.attachment import attach  # noqa: E402
from healcore.torch.errors import (  # noqa: E402
    AttachError,
    ObservedTooLateError,
    ParametersChangedError,
    RanksDisagreeError,
)
from healcore.torch.healing import Healing  # noqa: E402
from healcore.torch.report import Report  # noqa: E402

__all__ = [
    "Action",
    "AttachError",
    "Cause",
    "Decision",
    "Healing",
    "ObservedTooLateError",
    "ParametersChangedError",
    "RanksDisagreeError",
    "Report",
    "SignalError",
    "StateError",
    "attach",
    "namespace",
]
