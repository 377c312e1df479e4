"""What the log and the console say about a rollback."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healcore.console import counted, first_of
from healcore.core.decision import Cause, names
from healcore.events.schema import flag_names, lr_text, sentence
from healcore.runtime.run.compare.holding import LASTING_STEPS
from healcore.runtime.run.orders import Order, RollbackRecord

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

INTENDED = f"the program has set this for more than {LASTING_STEPS} steps, so it is intended"
"""Why a number that was held is used, as a clause."""


def report_rollback(run: Run, done: RollbackRecord) -> None:
    """Writes the events and the console line of a rollback.

    The event `rollback` has all facts. The event `data` says whether the loaders were rewound: a
    reader of the log would otherwise take the batches that follow for the batches of before.

    Args:
        run: the run, for its log and its policy.
        done: the rollback, after the checkpoint was restored.
    """
    lr_at_fault = None
    if done.lr is not None and done.lr_at_fault is not None:
        lr_at_fault = done.lr_at_fault.get(done.engine)
    held = None
    if done.held is not None:
        held = done.held.sentences() or None
    problem = None
    if done.arrays:
        problem = nonfinite_save(done)
    rollback = run.log.event(
        "rollback",
        step=done.step,
        number=done.number,
        onset=done.onset,
        cause=Cause(done.cause),
        checkpoint=done.checkpoint,
        by=_decided_by(done),
        problem=problem,
        outcome="done",
        lr=done.lr,
        lr_limit=done.lr_limit,
        lr_at_fault=lr_at_fault,
        lr_scale_before=done.lr_scale_before,
        lr_scale=done.lr_scale,
        batches=[list(each) for each in done.batches],
        steps_repeated=done.repeated or None,
        steps_lost=done.lost or None,
        why=done.why_lost or None,
        held=held,
        moments_reset=run.policy.rollback.reset_moments or None,
    )
    data = f"continues forward: {done.why_forward}" if done.why_forward else "rewound"
    run.log.event("data", step=done.target, outcome=data, rewound=not done.why_forward)
    line = f"step {done.index}: {reason_of(done)}"
    if not done.intended:
        line += f", since step {done.since}"
    line += f"; {sentence(rollback)}"
    if not done.lost:  # otherwise the sentence has said what became of the data
        line += f", data {data}"
    may_limit = run.policy.may_limit_lr and not done.untrained
    if done.lr is None and may_limit and not lr_text(rollback):
        line += (
            "; the learning rate is unknown and stays as it is: pass learning_rate=rate to "
            "tx.update, so that a rollback can lower it"
        )
    run.log.warning(line)


def _decided_by(done: RollbackRecord) -> str | None:
    """The field `by` of a rollback's event, or None for a rule or a hook."""
    if done.attempt:
        return "nonfinite_steps"
    if done.intended:
        return "intended_numbers"
    if done.better_step is not None:
        return "earlier_weights"
    if done.arrays:
        return "state"
    return None


def reason_of(order: Order) -> str:
    """Why a rollback is ordered, for the line and the event of the rollback.

    Args:
        order: the order of the rollback.

    Returns:
        A clause: "NaN in the loss", "ordered by a hook".
    """
    if order.attempt:
        return no_finite_step(order)
    if order.intended:
        return f"{order.intended}: {INTENDED}"
    if order.better_step is not None:
        return f"the weights of step {order.better_step} are better on the same batches"
    if order.arrays:
        return nonfinite_save(order)
    return flag_names(names(Cause(order.cause))) or "ordered by a hook"


def nonfinite_save(order: Order) -> str:
    """The reason of a rollback for a save with NaN or Inf, as a clause.

    Args:
        order: an order with `arrays`. Up to three of their names are in the clause.
    """
    return f"a save has found NaN or Inf in {first_of(order.arrays)}"


def no_finite_step(order: Order) -> str:
    """The reason of an attempt to bring back a dead run, as a clause with the number of steps.

    Args:
        order: the order of the attempt. Its steps `since` to `index` had no finite gradient.
    """
    steps = counted(order.index - order.since + 1, "step")
    return f"{steps} in a row had no finite gradient although the weights are finite"
