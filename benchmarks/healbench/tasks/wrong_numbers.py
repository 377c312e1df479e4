"""Faults of an optimizer's own numbers: betas, momentum and weight decay, wrong for some steps.

The program sets the numbers before each step, as a schedule does, and some of its entries are
wrong. Entries go by the number of the step, which comes with the batch: a run that is rolled back
sets the same ones again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.healbench.problem import Problem, task
from benchmarks.healbench.tasks.loops import with_step_number
from benchmarks.healbench.tasks.middle_faults import small_transformer
from benchmarks.healbench.tasks.short_runs import METRICS, PLACES, adamw_mlp, momentum_mlp

FAMILY = "optimizer numbers"


def _with_wrong_number(
    seed: int, build: Callable[[int], Problem], name: str, value: Any, first: int, steps: int
) -> Problem:
    """Number `name` of the optimizer is `value` for that many steps from `first` on."""
    problem = build(seed)
    (optimizer,) = problem.optimizers.values()
    right = optimizer.defaults[name]

    def numbers(step: int) -> dict[str, Any]:
        return {name: value if first <= step < first + steps else right}

    return with_step_number(problem, numbers=numbers)


def _wrong(
    fault: str,
    places: str,
    build: Callable[[int], Problem],
    name: str,
    value: Any,
    steps: int,
    about: str,
) -> None:
    """Registers a task for each of the places, such as "early late"."""
    healthy = getattr(build, "__name__", "")
    for place in places.split():
        first = PLACES[place]
        register = task(
            FAMILY,
            METRICS[healthy],
            name=f"{fault}_{place}",
            about=f"`{healthy}`; {about} in steps {first} to {first + steps - 1}.",
            reference=healthy,
        )
        register(
            partial(
                _with_wrong_number,
                build=build,
                name=name,
                value=value,
                first=first,
                steps=steps,
            )
        )


_wrong(
    "swapped_betas",
    "early middle late",
    adamw_mlp,
    "betas",
    (0.999, 0.9),
    60,
    "AdamW's betas are swapped",
)
_wrong(
    "second_beta_0",
    "middle",
    small_transformer,
    "betas",
    (0.9, 0.0),
    50,
    "AdamW's second beta is 0",
)
_wrong(
    "momentum_0.999",
    "early",
    momentum_mlp,
    "momentum",
    0.999,
    60,
    "the momentum is 0.999",
)
_wrong(
    "momentum_1.1",
    "middle late",
    momentum_mlp,
    "momentum",
    1.1,  # 1 + 0.1 instead of 1 - 0.1
    40,
    "the momentum is 1.1",
)
_wrong(
    "decay_100",
    "middle late",
    small_transformer,
    "weight_decay",
    100.0,
    20,
    "AdamW's weight decay is 100",
)
_wrong(
    "decay_3_sgd",
    "early middle late",
    momentum_mlp,
    "weight_decay",
    3.0,
    40,
    "the weight decay is 3",
)
