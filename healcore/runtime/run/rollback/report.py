"""What the log and the console say about a rollback."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healcore.console import counted, first_of
from healcore.core.decision import Cause, names_of
from healcore.events.models import EventRecord
from healcore.events.schema import sentence
from healcore.events.sentences import flags_text, lr_text
from healcore.runtime.run.compare.holding import LASTING_STEPS
from healcore.runtime.run.orders import Order, OrderReason, RollbackRecord

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
    rollback = _write_event(run, done)
    data = "rewound"
    if done.rewind_obstacle:
        data = f"continues forward: {done.rewind_obstacle}"
    run.log.event("data", step=done.continues_at, outcome=data, rewound=not done.rewind_obstacle)
    may_limit = run.policy.may_limit_lr and not done.order.is_harmless
    run.log.warning(_line_of(done, rollback, data, may_limit=may_limit))
    epoch = run.loaders.epoch_loop.returns_to
    if epoch is not None:
        # Before the program's code after the pass: it may print a row for the restored weights.
        run.log.info(
            f"step {done.continues_at}: this pass over the data ends here, and then "
            f"healer.epochs yields epoch {epoch} again"
        )


def _write_event(run: Run, done: RollbackRecord) -> EventRecord:
    """Writes the event `rollback`, and returns it as a record."""
    order, changes = done.order, done.order.changes
    lr_at_fault = None
    if done.lr is not None and changes.lr_at_fault is not None:
        lr_at_fault = changes.lr_at_fault.get(done.engine)
    held = None
    if changes.held is not None:
        held = changes.held.sentences() or None
    problem = None
    if order.arrays:
        problem = nonfinite_save(order)
    return run.log.event(
        "rollback",
        step=done.step,
        number=done.number,
        onset=done.onset,
        cause=Cause(done.cause),
        checkpoint=done.continues_at,
        by=_decided_by(order),
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


def _line_of(done: RollbackRecord, rollback: EventRecord, data: str, *, may_limit: bool) -> str:
    """The console line of a rollback.

    Args:
        done: the rollback.
        rollback: its event.
        data: what became of the loaders, as a clause.
        may_limit: whether the policy may limit the learning rate for this order.
    """
    order = done.order
    line = f"step {order.index}: {reason_of(order)}"
    if order.reason not in (OrderReason.INTENDED, OrderReason.BATCH):
        line += f", since step {order.first_alarm_of_cause}"
    line += f"; {sentence(rollback)}"
    if not done.lost:  # otherwise the sentence has said what became of the data
        line += f", data {data}"
    if done.lr is None and may_limit and not lr_text(rollback):
        line += (
            "; the learning rate is unknown and stays as it is: pass learning_rate=rate to "
            "tx.update, so that a rollback can lower it"
        )
    return line


def report_before_kill(run: Run, resumed: int) -> None:
    """Reports the last rollback if the process was killed after its commit, before its event.

    Then the run resumes from the target of this rollback. Without the events of earlier
    processes it is not known whether the rollback was reported.

    Args:
        run: the parts of the run.
        resumed: step of the checkpoint from which this process has resumed.
    """
    history, rollbacks = run.log.history, run.ledger.in_force
    if not rollbacks or len(history.processes) <= 1 or run.ranks.rank != 0:
        return
    reported = max((each.number or 0 for each in history.rollbacks), default=0)
    done = rollbacks[-1]
    if done.number > reported and done.continues_at == resumed:
        report_rollback(run, done)


def _decided_by(order: Order) -> str | None:
    """The field `by` of a rollback's event, or None for a rule or a hook."""
    if order.reason is OrderReason.DEAD_RUN:
        return "nonfinite_steps"
    if order.reason is OrderReason.INTENDED:
        return "intended_numbers"
    if order.reason is OrderReason.BETTER_WEIGHTS:
        return "earlier_weights"
    if order.arrays:
        return "state"
    return None


def reason_of(order: Order) -> str:
    """Why a rollback is ordered, for the line and the event of the rollback.

    Args:
        order: the order of the rollback.

    Returns:
        A clause: "NaN in the loss", "ordered by a hook".
    """
    match order.reason:
        case OrderReason.DEAD_RUN:
            return no_finite_step(order)
        case OrderReason.INTENDED:
            return f"{order.changes.intended}: {INTENDED}"
        case OrderReason.BETTER_WEIGHTS:
            return f"the weights of step {order.anchor_step} are better on the same batches"
        case OrderReason.BATCH:
            return f"the batch of step {order.index} makes {first_of(order.arrays)} NaN or Inf"
        case OrderReason.SAVED_NAN:
            return nonfinite_save(order)
        case OrderReason.RULE | OrderReason.HOOK | OrderReason.WEIGHTS_NAN:
            return flags_text(names_of(Cause(order.cause))) or "ordered by a hook"


def nonfinite_save(order: Order) -> str:
    """The reason of a rollback for a save with NaN or Inf, as a clause.

    Args:
        order: an order with `arrays`. Up to three of their names are in the clause.
    """
    return f"a save has found NaN or Inf in {first_of(order.arrays)}"


def no_finite_step(order: Order) -> str:
    """Why a dead run is brought back, as a clause with the number of steps.

    Args:
        order: the order. Its steps `first_alarm_of_cause` to `index` had no finite gradient.
    """
    steps = counted(order.index - order.first_alarm_of_cause + 1, "step")
    return f"{steps} in a row had no finite gradient although the weights are finite"
