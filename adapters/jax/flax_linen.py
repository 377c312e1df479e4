"""A linen TrainState that passes the loss to the optimizer and reverts every field on a skip."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from healcore.core.decision import Decision
from healcore.jax.gradients import split_keywords
from healcore.jax.opt_state import last_decision
from healcore.jax.optimizer_step import commit

_RAW_KEYS = ((2,), (4,))
"""Last axis of a raw key: of threefry, and of rbg or unsafe_rbg."""


class HealTrainState(train_state.TrainState):
    """`flax.training.train_state.TrainState` for an optimizer that contains a healing state.

        state = HealTrainState.create(
            apply_fn=model.apply, params=params, tx=protect(optax.adamw(1e-3), "default")
        )
        state = state.apply_gradients(grads=grads, value=loss)

    Flax's own ``apply_gradients(grads=, value=)`` raises TypeError, because its keywords are fields
    to replace. This class passes the healing signals to the optimizer, and replaces fields by the
    other keywords.

    A skip reverts the step counter, the parameters and these fields, except PRNG keys. Otherwise
    the next step would use the same dropout mask or noise. A raw key is any uint32 array with a
    last axis of 2 or 4, so store a counter of such a shape as int32.

    Examples:
        A model with BatchNorm, whose statistics a skip reverts too:

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

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Self:
        """Applies one optimizer step, and reverts the whole state if the policy skips it.

            state = state.apply_gradients(grads=grads, value=loss)

        Args:
            grads: gradients, in the structure of ``.params``.
            **kwargs: `value` (the loss) and the other keywords of `heal`'s update, and fields to
                replace, for example ``batch_stats``.

        Returns:
            The new state.

        Raises:
            HealStateError: the optimizer contains no healing state, or more than one.
            SignalError: a signal is not a 0-d number or bool.
            CommitError: a field changes its structure, shape or dtype.
        """
        signals, fields = split_keywords(kwargs)
        tx = optax.with_extra_args_support(self.tx)

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            return tx.update(updates, state, params, **signals)

        # Calls Flax's own method, with the signals bound to the optimizer, because the method has
        # special cases (fp8 parameters are overwritten by their gradient).
        bound = self.replace(tx=optax.GradientTransformation(tx.init, update))
        new: Any = train_state.TrainState.apply_gradients(bound, grads=grads, **fields)
        names = ["step", "params"]
        for field in dataclasses.fields(self):
            if field.name in fields and field.metadata.get("pytree_node", True):
                names.append(field.name)
        after = {name: getattr(new, name) for name in names}
        before = {name: getattr(self, name) for name in names}
        kept = commit(last_decision(new.opt_state).skip, before, after)

        def with_new_keys(kept_leaf: Any, new_leaf: Any) -> Any:
            if _is_key(new_leaf):
                return new_leaf
            return kept_leaf

        kept = jax.tree.map(with_new_keys, kept, after)
        return new.replace(tx=self.tx, **kept)

    @property
    def last_decision(self) -> Decision:
        """The decision of the last step, in 0-d arrays.

        Return it from the compiled step as a separate output if the state is donated, because a
        donated state cannot be read afterwards.

        Raises:
            HealStateError: the optimizer contains no healing state, or more than one.
        """
        return last_decision(self.opt_state)


def _is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed key, or has the dtype and last axis of a raw key."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return dtype is not None
    return dtype == jnp.uint32 and jnp.shape(leaf)[-1:] in _RAW_KEYS
