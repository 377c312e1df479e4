"""`JaxDriver`: what the Healer needs from a run in JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from healcore.jax.driver import engines as in_state
from healcore.jax.driver.gradient_window import GradientWindow, differ
from healcore.jax.driver.live_state import array_of, as_live, live_state_of
from healcore.jax.driver.pending_dispatch import Dispatch, PendingReadback
from healcore.jax.heal_state import HealState, HealStateError
from healcore.jax.opt_state import without_heal_state
from healcore.jax.optax_states import (
    check_leaves,
    injected_hyperparameters,
    injected_rates,
    moments_obstacle,
    reset_moments,
)
from healcore.policy import PolicyLike, engine_of
from healcore.runtime.driver import json_setting
from healcore.runtime.store.protocol import CheckpointStore
from healcore.runtime.store.ranks import Alone, Ranks

if TYPE_CHECKING:
    from healcore.jax.driver.vote_marks import VoteMarks


class JaxDriver:
    """Implements `healcore.runtime.driver.Driver` for a JAX run.

    Args:
        state: a pytree that contains the state of a `protect`, `heal` or `heal_zclip` (several for
            several optimizers), or a mapping of names to nnx objects, which are updated in place.
        policy: the policy that the optimizer was built with.

    Raises:
        HealStateError: there is no healing state in it, it is of another policy, or a leaf is
            neither an array nor a number.
    """

    framework = "jax"

    def __init__(self, state: Any, policy: PolicyLike = "default") -> None:
        self._engine = engine_of(policy)
        self._live = live_state_of(state)
        tree = self._live.read()
        check_leaves(tree, "state", _ARRAYS_ONLY)
        self._engines = in_state.find(tree, self._live.trained(), self._engine)
        parts = [each.parameters for each in self._engines]
        self._parameters = frozenset().union(*parts) if all(parts) else frozenset()
        """Paths of the parameters; empty where the state does not show all of them."""
        self._not_finite = self._nonfinite_parameters()
        self._step: Dispatch | None = None
        self._stride: int | None = None
        """Steps of one dispatch, once known."""
        self._usual: dict[str, np.ndarray] = {}
        """Each engine's gradient norms at its last step without an alarm."""
        self._missing_noted = False
        self._marks: VoteMarks | None = None
        """Made by the first `request_vote`, in a program of several processes."""
        self._ranks: Ranks | None = None
        self.warnings: list[str] = []
        if self._engine.mode != "observe" and in_state.is_poisoned_by_one_nan(tree):
            self.warnings.append(
                "optax.MultiSteps is around protect: a NaN micro-batch stays in its accumulator "
                "(0 × NaN is NaN), so that every later update is skipped until a rollback. Write "
                "protect(optax.MultiSteps(optimizer, k)), or give MultiSteps "
                "should_skip_update_fn=optax.skip_not_finite"
            )
        self._on_step: Callable[[], None] = lambda: None
        self._remember_step()
        self._edit = max(in_state.edits(self._states()))
        """Number of the last edit of the state, by a rollback, `expect_change`, ..."""
        self._edit_is_new = False
        """No `update` has shown yet that the loop continues from the edited state."""

    # -- the training loop ------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """The live state, as the user passed it."""
        return self._live.state

    def update(self, state: Any = None) -> None:
        """Takes the state that a step has returned; None where nnx objects were updated in place.

        Raises:
            HealStateError: it is no state of this run, or was computed from one before the Healer's
                last edit. The old state stays.
        """
        self._on_step()
        if state is None:
            if not self._live.in_place:
                raise HealStateError(
                    "update takes the state that the step returns, got None: does the step have "
                    f"its `return`? Write `{_LINE}`"
                )
            return
        before, self._live.state = self._live.state, state
        try:
            self._live.check()
            states = self._states()
            if self._edit_is_new:  # a sync, in the first update after an edit only
                self._edit_is_new = any(each != self._edit for each in in_state.edits(states))
                if self._edit_is_new:
                    raise HealStateError(_STALE)
        except HealStateError:
            self._live.state = before
            raise

    def on_step(self, call: Callable[[], None]) -> None:
        """Calls `call` from `update`."""
        self._on_step = call

    def poll_step(self) -> Dispatch | None:
        """The step taken since the last call, its copy to the host begun; None if there was none.

        Every new state is a step. If no engine has judged it (optax.MultiSteps), which only the
        device knows, `StepRecord.step` stays the same.
        """
        if self._all_polled():
            return None
        before, self._readback = self._readback, PendingReadback(self._states())
        if self._step is not None:
            self._stride = self._step.steps_read or self._stride
        # A sync at the first dispatch only. A wrong number of steps (the last dispatch of an epoch
        # has fewer) is corrected when the dispatch is read.
        self._step = Dispatch(
            self._engines,
            before,
            self._readback,
            self._usual,
            self._stride,
            self._note_missing,
            bool if self._marks is None else self._marks.begin_dispatch(),
        )
        self._last_counters = self._counters()
        self._stride = self._step.count
        return self._step

    # -- checkpoints ------------------------------------------------------------------------------

    def items(self) -> dict[str, Any]:
        """The live state to save, without healing state. Nothing is copied."""
        return self._live.items()

    def replace(self, restored: Mapping[str, Any]) -> None:
        """Replaces the live state by a restored one; the healing state stays."""
        self._put(self._live.restored(restored))

    def reset_moments(self) -> None:
        """Sets moments and bias correction to zero; the counts of schedules stay."""

        def zeroed(leaf: Any) -> Any:
            return as_live(jnp.zeros_like(leaf), leaf)

        self._edit_state(reset_moments(self._live.read(), zeroed))

    def moments_obstacle(self) -> str:
        """Names an array of the optimizers whose first value is not known."""
        return moments_obstacle(self._live.read(), [each.path for each in self._engines])

    def request_vote(self, wanted: bool) -> bool:
        """Marks one of the next dispatches in all processes, not always the very next one."""
        if self._marks is None:
            if jax.process_count() == 1:
                return False
            from healcore.jax.driver.vote_marks import VoteMarks  # loads Orbax

            self._marks = VoteMarks()
        self._marks.request(wanted)
        return True

    def may_save(self) -> bool:
        """False during an accumulation by optax.MultiSteps; reads the device then."""
        return self._live.between_steps()

    # -- engines ----------------------------------------------------------------------------------

    def healing(self) -> dict[str, dict[str, Any]]:
        """Engine name -> `Engine.to_dict`. Reads the device."""
        return in_state.dicts(self._engine, self._engines, self._live.read())

    def load_healing(self, engines: Mapping[str, Mapping[str, Any]]) -> None:
        """Replaces the named engine states; the others stay."""
        tree = self._live.read()
        self._put(in_state.loaded(self._engine, self._engines, tree, engines))

    def expect_change(self) -> None:
        """Opens every engine's grace window."""
        self._edit_state(in_state.with_change_expected(self._live.read()))

    def interrupted(self) -> bool:
        """False: an update makes new arrays, and the state is replaced as a whole."""
        return False

    def undo_window(self) -> str:
        """Nothing: a state that no `update` has passed is not the run's."""
        if self.may_save():
            return ""
        return "the exception came within an accumulation of optax.MultiSteps"

    def finite(self) -> bool:
        """Whether the parameters are finite, except arrays that were not at the start.

        All arrays count where the state does not show which of them are parameters, but not the
        healing state: it has norms of gradients that were not applied.
        """
        return self._nonfinite_parameters() <= self._not_finite

    def copy_weights(self) -> dict[str, Any]:
        """Path -> copy of the parameters, off the device if it is an accelerator.

        All floating arrays count where the state does not show which of them are parameters.
        """
        return {name: _copy(leaf) for name, leaf in self._weights().items()}

    def losses_of(
        self,
        loss_fn: Callable[..., Any],
        batches: Iterable[Any],
        weights: Mapping[str, Any] | None = None,
    ) -> list[float]:
        """Calls `loss_fn(state, batch)`; for nnx objects, updated in place, `loss_fn(batch)`.

        The random keys in the state are the current ones with either weights.
        """
        return self._called(loss_fn, batches, weights or {}, float)

    def try_loss_fn(self, loss_fn: Callable[..., Any], batch: Any) -> Any:
        """Calls it, for nnx objects with the batch alone."""
        (found,) = self._called(loss_fn, [batch], {}, jax.device_get)
        return found

    def _called(
        self,
        loss_fn: Callable[..., Any],
        batches: Iterable[Any],
        weights: Mapping[str, Any],
        read: Callable[[Any], Any],
    ) -> list[Any]:
        live, in_place = self._live.read(), self._live.in_place
        state = _with(live, weights)
        try:
            if in_place and weights:
                self._live.write(state)
            arguments = () if in_place else (state,)
            return [read(loss_fn(*arguments, batch)) for batch in batches]
        finally:
            if in_place:
                self._live.write(live)

    def gradient_window(self) -> GradientWindow:
        """The gradients since the last step, which the loop sums up."""
        return GradientWindow(self._counters, self._live.read)

    def optimizer_reports(self) -> dict[str, object]:
        """Empty: the transformation in the step has nothing to report."""
        return {}

    def hyperparameters(self) -> dict[str, Any]:
        """The numbers that optax.inject_hyperparams holds. Reads the device."""
        found = jax.device_get(injected_hyperparameters(self._live.read()))
        short = [path.rpartition("['")[2].removesuffix("']") for path in found]
        names = short if len(set(short)) == len(short) else list(found)
        # The shortest decimal number: 0.001 and not 0.0010000000474974513.
        values = [json_setting(float(str(each))) for each in found.values()]
        return dict(zip(names, values, strict=True))

    def learning_rate(self) -> float | None:
        """The rate of optax.inject_hyperparams, or the rate that the last update received.

        Read from the device. None without exactly one.
        """
        found = {float(rate) for rate in injected_rates(self._live.read())}
        if not found:
            rates = (each["state"]["lr"]["rate"] for each in self.healing().values())
            found = {rate for rate in rates if rate not in (0.0, 1.0)}  # 1: none was given
        return found.pop() if len(found) == 1 else None

    # -- the run ----------------------------------------------------------------------------------

    def state_bytes(self) -> int:
        """Size of this process's part of the state."""
        return sum(
            sum(shard.data.nbytes for shard in leaf.addressable_shards if not shard.replica_id)
            if isinstance(leaf, jax.Array)
            else getattr(leaf, "nbytes", 0)
            for leaf in jax.tree.leaves(self._live.read())
        )

    def store(
        self, where: Any, nonfinite_ok: tuple[str, ...], *, trust: bool = False
    ) -> CheckpointStore:
        """The default store: memory, and with a directory `where` also Orbax; ignores `trust`."""
        del trust
        from healcore.jax.store import MemoryStore, OrbaxStore, TieredStore  # loads Orbax

        memory = MemoryStore(nonfinite_ok=nonfinite_ok)
        if where is None:
            return memory
        return TieredStore(memory, OrbaxStore(where, nonfinite_ok=nonfinite_ok))

    def ranks(self) -> Ranks:
        """Exchanges between the processes of this run. Every process makes the first call."""
        if self._ranks is None:
            self._ranks = Alone()
            if jax.process_count() > 1:
                from healcore.jax.store.coordination import CoordinatedRanks  # loads Orbax

                self._ranks = CoordinatedRanks()
        return self._ranks

    def generators(self) -> None:
        """Nothing: JAX has no global generators; the state holds its keys."""

    def close(self) -> None:
        """Ends threads of several processes. Healing is in the optimizer, without hooks."""
        if self._marks is not None:
            self._marks.close()

    # -- internal ---------------------------------------------------------------------------------

    def _note_missing(self, steps: int, missing: int) -> None:
        if not self._missing_noted:
            self._missing_noted = True
            self.warnings.append(
                f"{steps} steps in one dispatch, and the state keeps the records of "
                f"{steps - missing}: no order is lost, but the metrics lack the others; "
                f"protect(tx, policy, records={steps}) keeps them all"
            )

    def _nonfinite_parameters(self) -> set[str]:
        """Paths of the parameters with a NaN or an Inf; of all arrays where they are not known."""
        found = {name: jnp.isfinite(leaf).all() for name, leaf in self._weights().items()}
        return {name for name, finite in jax.device_get(found).items() if not finite}

    def _weights(self) -> dict[str, Any]:
        """Path -> each parameter, or each floating array where the parameters are not known.

        In the same order in all processes.
        """
        leaves = jax.tree_util.tree_leaves_with_path(without_heal_state(self._live.read()))
        arrays = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        return {
            name: leaf
            for name, leaf in arrays.items()
            if (name in self._parameters if self._parameters else _is_floating(leaf))
        }

    def _states(self) -> list[HealState]:
        roots = self._live.roots()
        return [in_state.at(roots, each.path) for each in self._engines]

    def _counters(self) -> list[Any]:
        """The arrays with the engines' counters, which each step replaces."""
        return [array_of(each.heal_ints) for each in self._states()]

    def _all_polled(self) -> bool:
        return not differ(self._counters(), self._last_counters)

    def _edit_state(self, tree: Any) -> None:
        """Makes the tree the live state, from which the next step has to start; it is no step."""
        all_polled = self._all_polled()
        if not self._live.in_place:
            self._edit, self._edit_is_new = self._edit + 1, True
            tree = in_state.with_edit(tree, self._edit)
        self._live.write(tree)
        if all_polled:  # otherwise `poll_step` has to see the step before the edit
            self._last_counters = self._counters()

    def _put(self, tree: Any) -> None:
        """Makes the tree the live state; a step that was not polled yet is dropped."""
        self._edit_state(tree)
        self._remember_step()

    def _remember_step(self) -> None:
        self._readback = PendingReadback(self._states())
        self._last_counters = self._counters()


