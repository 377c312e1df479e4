"""Defines `JaxDriver`, which reads and replaces the state of a JAX run for the Healer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from healcore.jax.driver import engines as in_state
from healcore.jax.driver.averages import averages, rivals
from healcore.jax.driver.dispatch import Dispatch, StepReader
from healcore.jax.driver.gradient_window import GradientWindow, differ
from healcore.jax.driver.live_state import array_of, as_live, live_state_of
from healcore.jax.heal_state import (
    HealState,
    HealStateError,
    with_change_expected,
    with_edit,
)
from healcore.jax.opt_state import without_heal_state
from healcore.jax.optax_states import (
    injected_hyperparameters,
    injected_rates,
    moments_obstacle,
    reset_moments,
)
from healcore.policy import PolicyLike, engine_of
from healcore.runtime.driver import SAMPLE, Driver, WeightsChanged, json_setting
from healcore.runtime.store import CheckpointStore
from healcore.runtime.store.ranks import Alone, Ranks
from healcore.runtime.store.saved import IN_MEMORY

if TYPE_CHECKING:
    from healcore.jax.driver.vote_marks import VoteMarks


class JaxDriver(Driver):
    """Implements `healcore.runtime.driver.Driver` for a JAX run.

    Args:
        state: a pytree that contains the state of `protect`, `heal` or `heal_zclip` (one for each
            optimizer), or a mapping of names to nnx objects, which are updated in place.
        policy: the optimizer's policy.

    Raises:
        HealStateError: `state` has no healing state, or its policy differs.
    """

    framework = "jax"

    def __init__(self, state: Any, policy: PolicyLike = "default") -> None:
        self._engine = engine_of(policy)
        self._live = live_state_of(state)
        tree = self._live.read()
        self._engines = in_state.find(tree, self._live.trained(), self._engine)
        parts = [each.candidates for each in self._engines]
        parts = parts if all(parts) else []
        self._parameters = {name for fitting in parts for part in fitting for name in part}
        """Paths of what may be parameters, or empty if the state does not identify all of them."""
        self._rivals = rivals(parts, self._weights())
        """Equal parts of which not all are trained, until their movement has shown which."""
        self._averages = frozenset[str]()
        """Paths that are known not to be trained."""
        self._not_finite = set(self.nonfinite_weights())
        accumulates = in_state.is_accumulated(tree)
        self.warnings: list[str] = []
        self._reader = StepReader(self._engines, accumulates, self.warnings.append)
        self._marks: VoteMarks | None = None
        """Created by the first `request_vote` in a program of several processes."""
        self._ranks: Ranks | None = None
        if self._engine.mode != "observe" and in_state.is_poisoned_by_one_nan(tree):
            self.warnings.append(
                "optax.MultiSteps wraps protect: a NaN micro-batch stays in its accumulator "
                "(0 × NaN is NaN), so every later update is skipped until a rollback. Write "
                "protect(optax.MultiSteps(optimizer, k)), or pass "
                "should_skip_update_fn=optax.skip_not_finite to MultiSteps"
            )
        self._on_step: Callable[[], None] = lambda: None
        self._remember_step()
        self._edit = max(in_state.edits(self._states()))
        """Number of the last edit of the state, by a rollback, `expect_change`, ..."""
        self._edit_is_new = False
        """Whether no `update` since the last edit has continued from the edited state."""

    # -- the training loop ------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """The live state, as the user passed it."""
        return self._live.state

    def update(self, state: Any = None) -> None:
        """Sets the state that a step has returned. None for nnx objects, updated in place.

        Raises:
            HealStateError: `state` is not a state of this run, or was computed from a state before
                the Healer's last edit. The live state is unchanged.
        """
        self._on_step()
        if state is None:
            if not self._live.in_place:
                raise HealStateError(
                    "update takes the state that the step returns, got None: does the step "
                    f"`return` its state? Write `{_LINE}`"
                )
            return
        before, self._live.state = self._live.state, state
        try:
            if self._live.is_new():
                self._states()  # raises if a state of another class has replaced a healing state
            if self._edit_is_new:  # one sync, in the first update after an edit
                edits = in_state.edits(self._states())
                self._edit_is_new = any(each != self._edit for each in edits)
                if self._edit_is_new:
                    raise HealStateError(_STALE)
        except HealStateError:
            self._live.state = before
            raise

    def on_step(self, call: Callable[[], None]) -> None:
        """Registers a function that `update` calls."""
        self._on_step = call

    def poll_step(self) -> Dispatch | None:
        """Begins to copy the step since the last call to the host. None if no step was taken.

        Every new state counts as a step. If no engine has judged the step (optax.MultiSteps), which
        only the device knows, `StepRecord.step` does not change.
        """
        states = self._states()
        counters = _counters_of(states)
        if not differ(counters, self._last_counters):
            return None
        self._last_counters = counters
        votes = bool if self._marks is None else self._marks.begin_dispatch()
        return self._reader.dispatch(states, votes)

    # -- checkpoints ------------------------------------------------------------------------------

    def items(self) -> dict[str, Any]:
        """Returns the live state to save, without healing states. Copies nothing."""
        return self._live.items()

    def replace(self, restored: Mapping[str, Any]) -> None:
        """Replaces the live state by a restored state, except the healing states."""
        self._replace_state(self._live.restored(restored))

    def reset_moments(self) -> None:
        """Sets moments and the counts of their bias correction to zero."""

        def zeroed(leaf: Any) -> Any:
            return as_live(jnp.zeros_like(leaf), leaf)

        self._edit_state(reset_moments(self._live.read(), zeroed))

    def moments_obstacle(self) -> str:
        """Reason why moments cannot be reset, or an empty string."""
        return moments_obstacle(self._live.read(), [each.path for each in self._engines])

    def request_vote(self, wanted: bool) -> bool:
        """Requests a vote after one of the next dispatches, the same one in all processes."""
        if self._marks is None:
            if jax.process_count() == 1:
                return False
            from healcore.jax.driver.vote_marks import VoteMarks  # loads Orbax

            self._marks = VoteMarks()
        self._marks.request(wanted)
        return True

    def may_save(self, patience: int | None = None) -> bool:
        """Whether optax.MultiSteps is not accumulating. One sync if the optimizer accumulates."""
        return self._live.between_steps()

    # -- engines ----------------------------------------------------------------------------------

    def healing(self) -> dict[str, dict[str, Any]]:
        """Returns engine name -> `Engine.to_dict`. One sync."""
        return in_state.dicts(self._engine, self._engines, self._live.read())

    def load_healing(self, engines: Mapping[str, Mapping[str, Any]]) -> None:
        """Replaces the named engine states."""
        tree = self._live.read()
        self._replace_state(in_state.loaded(self._engine, self._engines, tree, engines))

    def expect_change(self) -> None:
        """Opens every engine's grace window."""
        self._edit_state(in_state.edited(with_change_expected, self._live.read()))

    def undo_window(self) -> str:
        """Returns the reason why the window cannot be undone, or an empty string."""
        if self.may_save():
            return ""
        return "the exception occurred within an accumulation of optax.MultiSteps"

    def finite(self) -> bool:
        """Whether all parameters are finite that were finite at the start.

        If the state does not identify its parameters, checks all arrays except the healing states,
        which contain norms of gradients that were not applied.
        """
        return set(self.nonfinite_weights()) <= self._not_finite

    def nonfinite_weights(self) -> list[str]:
        """Paths of the `_weights` with a NaN or Inf."""
        found = {name: jnp.isfinite(leaf).all() for name, leaf in self._weights().items()}
        return [name for name, finite in jax.device_get(found).items() if not finite]

    def copy_weights(self) -> dict[str, Any]:
        """Returns path -> copy of each trained parameter, in host memory."""
        return {name: _copy(leaf) for name, leaf in self._trained().items()}

    def weights_digest(self) -> str:
        """See `Driver.weights_digest`. One sync per parameter."""
        found = hashlib.blake2b(digest_size=8)
        for leaf in self._weights().values():
            part = leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf
            flat = np.asarray(part).reshape(-1)
            found.update(flat[:: max(1, flat.size // SAMPLE)][:SAMPLE].tobytes())
        return found.hexdigest()

    def losses_of(
        self,
        loss_fn: Callable[..., Any],
        batches: Iterable[Any],
        weights: Mapping[str, Any] | None = None,
        *,
        redraw: bool = False,
    ) -> list[Any]:
        """Calls `loss_fn(state, batch)` for each batch, or `loss_fn(batch)` for nnx objects.

        Replaces the parameters by `weights`, but keeps the current random keys of the state.
        """
        if weights and any(
            getattr(weights.get(name), "shape", None) != leaf.shape
            for name, leaf in self._trained().items()
        ):
            raise WeightsChanged
        live, in_place = self._live.read(), self._live.in_place
        replaced = {**self._without_averages(weights or {})}
        if redraw:
            leaves = jax.tree_util.tree_leaves_with_path(live)
            replaced |= {jax.tree_util.keystr(path): _other_key(leaf) for path, leaf in leaves}
        state = _with(live, replaced)
        try:
            if in_place and replaced:
                self._live.write(state)
            arguments = () if in_place else (state,)
            return [jax.device_get(loss_fn(*arguments, batch)) for batch in batches]
        finally:
            if in_place:
                self._live.write(live)

    def gradient_window(self) -> GradientWindow:
        """Returns the gradients since the last step, which the loop sums."""
        return GradientWindow(self._counters, self._live.read)

    def hyperparameters(self) -> dict[str, Any]:
        """Returns the hyperparameters of optax.inject_hyperparams. One sync."""
        found = jax.device_get(injected_hyperparameters(self._live.read()))
        short = [path.rpartition("['")[2].removesuffix("']") for path in found]
        names = short if len(set(short)) == len(short) else list(found)
        # The shortest decimal number: 0.001 instead of 0.0010000000474974513.
        values = [json_setting(float(str(each))) for each in found.values()]
        return dict(zip(names, values, strict=True))

    def learning_rate(self) -> float | None:
        """The injected rate, or else the rate that the last update received. One sync.

        None unless exactly one rate is known.
        """
        found = {float(rate) for rate in injected_rates(self._live.read())}
        if not found:
            rates = (each["state"]["lr"]["rate"] for each in self.healing().values())
            found = {rate for rate in rates if rate not in (0.0, 1.0)}  # 1.0 if none was passed
        return found.pop() if len(found) == 1 else None

    # -- the run ----------------------------------------------------------------------------------

    def store(self, where: Any) -> CheckpointStore:
        """Returns the default store: memory, and also Orbax if `where` is a directory."""
        from healcore.jax.store import MemoryStore, OrbaxStore  # loads Orbax

        if where is None:
            return MemoryStore()
        return OrbaxStore(where, in_memory=IN_MEMORY)

    def ranks(self) -> Ranks:
        """Returns the exchange between processes. All processes make the first call together."""
        if self._ranks is None:
            self._ranks = Alone()
            if jax.process_count() > 1:
                from healcore.jax.store.coordination import CoordinatedRanks  # loads Orbax

                self._ranks = CoordinatedRanks()
        return self._ranks

    def close(self) -> None:
        """Ends the thread of the votes. The optimizer itself has no hooks to remove."""
        if self._marks is not None:
            self._marks.close()

    # -- internal ---------------------------------------------------------------------------------

    def _weights(self, tree: Any = None) -> dict[str, Any]:
        """Path -> parameter (or floating array, if unknown), in the same order in all processes."""
        tree = without_heal_state(self._live.read() if tree is None else tree)
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        arrays = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        return {
            name: leaf
            for name, leaf in arrays.items()
            if (name in self._parameters if self._parameters else _is_floating(leaf))
        }

    def _trained(self) -> dict[str, Any]:
        """The `_weights` without those that are known not to be trained."""
        return {k: leaf for k, leaf in self._weights().items() if k not in self._averages}

    def _without_averages(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """The trained part of a copy. Empty while it is unknown: the current weights stay."""
        if weights and self._rivals:
            before = self._weights(_with(self._live.read(), weights))
            found = averages(self._rivals, before, self._weights())
            if found is None:
                return {}
            self._averages, self._rivals = found, []
        return {name: leaf for name, leaf in weights.items() if name not in self._averages}

    def _states(self) -> list[HealState]:
        roots = self._live.roots()
        return [in_state.at(roots, each.path) for each in self._engines]

    def _counters(self) -> list[Any]:
        return _counters_of(self._states())

    def _all_polled(self) -> bool:
        return not differ(self._counters(), self._last_counters)

    def _edit_state(self, tree: Any) -> None:
        """Makes `tree` the live state, from which the next step has to start, without a step."""
        all_polled = self._all_polled()
        if not self._live.in_place:
            self._edit, self._edit_is_new = self._edit + 1, True
            tree = in_state.edited(lambda state: with_edit(state, self._edit), tree)
        self._live.write(tree)
        if all_polled:  # otherwise `poll_step` still has to return the step before the edit
            self._last_counters = self._counters()

    def _replace_state(self, tree: Any) -> None:
        """Makes `tree` the live state, and drops a step that was not polled."""
        self._edit_state(tree)
        self._remember_step()

    def _remember_step(self) -> None:
        self._reader.restart(self._states())
        self._last_counters = self._counters()


_LINE = "state = healer.update(step(healer.state, batch))"
_STALE = (
    "this state was computed from an older state than healer.state, which a rollback, a resume or "
    f"expect_change() has replaced. Write `{_LINE}`, so that each step starts from "
    "healer.state. For a state that you have restored yourself: "
    "with_heal_state(without_heal_state(mine), like=healer.state)"
)


def _counters_of(states: list[HealState]) -> list[Any]:
    """The array with each engine's counters. Each step replaces these arrays."""
    return [array_of(each.heal_engine) for each in states]


def _is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", np.dtype(object)), jnp.floating)


def _copy(leaf: Any) -> Any:
    """A copy in host memory, which a donation of the state does not delete."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if next(iter(leaf.sharding.device_set)).platform == "cpu":
        return jnp.copy(leaf)
    return jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host"))


def _other_key(leaf: Any) -> Any:
    """Another random key, or the leaf if it is no key. Raw keys and counts of keys are uint32."""
    kind = getattr(leaf, "dtype", None)
    if kind is not None and jnp.issubdtype(kind, jax.dtypes.prng_key):
        data = _other_key(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return leaf + 1 if kind == np.uint32 else leaf


def _with(live: Any, weights: Mapping[str, Any]) -> Any:
    """Replaces leaves of a state by `weights`."""

    def one(path: Any, leaf: Any) -> Any:
        saved = weights.get(jax.tree_util.keystr(path), leaf)
        moved = isinstance(saved, jax.Array) and saved is not leaf
        return jax.device_put(saved, leaf.sharding) if moved else saved

    return jax.tree_util.tree_map_with_path(one, live)
