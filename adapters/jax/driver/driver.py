"""`JaxDriver`: reads and replaces the state of a JAX run for the Healer."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from healcore.core.array_namespace import shortest_decimal
from healcore.core.engine import Engine
from healcore.core.engine.state import UNKNOWN_RATE
from healcore.jax import heal_state, optax_states
from healcore.jax.driver.engines import (
    JaxWeights,
    edit_numbers,
    find_engines,
    fits_moments,
    map_states,
    number_names,
    transferring,
    with_engines,
)
from healcore.jax.driver.program_state import (
    floating_arrays,
    program_state_of,
    short_names,
    to_live_leaf,
)
from healcore.jax.driver.step_reader import (
    LOOP_LINE,
    BlockRecords,
    Dispatch,
    Scan,
    StepReader,
    Update,
    any_replaced,
    compiled_block,
    counters_of,
)
from healcore.jax.heal_state import (
    HealState,
    HealStateError,
    with_change_expected,
    with_edit,
)
from healcore.jax.optax_states import injected_rates
from healcore.jax.trees import PyTree, nodes
from healcore.policy import PolicyLike, engine_of
from healcore.runtime.driver import STEPPED, WEIGHTS, Engines, NumberRange, json_setting
from healcore.runtime.faults.microbatches import Gradients
from healcore.runtime.store.checkpoints import IN_MEMORY, StateMismatch
from healcore.runtime.store.ranks import Alone, Ranks
from healcore.runtime.store.store import CheckpointStore

if TYPE_CHECKING:
    from healcore.jax.store.coordination import VoteMarks


class JaxDriver(JaxWeights):
    """Implements `healcore.runtime.driver.Driver` for a JAX run.

    The Healer decides, and this class reads and replaces the state for it. A compiled step returns
    a new state, so the driver has to know which state is the live one: the program passes it by
    `update`, and takes it from `live`. An edit, such as a rollback, replaces the live state. The
    next step has to start from it. `update` raises an error for any other step.

    Args:
        state: a pytree that contains the state of `protect`, `heal` or `heal_zclip` (one for each
            optimizer), or a mapping of names to nnx objects, which are updated in place.
        policy: the optimizer's policy.

    Raises:
        HealStateError: `state` has no healing state, or its policy differs.
    """

    framework = "jax"

    @transferring
    def __init__(self, state: PyTree, policy: PolicyLike = "default") -> None:
        self._engine: Engine = engine_of(policy)
        self._live = program_state_of(state)
        """The state of the program. `ProgramState` hides its form."""
        tree = self._live.read()
        self._engines = find_engines(tree, self._live.trained, self._engine)
        self._changes: list[str] = []
        """Changes of the structure of the state that `structure_changes` has not returned yet."""
        self._not_finite = frozenset(self.nonfinite_weights())
        self.warnings: list[str] = []
        if not floating_arrays(tree):
            self.warnings.append(_NO_PARAMETERS)
        self.on_step: Callable[[], None] = lambda: None
        multi_steps = nodes(optax.MultiStepsState, tree)
        accumulates = any(nodes(HealState, state) for _, state in multi_steps)
        self._reader = StepReader(self._engines, accumulates, self.warnings.append)
        self._votes: VoteMarks | None = None
        """The votes of several processes, from the call of `ranks` on."""
        self._given = state
        self._programs: dict[Any, Any] = {}
        """Identity of an update of `Healer.scan`, structure of the state, `donate` -> its block."""
        self.window = SummedGradients(lambda: counters_of(self._states()))
        states = self._states()
        self._reader.restart(states)
        self._edit = max(edit_numbers(states))
        """Number of the last edit of the state, such as a rollback."""
        self._edit_is_new = False
        """Whether no state of the program has continued from the last edit yet."""

    # -- steps ------------------------------------------------------------------------------------

    @property
    def live(self) -> Any:
        """The live state, in the form in which the program passed its state.

        After an edit of the Healer it is another object. `Healer.state` returns it.
        """
        return self._live.state

    @property
    def state_is_in_place(self) -> bool:
        """Whether the state consists of nnx objects, which a step updates in place.

        The program then passes no state to `update`.
        """
        return self._live.in_place

    def update(self, state: PyTree = None) -> None:
        """Sets the state that a step has returned.

        Args:
            state: the new state, or None for nnx objects, which the step has updated in place.

        Raises:
            HealStateError: `state` is not a state of this run, or was computed from a state before
                the Healer's last edit. The live state is unchanged.
        """
        self.on_step()
        if state is None and self._live.in_place:
            return
        self._set_state(state)

    def _set_state(self, state: PyTree) -> None:
        """Checks a state of the program, and makes it the live state."""
        before, self._live.state = self._live.state, state
        try:
            try:
                self._live.check()
            except HealStateError as error:
                if not self._continue_with_new_structure():
                    raise
                self._changes.append(error.differences)
            states = self._states()
            if self._edit_is_new:
                self._edit_is_new = any(each != self._edit for each in edit_numbers(states))
            if self._edit_is_new:
                raise HealStateError(_STALE)
        except HealStateError:
            self._live.state = before
            raise

    def _continue_with_new_structure(self) -> bool:
        """Makes a state of another structure the state of the run, if it is a whole state.

        A program may widen a layer between two calls: it makes new parameters, and a new state of
        the optimizer for them. A whole state has every engine, and moments with the shapes of its
        parameters. It becomes the state of the run, with its own detectors and budgets.
        """
        try:
            live = program_state_of(self._live.state)
            tree = live.read()
            engines = find_engines(tree, live.trained, self._engine)
        except HealStateError:
            return False
        names = [entry.name for entry in engines]
        if live.in_place or names != [entry.name for entry in self._engines]:
            return False
        if not all(fits_moments(tree, entry) for entry in engines):
            return False
        self._live, self._engines = live, engines
        states = self._states()
        self._reader.change_structure(engines, states)
        self._edit_is_new = False
        return True

    def structure_changes(self) -> list[str]:
        """See `Driver.structure_changes`."""
        changes = self._changes
        self._changes = []
        return changes

    def take_dispatch(self) -> Dispatch | None:
        """See `Driver.take_dispatch`. Every new state counts as a step.

        With optax.MultiSteps an engine may not have judged the step. Only the device knows this,
        and `StepRecord.step` then does not change.
        """
        return self._reader.dispatch(self._states(), self._votes)

    def begin_scan(self, update: Update, state: PyTree, *, donate: bool) -> Scan:
        """Begins a loop of compiled blocks, see `Healer.scan`.

        Args:
            update: the program's function of the state and the number of the update.
            state: the state with which the program begins the loop.
            donate: whether a block reuses the memory of the state that it begins with.

        Returns:
            The loop, whose blocks the Healer runs. Blocks of the same `update` are compiled once.

        Raises:
            HealStateError: `state` is neither the state of the Healer nor one computed from it.
        """
        if state is not self._live.state and state is not self._given:
            self._set_state(state)
            self._reader.skip_to(self._states())  # the program has taken no step
        live = self._live.state
        key = id(update), jax.tree.structure(live), donate
        if key not in self._programs:  # the block keeps `update`, and so its id
            paths = [entry.path for entry in self._engines]
            self._programs[key] = compiled_block(update, live, paths, donate=donate)
        return Scan(lambda: self.live, self.take_block, self._programs[key])

    def take_block(self, state: PyTree, records: BlockRecords) -> None:
        """Sets the state after a block of `Healer.scan`.

        Args:
            state: the state after the last update of the block.
            records: the records of its updates, which the ring in the state has no room for.

        Raises:
            HealStateError: as in `update`.
        """
        self.update(state)
        self._reader.block = records

    def request_vote(self) -> None:
        """See `Driver.request_vote`. The vote follows one of the next dispatches."""
        assert self._votes is not None, "only called with several processes"
        self._votes.request()

    @transferring
    def expect_change(self) -> None:
        """See `Driver.expect_change`. The next step has to start from `live`."""
        self._edit_state(map_states(with_change_expected, self._live.read()))

    # -- the state --------------------------------------------------------------------------------

    @transferring
    def state(self) -> dict[str, Any]:
        """The live state to save, without healing states. Copies nothing.

        Returns:
            Name of an item -> tree, see `ProgramState.items`.

        Raises:
            StateMismatch: the program has changed the structure of nnx objects in place.
        """
        try:
            return self._live.items()
        except HealStateError as error:
            if not self._live.in_place:
                raise
            raise StateMismatch(None, [str(error)]) from error

    @transferring
    def engines(self) -> dict[str, dict[str, Any]]:
        """See `Driver.engines`. One sync per engine."""
        tree = self._live.read()
        states = {}
        for entry in self._engines:
            state = heal_state.engine_state(self._engine, entry.state_in(tree))
            states[entry.name] = self._engine.to_dict(state)
        return states

    @transferring
    def load(
        self,
        state: Mapping[str, Any] | None,
        engines: Mapping[str, Mapping[str, Any]] = {},
    ) -> None:
        """See `Driver.load`. The next step has to start from `live`."""
        if state is None:
            tree = self._live.read()
        else:
            tree = self._live.restored(state)
        self._edit_state(with_engines(self._engine, self._engines, tree, engines))
        self._reader.restart(self._states())

    def may_save(self, patience: int | None = None) -> bool:
        """See `Driver.may_save`. Only optax.MultiSteps accumulates, which costs one sync.

        Args:
            patience: not needed in JAX, where no accumulation is abandoned.
        """
        for _, accumulator in nodes(optax.MultiStepsState, self._live.read()):
            if jax.device_get(accumulator.mini_step):
                return False
        return True

    def undo_window(self) -> str:
        """See `Driver.undo_window`. A step that has raised or was not taken has changed nothing.

        The accumulators of optax.MultiSteps are a part of the state.
        """
        return ""

    # -- memory and numbers -----------------------------------------------------------------------

    def memory_profile(self) -> tuple[str, bytes]:
        """See `Driver.memory_profile`. The arrays by the lines that made them, for `pprof`."""
        return ".prof", jax.profiler.device_memory_profile()

    def settings(self) -> dict[str, Any]:
        """See `Driver.settings`.

        The settings are the hyperparameters of optax.inject_hyperparams, the constants of the
        optimizers, and a digest of the weights.
        """
        tree = self._live.read()
        injected = optax_states.injected_leaves(tree)
        found: dict[str, Any] = {}
        values = jax.device_get([*injected.values()])
        for name, value in zip(short_names(injected), values, strict=True):
            # 0.001 instead of 0.0010000000474974513.
            found[name] = json_setting(shortest_decimal(value))
        for entry in self._engines:
            owner = entry.protected(tree)
            if owner is not None:
                constants = optax_states.constants_of(owner.inner_state)
                # Another version may compute the same update with other constants.
                if constants:
                    found[f"constants of {entry.name} (optax {optax.__version__})"] = constants
        digest = self.digest()
        if any(engine["state"]["step"] for engine in self.engines().values()):
            digest += STEPPED
        found[WEIGHTS] = digest
        return found

    def learning_rates(self, engines: Engines | None = None) -> dict[str, float | None]:
        """See `Driver.learning_rates`. One sync.

        The rate that `protect` finds in its optimizer, or else the rate that the last update
        received. Other rates in the state may have another unit than the engine's.
        """
        tree = self._live.read()
        found: dict[str, float | None] = {}
        if engines is None:
            states = self.engines()
        else:
            states = engines
        for entry in self._engines:
            owner = entry.protected(tree)
            injected = []
            if owner is not None:
                injected = injected_rates(owner)
            found[entry.name] = None
            if len(injected) == 1:
                found[entry.name] = float(jax.device_get(injected[0]))
            elif entry.name in states:
                rate = states[entry.name]["state"]["lr"]["rate"]
                if rate != UNKNOWN_RATE:
                    found[entry.name] = rate
        return found

    @transferring
    def numbers(self) -> dict[str, NumberRange]:
        """See `Driver.numbers`. One sync per engine.

        These are the numbers of `optax.inject_hyperparams` within `protect`, for example ``b2``, or
        the path in the state if several optimizers have a ``b2``. Numbers that
        `optax.inject_hyperparams` schedules are left out, because they cannot be held.
        """
        tree = self._live.read()
        seen = []
        for entry in self._engines:
            numbers = jax.device_get(entry.state_in(tree).heal_numbers)
            if numbers is not None:
                seen += optax_states.read_ranges(numbers)
        found = zip(number_names(self._engines, tree), seen, strict=True)
        return {name: NumberRange(*each) for name, each in found if each is not None}

    @transferring
    def hold_numbers(self, ranges: Mapping[str, NumberRange]) -> None:
        """See `Driver.hold_numbers`. The next step has to start from `live`. One sync."""
        tree = self._live.read()
        names = iter(number_names(self._engines, tree))

        def held(state: HealState) -> HealState:  # in the order of the engines
            if state.heal_numbers is None:
                return state
            count = state.heal_numbers.shape[1]
            limits = [ranges.get(name) for name in itertools.islice(names, count)]
            return state._replace(heal_numbers=optax_states.make_numbers(limits))

        self._edit_state(map_states(held, tree))

    # -- the run ----------------------------------------------------------------------------------

    def store(self, where: Any) -> CheckpointStore:
        """See `Driver.store`."""
        from healcore.jax.store import MemoryStore, OrbaxStore  # loads Orbax

        if where is None:
            return MemoryStore()
        return OrbaxStore(where, in_memory=IN_MEMORY)

    def ranks(self) -> Ranks:
        """See `Driver.ranks`.

        All processes make the call together, at the same position in the program, because it makes
        numbered keys for the exchange.
        """
        if jax.process_count() == 1:
            return Alone()
        from healcore.jax.store.coordination import CoordinatedRanks, VoteMarks

        self._votes = VoteMarks()
        return CoordinatedRanks()

    def close(self) -> None:
        """See `Driver.close`. Ends the thread of the votes.

        The optimizer itself has no hooks to remove: the program's step contains healcore's.
        """
        if self._votes is not None:
            self._votes.close()

    def _states(self) -> list[HealState]:
        """The HealState of each engine in the live state."""
        return [self._live.node(entry.state_in) for entry in self._engines]

    def _edit_state(self, tree: PyTree) -> None:
        """Makes `tree` the live state, from which the next step has to start. It counts no step."""
        has_read = self._reader.has_read(self._states())
        if not self._live.in_place:
            self._edit += 1
            self._edit_is_new = True
            tree = map_states(lambda state: with_edit(state, self._edit), tree)
        self._live.write(tree)
        if has_read:  # otherwise `take_dispatch` still has to return the step before the edit
            self._reader.skip_to(self._states())


def _zeros_of(leaf: jax.Array) -> Any:
    """Zeros in the form of a live leaf."""
    return to_live_leaf(jnp.zeros_like(leaf), leaf)


_STALE = (
    "this state was computed from an older state than healer.state, which a rollback, a resume or "
    f"expect_change() has replaced. Write `{LOOP_LINE}`, so that each step starts from "
    "healer.state. For a state that you have restored yourself: "
    "with_heal_state(without_heal_state(mine), like=healer.state)"
)
_NO_PARAMETERS = (
    "the state has no parameters outside of the optimizer's state, so no checkpoint holds them: a "
    "restart or a rollback would combine old moments with new weights. Add the parameters, as in "
    'state=(params, opt_state), with nnx state={"model": model, "optimizer": optimizer}'
)


# -- gradients that a program sums itself ----------------------------------------------------------


class SummedGradients(Gradients):
    """Implements `healcore.runtime.faults.microbatches.Gradients`: the loop sums the gradients.

    If a batch does not fit the memory, the Healer's loop repeats it in smaller parts. In JAX the
    program sums their gradients itself, so this class only knows whether a step has been taken.

    Args:
        counters: returns arrays that every optimizer step replaces by other objects.
    """

    def __init__(self, counters: Callable[[], list[Any]]) -> None:
        self._counters = counters
        self._begin: list[Any] | None = None

    def is_accumulating(self) -> bool:
        """Whether a window has begun without a step since.

        A part of a batch is then pending, and the loop may not repeat the batch as a whole.
        """
        return self._begin is not None and not self.has_stepped()

    def begin_window(self) -> None:
        """Records the counters of the current state, before the first part of a batch."""
        self._begin = self._counters()

    def has_stepped(self) -> bool:
        """Whether the state has been replaced since `begin_window`."""
        return self._begin is not None and any_replaced(self._counters(), self._begin)

    def redo_window(self, kept_alive: list[Any], *, clear_cache: bool) -> None:
        """Frees unreferenced arrays before a batch is repeated in smaller parts.

        Args:
            kept_alive: objects that the loop has kept, such as the batch. Emptied.
            clear_cache: ignored, because XLA caches no memory of the device.
        """
        del clear_cache
        kept_alive.clear()
        gc.collect()  # an exception and its frames refer to each other

    def join_ranks(self, ranks: Ranks) -> str:
        """Reason why several processes cannot repeat a step together.

        Args:
            ranks: the exchange between the processes. Not used.
        """
        del ranks
        return (
            "the other processes wait in collectives of the compiled step, which this process has "
            "left"
        )
