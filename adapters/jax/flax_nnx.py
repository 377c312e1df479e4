"""Healing with `nnx.Optimizer`: passes the loss, and reverts the whole model on a skip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from flax import nnx

from healcore.core.verdict import Decision
from healcore.jax import opt_state as in_state
from healcore.jax.commit import commit
from healcore.jax.heal_state import map_nodes

if TYPE_CHECKING:
    from healcore.policy import PolicyLike


def snapshot(model: nnx.Module) -> Any:
    """What `update` reverts to on a skip. Call it before the forward pass. Copies nothing.

    Args:
        model: the module.

    Returns:
        All its variables except random streams. Random streams advance, so that the step after a
        skip does not use the dropout mask of the bad step.
    """
    return _arrays(nnx.state(model, nnx.Not(nnx.RngState)))


def update(
    optimizer: nnx.Optimizer,
    model: nnx.Module,
    grads: Any,
    *,
    before: Any = None,
    **signals: Any,
) -> Decision:
    """One step of ``optimizer.update(model, grads)`` that changes nothing when it is skipped.

    ``optimizer.update(model, grads, value=loss)`` alone already protects parameters and optimizer
    state (with `protect`), but counts ``optimizer.step`` up, and what the forward pass wrote
    (BatchNorm statistics) stays.

        before = snapshot(model)
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        decision = update(optimizer, model, grads, value=loss, before=before)

    Args:
        optimizer: built with a transformation that holds one healing state.
        model: the module, changed in place.
        grads: from ``nnx.grad``.
        before: from `snapshot`; None when the model has no state except its parameters.
        **signals: `value` and the other keywords of `heal`'s update, and the optimizer's own.

    Returns:
        The Decision: return it from the compiled step.

    Raises:
        HealStateError: the optimizer has no healing state in it, or more than one.
        SignalError: a signal is not one number of the right kind.
    """
    count = optimizer.step[...]
    optimizer.update(model, grads, **signals)
    decision = last_decision(optimizer)
    optimizer.step[...] = jnp.where(decision.skip, count, optimizer.step[...])
    if before is not None:
        nnx.update(model, commit(decision.skip, before, snapshot(model)))
    return decision


def last_decision(optimizer: nnx.Optimizer) -> Decision:
    """The decision of the optimizer's last step; see `healcore.jax.last_decision`."""
    return in_state.last_decision(_arrays(optimizer.opt_state))


def metrics(optimizer: nnx.Optimizer, policy: PolicyLike | None = None) -> dict[str, Any]:
    """Named scalars for a logger; see `healcore.jax.metrics`."""
    return in_state.metrics(_arrays(optimizer.opt_state), policy)


def gradient_norms(optimizer: nnx.Optimizer, model: nnx.Module) -> dict[str, Any]:
    """The norm of each parameter's gradient at the last step; see `healcore.jax.gradient_norms`."""
    params = nnx.to_pure_dict(nnx.state(model, optimizer.wrt))
    return in_state.gradient_norms(_arrays(optimizer.opt_state), params)


def _arrays(tree: Any) -> Any:
    return map_nodes(nnx.Variable, lambda variable: variable[...], tree)
