"""Heals an `nnx.Optimizer`: passes the loss to it, and reverts the whole model on a skip."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from healcore.core.decision import Decision
from healcore.jax import opt_state
from healcore.jax.optimizer_step import commit
from healcore.jax.trees import map_nodes


def snapshot(model: nnx.Module) -> Any:
    """The state to which `update` reverts the model on a skip. Copies nothing.

        before = snapshot(model)
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        update(optimizer, model, grads, value=loss, before=before)

    Call this function before the forward pass.

    Args:
        model: the module.

    Returns:
        All variables of the module except random streams and sown values. A skip does not revert
        these, so that the next step does not use the same dropout mask.
    """
    return _arrays(nnx.state(model, nnx.Not((nnx.RngState, nnx.Intermediate))))


def update(
    optimizer: nnx.Optimizer, model: nnx.Module, grads: Any, *, before: Any = None, **signals: Any
) -> Decision:
    """Calls ``optimizer.update(model, grads)``, and reverts all changes on a skip.

        before = snapshot(model)
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        decision = update(optimizer, model, grads, value=loss, before=before)

    ``optimizer.update(model, grads, value=loss)`` with `protect` keeps only parameters and
    optimizer state on a skip. This function also keeps ``optimizer.step`` and values that the
    forward pass writes (BatchNorm statistics).

    Args:
        optimizer: an optimizer whose transformation contains one healing state.
        model: the module, changed in place.
        grads: gradients from ``nnx.grad``.
        before: result of `snapshot`, or None if the model's only state is its parameters.
        **signals: `value` and the other keywords of `heal`'s update, and keywords of the optimizer.

    Returns:
        The Decision, to be returned from the compiled step.

    Raises:
        HealStateError: the optimizer contains no healing state, or more than one.
        SignalError: a signal is not a 0-d number or bool.
    """
    count = optimizer.step[...]
    optimizer.update(model, grads, **signals)
    decision = last_decision(optimizer)
    optimizer.step[...] = jnp.where(decision.skip, count, optimizer.step[...])
    if before is not None:
        nnx.update(model, commit(decision.skip, before, snapshot(model)))
    return decision


def last_decision(optimizer: nnx.Optimizer) -> Decision:
    """The decision of the optimizer's last step; see `healcore.jax.last_decision`.

        optimizer.update(model, grads, value=loss)
        skipped = last_decision(optimizer).skip  # within the compiled step, or after it

    Args:
        optimizer: an optimizer whose transformation contains one healing state.

    Returns:
        The Decision, in 0-d arrays. Neutral before the first step.

    Raises:
        HealStateError: the optimizer contains no healing state, or more than one.
    """
    return opt_state.last_decision(optimizer.opt_state)


def metrics(optimizer: nnx.Optimizer) -> dict[str, Any]:
    """Named scalars for a logger; see `healcore.jax.metrics`.

        for name, value in metrics(optimizer).items():
            print(name, float(value))  # `float` waits for the device

    Args:
        optimizer: an optimizer whose transformation contains one healing state.

    Returns:
        `heal/...` -> array 0-d.

    Raises:
        HealStateError: the optimizer contains no healing state, or more than one.
    """
    return opt_state.metrics(optimizer.opt_state)


def _arrays(tree: Any) -> Any:
    """The tree with the array of each Variable in its place, which optax's functions read."""

    def array(variable: nnx.Variable) -> Any:
        return variable[...]

    return map_nodes(nnx.Variable, array, tree)
