"""A linen TrainState that passes the loss to the optimizer and reverts a skipped step whole."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from flax.training import train_state
from jax.typing import ArrayLike

from healcore.core.verdict import Decision
from healcore.jax.commit import commit
from healcore.jax.decision import last_decision

_RAW_KEYS = ((2,), (4,))  # threefry; rbg and unsafe_rbg


class HealTrainState(train_state.TrainState):
    """`flax.training.train_state.TrainState` for an optimizer with a healing state in it.

    Flax's own ``apply_gradients(grads=, value=)`` raises TypeError: its keywords are fields to
    replace. Here the healing signals go to the optimizer, every other keyword is a field, as
    before. On a skip the step counter, the parameters and those fields stay as they were. PRNG
    keys, typed or raw, are replaced nevertheless: else the next step would repeat a bad draw (of
    dropout, of noise), and so on.

    Example:
        class State(HealTrainState):
            batch_stats: Any

        state = State.create(
            apply_fn=model.apply, params=params, batch_stats=stats,
            tx=protect(optax.adamw(1e-3), "default"),
        )

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state, batch):
            (loss, stats), grads = ...
            state = state.apply_gradients(grads=grads, value=loss, batch_stats=stats)
            return state, loss, state.last_decision
    """

    def apply_gradients(
        self,
        *,
        grads: Any,
        value: ArrayLike | None = None,
        eval_loss: ArrayLike | None = None,
        grad_norm: ArrayLike | None = None,
        update_norm: ArrayLike | None = None,
        change_expected: ArrayLike | None = None,
        externally_skipped: ArrayLike | None = None,
        learning_rate: ArrayLike | None = None,
        **kwargs: Any,
    ) -> Self:
        """One optimizer step.

        Args:
            grads: gradients like ``.params``.
            value: the loss, one floating number; None and the loss detectors rest.
            eval_loss: evaluation loss, NaN at steps without one.
            grad_norm: global norm, where the caller has to reduce it over a mesh.
            update_norm: norm of the last update; `protect` knows it itself.
            change_expected: bool, a change of LR, batch, data or weights.
            externally_skipped: bool, skip this step, which is neither learnt nor counted.
            learning_rate: the schedule's rate at this step, for a limit in absolute terms.
            **kwargs: fields to replace, for example ``batch_stats``; on a skip only keys are.

        Returns:
            The new state.

        Raises:
            HealStateError: the optimizer has no healing state in it, or more than one.
            SignalError: a signal is not one number of the right kind.
            CommitError: a field changes its structure, shape or dtype.
        """
        given = {
            "value": value,
            "eval_loss": eval_loss,
            "grad_norm": grad_norm,
            "update_norm": update_norm,
            "change_expected": change_expected,
            "externally_skipped": externally_skipped,
            "learning_rate": learning_rate,
        }
        signals = {name: signal for name, signal in given.items() if signal is not None}
        tx = optax.with_extra_args_support(self.tx)

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            return tx.update(updates, state, params, **signals)

        # Flax's own method with the signals bound, so that its special cases (fp8 parameters that
        # are overwritten by their gradient) stay Flax's.
        bound = self.replace(tx=optax.GradientTransformation(tx.init, update))
        new: Any = train_state.TrainState.apply_gradients(bound, grads=grads, **kwargs)
        names = ["step", "params", *(name for name in kwargs if name in _array_fields(self))]
        after = {name: getattr(new, name) for name in names}
        before = {name: getattr(self, name) for name in names}
        kept = commit(last_decision(new.opt_state).skip, before, after)
        kept = jax.tree.map(lambda old, now: now if _is_key(now) else old, kept, after)
        return new.replace(tx=self.tx, **kept)

    @property
    def last_decision(self) -> Decision:
        """The decision of the last step; return it beside the state, which may be donated."""
        return last_decision(self.opt_state)


def _is_key(leaf: Any) -> bool:
    """A typed key, or what has a raw one's dtype and last axis."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return dtype is not None
    return dtype == jnp.uint32 and jnp.shape(leaf)[-1:] in _RAW_KEYS


def _array_fields(state: Any) -> set[str]:
    return {f.name for f in dataclasses.fields(state) if f.metadata.get("pytree_node", True)}
