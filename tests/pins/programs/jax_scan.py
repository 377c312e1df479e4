"""A loop in JAX that is compiled as a whole. Its step calls back to be traced and interrupted."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import io_callback

from healcore import Healer
from tests.pins.programs.interruptions import POLICY, RUN, Run, main
from tests.pins.programs.jax_loader import arrays_of, initial_state, step_of

CURRENT: list[Run] = []
"""The start that the compiled program calls back to."""


def called(step: Any, loss: Any) -> None:
    run, number = CURRENT[-1], int(step)
    run.trained(number, number, float(loss))
    run.interrupt("after", number)


@cache
def update() -> Any:
    def one(state: Any, number: jax.Array) -> tuple[Any, Any]:
        inputs = jax.random.normal(jax.random.fold_in(jax.random.key(1), number), (4, 4))
        state, loss = step_of(state, inputs, jnp.tanh(inputs.sum(1, keepdims=True)))
        io_callback(called, None, number, loss, ordered=True)
        return state, loss

    return one


def train(run: Run) -> None:
    CURRENT.append(run)
    state = initial_state()
    with Healer(POLICY, state=state, store=run.store, **RUN) as healer:
        state, _ = healer.scan(update(), state, 48, every=4)
    run.ended(healer.step, arrays_of(healer.state))


if __name__ == "__main__":
    main(train)
