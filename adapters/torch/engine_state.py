"""An engine state that was saved, checked against an optimizer, or extended for new parameters."""

from __future__ import annotations

from typing import Any

from healcore.core.engine import Engine, EngineState, StateError


def from_saved(engine: Engine, data: Any, groups: int) -> EngineState:
    """The state that `Engine.to_dict` wrote, in NumPy, checked against policy and parameters.

    Args:
        engine: the policy that goes on with it.
        data: the neutral form, from torch, JAX or NumPy.
        groups: number of parameters of the optimizer, which per-tensor clipping depends on.

    Raises:
        StateError: it is damaged, or of another policy or number of parameters.
    """
    saved = engine.from_dict(data)
    if engine.per_tensor and data["groups"] != groups:
        raise StateError(
            f"the saved state is of {data['groups']} parameters, this optimizer has {groups}: "
            "per-tensor clipping keeps a level for each; attach to the same model, or start fresh"
        )
    return saved


def extended(old: Any, fresh: Any) -> Any:
    """A leaf of a state for more parameters: `fresh` beginning with `old`; `old` if the same size.

    Args:
        old: the leaf as it is, an array or tensor.
        fresh: the same leaf of a new state, of as many parameters or more.
    """
    if old.shape == fresh.shape:
        return old
    fresh[: old.shape[0]] = old
    return fresh
