"""Reading the last decision, and the logger's numbers, out of an optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import chex

from healcore.core.engine import readout
from healcore.core.verdict import Decision
from healcore.jax import state as heal_state


def decision_of(opt_state: Any) -> Decision:
    """The decision of the last step.

    Return it from the compiled step as an output of its own: a donated state cannot be read
    afterwards.

        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, decision_of(opt_state)

    Args:
        opt_state: any nesting of optax states with one `heal`, `heal_zclip` or `protect` in it.

    Returns:
        The Decision, 0-d arrays, nothing is copied. Neutral before the first step.

    Raises:
        HealStateError: there is no healing state in it, or more than one.
    """
    return heal_state.decision(heal_state.find(opt_state))


def metrics(opt_state: Any) -> dict[str, chex.Array]:
    """Named scalars for a logger: 0-d arrays under `heal/...`, without a sync or a copy.

    Args:
        opt_state: any nesting of optax states with one healing state in it.

    Returns:
        See `healcore.core.engine.readout.metrics`.

    Raises:
        HealStateError: there is no healing state in it, or more than one.
    """
    view: Any = _View(heal_state.find(opt_state).heal_state, "heal")
    return readout.metrics(view)


class _View:
    """The flat state read by attributes: ``view.tally.skips`` is ``flat["heal_tally_skips"]``.

    So that the metrics need no policy to know the structure by.
    """

    def __init__(self, flat: Mapping[str, chex.Array], name: str) -> None:
        self._flat, self._name = flat, name

    def __getattr__(self, field: str) -> Any:
        name = f"{self._name}_{field}"
        if name in self._flat:
            return self._flat[name]
        if not any(key.startswith(f"{name}_") for key in self._flat):
            raise AttributeError(f"the healing state has no {name}")
        return _View(self._flat, name)
