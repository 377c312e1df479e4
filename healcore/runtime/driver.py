"""What the `Healer` needs from a framework; the adapters have one driver each.

A driver knows the live state and the engine states in it. It decides nothing: which checkpoint,
what to keep of budgets and learning rate, when to save, all of that is the Healer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from healcore.core.step_record import StepRecord
from healcore.runtime.store.protocol import CheckpointStore
from healcore.runtime.store.ranks import Ranks


class PendingDispatch(Protocol):
    """A step, or a compiled loop of many, whose records are on their way to the host."""

    count: int
    """Steps that it is taken to have; `steps` says how many it had."""

    def steps(self) -> list[list[StepRecord]]:
        """Its steps, oldest first; waits only if they have not arrived yet.

        Of each one record per engine that judged, several where one judged several times in it.
        """
        ...


class Generators(Protocol):
    """Random generators, read and set as a whole."""

    def state_dict(self) -> dict[str, Any]:
        """Their states now."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from saved states."""
        ...


class Driver(Protocol):
    """One framework's side of a healed run."""

    framework: str
    """`torch` or `jax`."""

    def items(self) -> dict[str, Any]:
        """The live state to save: name -> tree, or object with `state_dict`. Without engines.

        Nothing is copied; the store does that.
        """
        ...

    def replace(self, restored: Mapping[str, Any]) -> None:
        """Puts `Restored.state` of `items` into the live state, and zeroes accumulators.

        Accumulators are gradients not yet stepped with, and what optax.MultiSteps collects.

        Raises:
            StateMismatch: it does not fit; nothing has been touched.
        """
        ...

    def healing(self) -> dict[str, dict[str, Any]]:
        """Engine name -> `Engine.to_dict` of its state now. A sync."""
        ...

    def load_healing(self, engines: Mapping[str, Mapping[str, Any]]) -> None:
        """Replaces engine states; those not named stay.

        Raises:
            StateError: a state is of another policy; nothing has been touched.
        """
        ...

    def poll_step(self) -> PendingDispatch | None:
        """What was taken since the last call, its copy to the host begun; None: nothing was."""
        ...

    def may_save(self) -> bool:
        """False in the middle of an accumulation, whose half a checkpoint would not hold."""
        ...

    def finite(self) -> bool:
        """Whether all parameters are finite now. A sync."""
        ...

    def losses_of(
        self,
        loss_fn: Callable[..., Any],
        batches: Iterable[Any],
        state: Mapping[str, Any] | None = None,
    ) -> list[float]:
        """The loss of each batch; nothing of the run changes by it.

        Args:
            loss_fn: takes the batch, and before it the state where that is a value (JAX).
            batches: that the loop was given.
            state: `Restored.state` whose weights are used; None: the present ones. Those are copied
                meanwhile where they are changed in place.

        Raises:
            StateMismatch: the state does not fit.
        """
        ...

    def learning_rate(self) -> float | None:
        """The user's own learning rate now, without the multiplier; None where it is not known."""
        ...

    def expect_change(self) -> None:
        """Opens every engine's grace window."""
        ...

    def decline(self) -> None:
        """Tells every engine that the rollback it ordered is not carried out, `Engine.decline`."""
        ...

    def state_bytes(self) -> int:
        """Size of one copy of the state in this process, moments not made yet included."""
        ...

    def store(
        self, where: Any, nonfinite_ok: tuple[str, ...], *, trust: bool = False
    ) -> CheckpointStore:
        """The default store: memory, and behind it a directory if `where` is one (None: none).

        `trust` as in `Healer`.
        """
        ...

    def ranks(self) -> Ranks:
        """The processes of this run."""
        ...

    def generators(self) -> Generators | None:
        """The framework's global random generators; None where the state holds its keys itself."""
        ...

    def close(self) -> None:
        """Takes off what it has put on."""
        ...
