"""What a trainer reads and loads of the policy's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from healcore import console
from healcore.core.engine import StateError
from healcore.runtime.healer import Healer
from healcore.runtime.trainer_access import trainer_access_of
from healcore.torch.attachment import Healing
from healcore.torch.driver import TorchDriver


def healings_of(healer: Healer[Any] | None) -> Mapping[str, Healing]:
    """The handles of the optimizers of a run, as `healcore.torch.attach` returns them.

    Args:
        healer: the Healer of the trainer, or None before it is open.

    Returns:
        Name of the optimizer in the state -> its handle; empty for None.
    """
    if healer is None:
        return {}
    return cast(TorchDriver, trainer_access_of(healer).driver).healings


def adopt_trainer_checkpoint(
    healer: Healer[Any], engines: Mapping[str, Any], *, step: int | None = None
) -> None:
    """Continues a run from the checkpoint that the trainer itself has loaded.

    Without usable states of the policy, warns and keeps the initial baselines: the training can
    continue without them.

    Args:
        healer: the open Healer, before its first batch.
        engines: name of an optimizer -> state of its engine. Unknown names are ignored.
        step: number of optimizer steps that the trainer has taken, or None if the Healer counts
            from 0.
    """
    healings = healings_of(healer)
    known = {name: state for name, state in engines.items() if name in healings}
    obstacle = ""
    if not known:
        obstacle = "it has none"
    try:
        trainer_access_of(healer).adopt_trainer_checkpoint(known, step=step)
    except StateError as error:
        obstacle = str(error)
    if obstacle:
        console.warning(
            "the policy's state in the trainer's checkpoint was not loaded, so baselines, budgets "
            f"and the learning-rate multiplier are reset: {obstacle}"
        )
