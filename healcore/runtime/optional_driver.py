"""Methods that a `Driver` may have, each group as a protocol.

Frameworks differ in how a loss and a state reach healcore. A torch step does not see the loss, so
the program reports it. A step of JAX returns a new state, which the program passes on. A driver has
a group if it has all methods of its protocol. `OptionalMethods` says which groups a driver has, and
raises the errors for the methods of the Healer that need another group:

    protocol          framework   methods of the Healer
    --------------    ---------   ----------------------------
    ObservesLosses    torch       loss, observe
    TakesStates       JAX         update
    CompilesLoops     JAX         scan
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from healcore.runtime.driver import Driver, LiveState
from healcore.runtime.healer_error import wrong_framework


@runtime_checkable
class ObservesLosses(Protocol):
    """A driver to which the program reports its losses. In torch the step does not see them."""

    def observe(self, loss: Any, optimizer: str | None = None, *, weight: float = 1.0) -> None:
        """Takes the loss of one (micro-)batch, before the optimizer's step. See `Healer.observe`.

        Args:
            loss: a number, or a tensor with one element, which may be on the device.
            optimizer: name of the optimizer that this loss trains, or None for all optimizers.
            weight: weight of this loss in the mean of the step.
        """
        ...

    def observe_eval(self, eval_loss: Any, optimizer: str | None = None) -> None:
        """Takes the loss of an evaluation. The arguments are as for `observe`."""
        ...


@runtime_checkable
class TakesStates(Protocol):
    """A driver of a framework whose step returns a new state, as in JAX."""

    def update(self, state: LiveState | None = None) -> None:
        """Makes the result of a step the live state. See `Healer.update`.

        Args:
            state: the new state, or None for a state that was changed in place.
        """
        ...


class CompiledLoop(Protocol):
    """One call of `Healer.scan`: a loop that the framework compiles in blocks of updates."""

    def run(self, first: int, count: int) -> None:
        """Dispatches a block. Its records are a dispatch, which `take_dispatch` returns.

        Args:
            first: number of the block's first update.
            count: number of its updates.
        """
        ...

    def outputs(self) -> Any:
        """The outputs of all updates, stacked along a new first axis."""
        ...


@runtime_checkable
class CompilesLoops(Protocol):
    """A driver of a framework that compiles whole loops, as in JAX."""

    def begin_scan(
        self, update: Callable[..., Any], state: LiveState, *, donate: bool
    ) -> CompiledLoop:
        """Begins a loop.

        Args:
            update: the program's function: state and number of the update -> state and outputs.
            state: the state to begin with.
            donate: whether a block reuses the memory of the state that it begins with.
        """
        ...


class OptionalMethods(NamedTuple):
    """The optional methods of one driver. A group is the driver, or None if the driver lacks it.

    The Healer asks once, when it opens a run, because `isinstance` with a protocol takes 11 us in
    Python 3.11 and `Healer.observe` runs in each step.
    """

    framework: str = ""
    """Framework of the driver, for messages."""
    losses: ObservesLosses | None = None
    """The driver if the program reports losses (torch)."""
    states: TakesStates | None = None
    """The driver if the program passes states (JAX)."""
    loops: CompilesLoops | None = None
    """The driver if it compiles whole loops (JAX)."""

    @classmethod
    def of(cls, driver: Driver) -> OptionalMethods:
        """Finds the methods that a driver has.

        Args:
            driver: the driver of an open run.
        """
        losses, states, loops = None, None, None
        if isinstance(driver, ObservesLosses):
            losses = driver
        if isinstance(driver, TakesStates):
            states = driver
        if isinstance(driver, CompilesLoops):
            loops = driver
        return cls(driver.framework, losses, states, loops)

    def for_losses(self, method: str) -> ObservesLosses:
        """The driver, for a method of the Healer that reports a loss.

        Args:
            method: the method, as in "healer.observe(loss)", for the message.

        Raises:
            HealerError: the framework's step has the loss itself.
        """
        if self.losses is None:
            advice = (
                "pass the loss to the optimizer, as in tx.update(grads, opt_state, params, "
                "value=loss), and the new state to healer.update(state)"
            )
            raise wrong_framework(method, "torch", self.framework, advice)
        return self.losses

    def for_states(self) -> TakesStates:
        """The driver, for `Healer.update`.

        Raises:
            HealerError: a step of the framework changes the state in place.
        """
        if self.states is None:
            advice = (
                "a step changes the state in place, so only call optimizer.step(), in a loop over "
                "healer.batches or healer.steps, or before healer.after_step()"
            )
            raise wrong_framework("healer.update(state)", "JAX", self.framework, advice)
        return self.states

    def for_loops(self) -> CompilesLoops:
        """The driver, for `Healer.scan`.

        Raises:
            HealerError: the framework compiles no loop as a whole.
        """
        if self.loops is None:
            advice = (
                "no loop is compiled as a whole, so write `for step in healer.steps(n)` around the "
                "training step"
            )
            raise wrong_framework("healer.scan(...)", "JAX", self.framework, advice)
        return self.loops
