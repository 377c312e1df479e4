# The folder is adapters/torch. In a checkout healcore/torch is a link to it.
"""healcore for torch: one line makes any `torch.optim` optimizer clip, skip and heal.

    heal = healcore.torch.attach(optimizer, policy="default")
    heal.observe(loss)
    loss.backward()
    optimizer.step()

Each kind of loop has its own entry point:

    a loop of your own               `healcore.Healer`, or `attach`, which only clips and skips
    a loop with a DeepSpeed engine   `healcore.Healer` on `engine_state`, or `heal_engine`, which
                                     only clips and skips
    a Trainer of transformers, TRL   `heal_trainer`, or `HealingCallback` among its callbacks
    a Trainer of Lightning           `LightningHealingCallback` among its callbacks
    a trainer of ArcticTraining      `arctic_callbacks`

Clips and skips apply to the step that was judged, and a skip is an exact no-op. On an accelerator
fused Adam, AdamW, SGD and Adagrad need no host sync, other optimizers one sync per step.

The files, for readers of the code:

    attachment          `attach`, and the handle `Healing` that it returns
    healed_step         replaces `optimizer.step`: measures, guards, steps, restores
    measurement         the signals of a step: losses, norms, rates, a GradScaler's overflows
    gradients             norms of gradients; scales gradients
    ranks               the signals of all ranks
    live_engine         the policy's engine with its state, on the host or on a device
    array_namespace       the array functions of the core in torch
    moments             resets the moments
    optimizer_numbers   numbers of the optimizer that a rollback holds
    attach_log          lines of `attach` without a Healer
    driver              what a Healer needs of a run in torch
    live_state          checks and names the user's state
    store               checkpoints
    checkpoint_reader     checkpoints of other programs, for `healcore probe`
    trainers            Lightning, transformers, DeepSpeed, ArcticTraining
    demo                the training of `healcore demo`
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from healcore.adapter_registry import require

require("torch", "torch")

from healcore.core.errors import AttachError  # noqa: E402
from healcore.torch.attachment import Healing, attach  # noqa: E402

if TYPE_CHECKING:
    from healcore.torch.store import DCPStore
    from healcore.torch.trainers.arctic import arctic_callbacks
    from healcore.torch.trainers.deepspeed import engine_state, heal_engine
    from healcore.torch.trainers.huggingface.callback import HealingCallback, heal_trainer
    from healcore.torch.trainers.lightning.callback import LightningHealingCallback

__all__ = [
    "AttachError",
    "DCPStore",
    "Healing",
    "HealingCallback",
    "LightningHealingCallback",
    "arctic_callbacks",
    "attach",
    "engine_state",
    "heal_engine",
    "heal_trainer",
]

_ON_FIRST_USE = {
    "DCPStore": "store",
    "arctic_callbacks": "trainers.arctic",
    "engine_state": "trainers.deepspeed",
    "heal_engine": "trainers.deepspeed",
    "HealingCallback": "trainers.huggingface.callback",
    "heal_trainer": "trainers.huggingface.callback",
    "LightningHealingCallback": "trainers.lightning.callback",
}
"""Public name -> its module: stores load torch's distributed checkpoints, trainers a library."""


def __getattr__(name: str) -> Any:
    """Imports names in `_ON_FIRST_USE` on first access (PEP 562)."""
    if name in _ON_FIRST_USE:
        return getattr(importlib.import_module(f"{__name__}.{_ON_FIRST_USE[name]}"), name)
    raise AttributeError(f"module 'healcore.torch' has no attribute {name!r}; it has {__all__}")
