"""`JaxDriver`: what the `Healer` needs from JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from healcore.jax import packing
from healcore.jax.bare_state import without_heal_state
from healcore.jax.driver import engines as in_state
from healcore.jax.driver.branching import Branch
from healcore.jax.driver.checkpointed import Layout
from healcore.jax.driver.pending_dispatch import Dispatch, PendingReadback
from healcore.jax.driver.places import Tree, place_of, value
from healcore.jax.driver.ranks import this_run
from healcore.jax.lr import injected_rates
from healcore.jax.state import HealState, HealStateError
from healcore.policy import PolicyLike, engine_of
from healcore.runtime.store.protocol import CheckpointStore
from healcore.runtime.store.ranks import Ranks


class JaxDriver:
    """The live state of a JAX run.

    Args:
        state: a pytree with the state of one `protect`, `heal` or `heal_zclip` in it (several, in a
            run with several optimizers), or a mapping of names to nnx objects, which are changed in
            place.
        policy: the one that the optimizer was built with.

    Raises:
        HealStateError: there is no healing state in it, or it is of another policy.
    """

    framework = "jax"

    def __init__(self, state: Any, policy: PolicyLike = "default") -> None:
        self._engine = engine_of(policy)
        self._place = place_of(state)
        tree = self._place.read()
        self._engines = in_state.find(tree, self._place.trained(), self._engine)
        self._layout = Layout(tree, named=self._place.named)
        self._not_finite = _not_finite(tree)
        self._branch: Branch | None = None
        self._step: Dispatch | None = None
        self._stride: int | None = None
        """Steps of one dispatch, as far as known."""
        self._usual: dict[str, np.ndarray] = {}
        """Of each engine the norms at its last step without an alarm."""
        self._lost_said = False
        self.notes: list[str] = []
        """What a person should know; the Healer takes it away."""
        self._see()

    # -- the training loop ------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """The live state, as the user has it."""
        return self._place.state

    def update(self, state: Any = None) -> None:
        """Takes the state that a step has returned; None where nnx objects were changed in place.

        Raises:
            HealStateError: the healing state is not where it was, or the step was not taken from
                the state that the run was put back to. The old state stays.
        """
        if state is None:
            return
        before, self._place.state = self._place.state, state
        try:
            states = self._states()
            # A sync, in the first step after a rollback only.
            if self._branch is not None and self._branch.left_by(_counters(states)):
                self._branch = None
        except HealStateError:
            self._place.state = before
            raise

    def poll_step(self) -> Dispatch | None:
        """The step taken since the last call, on its way to the host; None: there was none.

        A step is a new state: with optax.MultiSteps a micro-step. Whether an engine has judged
        anything in it only the device knows; `StepRecord.step` is the same as before if not.
        """
        states = self._states()
        steps = _steps(states)
        if all(now is then for now, then in zip(steps, self._seen, strict=True)):
            return None
        before, self._held = self._held, PendingReadback(self._engines, states)
        if self._step is not None:
            self._stride = self._step.found or self._stride
        # A sync at the first dispatch only. One with another number of steps than those before it
        # (the last, shorter one of an epoch) is counted right when it is read.
        self._seen, self._step = (
            steps,
            Dispatch(self._engines, before, self._held, self._usual, self._stride, self._lost),
        )
        self._stride = self._step.count
        return self._step

    # -- checkpoints ------------------------------------------------------------------------------

    def items(self) -> dict[str, Any]:
        """The live state to save, without healing state. Copies nothing."""
        return self._layout.items(self._place.read())

    def replace(self, restored: Mapping[str, Any]) -> None:
        """Puts a restored state in the place of the live one; the healing state stays.

        Raises:
            StateMismatch: it does not fit; nothing has been touched.
        """
        self._put(self._layout.restored(restored, self._place.read()))

    def may_save(self) -> bool:
        """False in the middle of an accumulation by optax.MultiSteps. Reads the device for that."""
        return self._layout.between_steps(self._place.read())

    # -- engines ----------------------------------------------------------------------------------

    def healing(self) -> dict[str, dict[str, Any]]:
        """Engine name -> `Engine.to_dict`. Reads the device."""
        return in_state.dicts(self._engine, self._engines, self._place.read())

    def load_healing(self, engines: Mapping[str, Mapping[str, Any]]) -> None:
        """Replaces engine states; those not named stay.

        Raises:
            StateError: a state is of another policy, model or optimizer; nothing has been touched.
        """
        tree = self._place.read()
        self._put(in_state.loaded(self._engine, self._engines, tree, engines))

    def expect_change(self) -> None:
        """Opens every engine's grace window."""
        self._place.write(in_state.with_change_expected(self._place.read()))

    def decline(self) -> None:
        """Tells every engine that the rollback it ordered is not carried out."""
        self._place.write(in_state.declined(self._engine, self._place.read()))

    def finite(self) -> bool:
        """Whether the state is finite, but for arrays that were not at the start (masks of -inf).

        The whole of it: which part are parameters a pytree does not say. Less the healing part: the
        norms in it are those of a gradient that was not applied. Reads the device.
        """
        return _not_finite(self._place.read()) <= self._not_finite

    def losses_of(
        self,
        loss_fn: Callable[..., Any],
        batches: Iterable[Any],
        state: Mapping[str, Any] | None = None,
    ) -> list[float]:
        """`loss_fn(state, batch)`, or `loss_fn(batch)` where nnx objects are changed in place."""
        live = self._place.read()
        if state is not None:
            self._place.write(self._layout.restored(state, live))
        given = (self._place.state,) if isinstance(self._place, Tree) else ()
        try:
            return [float(loss_fn(*given, batch)) for batch in batches]
        finally:
            if state is not None:
                self._place.write(live)

    def learning_rate(self) -> float | None:
        """The one in optax.inject_hyperparams, from the device; others are in no state: None."""
        found = {float(rate) for rate in injected_rates(self._place.read())}
        return found.pop() if len(found) == 1 else None

    # -- the run ----------------------------------------------------------------------------------

    def state_bytes(self) -> int:
        """Of what this process holds of the state."""
        arrays = [each for each in jax.tree.leaves(self._place.read()) if hasattr(each, "nbytes")]
        return sum(
            sum(shard.data.nbytes for shard in each.addressable_shards if not shard.replica_id)
            if isinstance(each, jax.Array)
            else each.nbytes
            for each in arrays
        )

    def store(
        self, where: Any, nonfinite_ok: tuple[str, ...], *, trust: bool = False
    ) -> CheckpointStore:
        """The default store: memory, and behind it Orbax in the directory `where`, if any.

        `trust` changes nothing: what lies in either has a plain form.
        """
        del trust
        from healcore.jax.store import MemoryStore, OrbaxStore, TieredStore  # loads Orbax

        memory = MemoryStore(nonfinite_ok=nonfinite_ok)
        if where is None:
            return memory
        return TieredStore(memory, OrbaxStore(where, nonfinite_ok=nonfinite_ok))

    def ranks(self) -> Ranks:
        """The processes of this run."""
        return this_run()

    def generators(self) -> None:
        """None: JAX has no global generators, the state holds its keys."""

    def close(self) -> None:
        """Nothing has been put on: what heals is part of the user's optimizer."""

    # -- within -----------------------------------------------------------------------------------

    def _lost(self, steps: int, missing: int) -> None:
        if not self._lost_said:
            self._lost_said = True
            self.notes.append(
                f"{steps} steps in one dispatch, and the state keeps the numbers of "
                f"{steps - missing}: no order is lost, but the metrics lack the others; "
                f"protect(tx, policy, records={steps}) keeps them all"
            )

    def _states(self) -> list[HealState]:
        roots = self._place.roots()
        return [in_state.at(roots, each.path) for each in self._engines]

    def _put(self, tree: Any) -> None:
        """The tree is the state from now on, and the next step is to be taken from it. A sync."""
        ahead = self._held.steps()
        self._place.write(tree)
        self._see()
        stride = None if self._step is None else self._step.moved()
        self._branch = Branch(self._held.steps(), ahead, stride)

    def _see(self) -> None:
        """Remembers which step's state is there."""
        states = self._states()
        self._seen, self._held = _steps(states), PendingReadback(self._engines, states)


def _not_finite(tree: Any) -> set[str]:
    """Paths of the floating arrays with a NaN or an Inf in them."""
    floats = [
        (jax.tree_util.keystr(path), jnp.isfinite(leaf).all())
        for path, leaf in jax.tree_util.tree_leaves_with_path(without_heal_state(tree))
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    finite = jax.device_get([flag for _, flag in floats])
    return {name for (name, _), fine in zip(floats, finite, strict=True) if not fine}


def _steps(states: list[HealState]) -> list[Any]:
    """What holds the engines' counters: new in each step, so told by identity, not read."""
    return [value(each.heal_ints) for each in states]


def _counters(states: list[HealState]) -> list[Any]:
    """How many steps the engines have judged."""
    return [packing.step(each) for each in _steps(states)]