_ARRAYS_ONLY = (
    "for an Equinox module write `params, static = eqx.partition(model, eqx.is_array)`, pass "
    "params in the state, and begin the step with `model = eqx.combine(params, static)`"
)
_LINE = "state = healer.update(step(healer.state, batch))"
_STALE = (
    "this state was computed from one before the Healer changed it: a rollback, a resume or "
    f"expect_change() has made a new healer.state. Write `{_LINE}`, and take no step from an "
    "older variable. For a state that you have restored yourself: "
    "with_heal_state(without_heal_state(mine), like=healer.state)"
)


def _is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", np.dtype(object)), jnp.floating)


def _copy(leaf: Any) -> Any:
    """A copy that outlives a donation of the state, in the host's memory."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if next(iter(leaf.sharding.device_set)).platform == "cpu":
        return jnp.copy(leaf)
    return jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host"))


def _with(live: Any, weights: Mapping[str, Any]) -> Any:
    """The state with other parameters."""

    def one(path: Any, leaf: Any) -> Any:
        saved = weights.get(jax.tree_util.keystr(path), leaf)
        moved = isinstance(saved, jax.Array) and saved is not leaf
        return jax.device_put(saved, leaf.sharding) if moved else saved

    return jax.tree_util.tree_map_with_path(one, live)
