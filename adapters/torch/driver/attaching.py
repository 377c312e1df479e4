"""`attach_all`: heals every optimizer of a state, or takes the handle of an earlier `attach`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from healcore.console import first_of
from healcore.core.engine import Engine
from healcore.core.engine.config import table_differences, tables_of
from healcore.core.errors import AttachError
from healcore.torch import live_state
from healcore.torch.attachment import Healing, attach, healing_of
from healcore.torch.live_state import State


def attach_all(
    state: State, engine: Engine, options: Mapping[str, Any]
) -> tuple[dict[str, Healing], list[Healing]]:
    """Heals every optimizer of a state by the same policy.

    An optimizer that was healed before keeps its handle, because the program may report losses to
    it. A trainer's optimizer brings a method `attach_with` of its own.

    Args:
        state: the checked state of the run.
        engine: the policy's engine, without a state.
        options: options of `attach`. If they have no scaler, and the state has exactly one
            GradScaler, it is used as the scaler.

    Returns:
        The handle of each optimizer, by its name in the state; and the handles among them that were
        made here. The caller has to detach these when the run ends.

    Raises:
        AttachError: an optimizer belongs to another Healer or another policy, or `attach` raises
            it. The handles that were made before the error are detached: nothing was changed.
    """
    healings: dict[str, Healing] = {}
    own: list[Healing] = []
    options = {"scaler": live_state.scaler(state), **options}
    try:
        for name, optimizer in live_state.optimizers(state).items():
            healing = healing_of(optimizer)
            if healing is not None:
                _check_attached(name, healing, engine)
            else:
                heal = getattr(state[name], "attach_with", None) or partial(attach, state[name])
                healing = heal(engine, **options)
                own.append(healing)
            healings[name] = healing
    except BaseException:
        for healing in own:
            healing.detach()
        raise
    return healings, own


def _check_attached(name: str, healing: Healing, engine: Engine) -> None:
    """Raises AttachError unless the handle of an earlier `attach` can be used."""
    if healing.healed_step.listener is not healing.healed_step.attach_log:
        raise AttachError(
            f'"{name}" belongs to a Healer that is still open: leave its `with` block, or '
            "delete the object"
        )
    differences = table_differences(tables_of(healing.engine.config), tables_of(engine.config))
    if differences:
        raise AttachError(
            f'"{name}" is healed already under another policy than the policy of the Healer '
            f"({first_of(differences, 5, '; ')}): detach() its handle, or attach with the "
            "policy of the Healer"
        )
