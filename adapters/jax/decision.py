"""The last decision, metrics and gradient norms in an optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import chex
import jax
import jax.numpy as jnp
import optax

from healcore.core.engine.state import metrics as engine_metrics
from healcore.core.engine.state import update_metrics
from healcore.core.verdict import Decision
from healcore.jax import state_layout
from healcore.jax.gradients import is_gradient
from healcore.jax.state import HealStateError, engine_state, find

if TYPE_CHECKING:
    from healcore.policy import PolicyLike


def last_decision(opt_state: optax.OptState) -> Decision:
    """The decision of the last step.

    Return it from the compiled step as an output of its own: a donated state cannot be read
    afterwards.

        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, last_decision(opt_state)

    Args:
        opt_state: any nesting of optax states with one `heal`, `heal_zclip` or `protect` in it.

    Returns:
        The Decision, 0-d arrays, not copied. Neutral before the first step.

    Raises:
        HealStateError: there is no healing state in it, or more than one.
    """
    found = find(opt_state).heal_decision
    return Decision(*(found.get(f"heal_{field}") for field in Decision._fields))


def metrics(opt_state: optax.OptState, policy: PolicyLike | None = None) -> dict[str, chex.Array]:
    """Named scalars for a logger: 0-d arrays under `heal/...`, without a sync or a copy.

    Args:
        opt_state: any nesting of optax states with one healing state in it.
        policy: the one that the optimizer was built with; needed for the numbers of
            `[update_clip]`, whose place in the state depends on it.

    Returns:
        See `healcore.core.engine.state.metrics`; `heal/loss` is NaN until there was a finite one,
        so also where `value=` is never passed.

    Raises:
        HealStateError: there is no healing state in it, more than one, or one of another policy.
    """
    state = find(opt_state)
    found = _metrics(state.heal_floats, state.heal_ints)
    if policy is None:
        return found
    from healcore.policy import engine_of  # here: `import healcore.jax` loads no pydantic

    return {**found, **update_metrics(engine_state(engine_of(policy), state))}


@jax.jit
def _metrics(floats: chex.Array, ints: chex.Array) -> dict[str, chex.Array]:
    """Compiled, so that it is one dispatch outside of a compiled step."""
    view: Any = _View(state_layout.head(floats, ints), "")
    found = engine_metrics(view)
    # The state itself stays finite: a checkpoint with a NaN in it would count as bad.
    loss = jnp.where(state_layout.header(ints).loss_seen != 0, found["heal/loss"], jnp.nan)
    return {**found, "heal/loss": loss}


def gradient_norms(opt_state: optax.OptState, params: optax.Params) -> dict[str, chex.Array]:
    """The norm of each parameter's gradient at the last step, before clipping, for a logger.

    The decision needs them anyway, so this adds nothing to the cost of a step.

        logger.log({f"grad_norm/{name}": float(norm) for name, norm in norms.items()})

    Args:
        opt_state: any nesting of optax states with one healing state in it.
        params: the parameters, or any tree of their structure; only their names are used.

    Returns:
        ``"params/Dense_0/kernel"`` -> L2 norm, float32 0-d. Zeros before the first step, and
        while the caller passes `grad_norm`.

    Raises:
        HealStateError: there is no healing state in it, or more than one, or `params` has another
            number of floating tensors than there were gradients.
    """
    norms = jnp.unstack(find(opt_state).heal_leaf_norms)
    paths = [
        path for path, leaf in jax.tree_util.tree_leaves_with_path(params) if is_gradient(leaf)
    ]
    if len(paths) != len(norms):
        raise HealStateError(
            f"there were {len(norms)} gradients, and params has {len(paths)} floating "
            "tensors: pass the tree that the optimizer was initialised with"
        )
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
    return dict(zip(names, norms, strict=True))


class _View:
    """The flat state by attributes, without a policy: `view.tally.skips` is flat["tally_skips"]."""

    def __init__(self, flat: Mapping[str, chex.Array], name: str) -> None:
        self._flat, self._name = flat, name

    def __getattr__(self, field: str) -> Any:
        name = f"{self._name}_{field}" if self._name else field
        if name in self._flat:
            return self._flat[name]
        if not any(key.startswith(f"{name}_") for key in self._flat):
            raise AttributeError(f"the healing state has no {name}")
        return _View(self._flat, name)
