"""The form in which a checkpoint holds the steps that the run has not acted on yet.

The host reads each step some steps later. A save between these two steps has the weights after the
step, and the run has not compared them, counted the step or answered an alarm of it. The record of
the checkpoint holds such steps as text. Their batches are saved with the arrays, as the batches of
comparisons are (`Comparisons.batches_to_save`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from healcore.core.decision import Action, Cause
from healcore.core.engine import RuleConfig
from healcore.core.step_record import StepRecord, SuspectGradient
from healcore.runtime.data import BatchId
from healcore.runtime.run.compare.trained_step import ObservedBatch
from healcore.runtime.run.dispatch_queue import DispatchStart, ReadDispatch, UnreadDispatch
from healcore.runtime.store import values

_TEXT = ("the steps that were not read",)
"""Place of the text, for error messages."""


def unread_to_text(unread: Sequence[UnreadDispatch]) -> str:
    """Dispatches without the contents of their batches, as text.

    Args:
        unread: the dispatches, oldest first.

    Returns:
        The text, or an empty string without a dispatch.
    """
    if not unread:
        return ""
    found: list[dict[str, Any]] = []
    for dispatch, first in unread:
        steps: list[list[dict[str, Any]]] = []
        for records in dispatch.steps:
            steps.append([_plain(record) for record in records])
        found.append(
            {
                "index": first.index,
                "batches": [tuple(each) for each in first.batches],
                "contents": len(first.contents),
                "count": dispatch.count,
                "steps": steps,
            }
        )
    return values.dumps(found, _TEXT)


def unread_from_text(text: str, contents: Mapping[int, Any]) -> list[UnreadDispatch]:
    """Reads the result of `unread_to_text`.

    Args:
        text: the text.
        contents: number of a step -> its batches, as `pack_batches` has packed them. A dispatch
            whose batches are missing has `has_lost_contents`.

    Returns:
        The dispatches, oldest first.
    """
    unread: list[UnreadDispatch] = []
    for each in values.loads(text, _TEXT):
        steps: list[list[StepRecord]] = []
        for records in each["steps"]:
            steps.append([_record(record) for record in records])
        index = each["index"]
        parts: tuple[ObservedBatch, ...] = ()
        if each["contents"] and index in contents:
            parts = tuple(ObservedBatch(*part) for part in contents[index])
        first = DispatchStart(
            index,
            tuple(BatchId(*batch) for batch in each["batches"]),
            parts,
            has_lost_contents=len(parts) != each["contents"],
        )
        unread.append(UnreadDispatch(ReadDispatch(steps, each["count"]), first))
    return unread


def with_orders_of(
    unread: Sequence[UnreadDispatch], rules: Sequence[RuleConfig]
) -> list[UnreadDispatch]:
    """Dispatches that another policy has judged, without the orders that only it gives.

    A user may restart a run with another policy because she does not want such a rollback. An order
    that the given policy also gives for the same cause stays, because no later step may order it
    again. What was done within the step stays too: a skip, a clipped gradient, a cut of the rate.

    Args:
        unread: the dispatches, oldest first.
        rules: the rules of the policy that is given now.

    Returns:
        The dispatches, oldest first.
    """
    found: list[UnreadDispatch] = []
    for each in unread:
        steps: list[list[StepRecord]] = []
        for records in each.dispatch.steps:
            steps.append([_with_orders_of(record, rules) for record in records])
        found.append(each._replace(dispatch=replace(each.dispatch, steps=steps)))
    return found


def _with_orders_of(record: StepRecord, rules: Sequence[RuleConfig]) -> StepRecord:
    """A record with the orders that these rules can give for its causes."""
    allowed = int(Action.CUT_LR)
    for rule in rules:
        if rule.causes & record.cause:
            allowed |= rule.action
    action = Action(record.action & allowed)
    depth = 0
    if action & Action.ROLLBACK:
        depth = record.rollback_depth
    return record._replace(action=action, rollback_depth=depth)


def _plain(record: StepRecord) -> dict[str, Any]:
    """A record as a dictionary of plain values, by the names of its fields."""
    return {
        **record._asdict(),
        "action": int(record.action),
        "cause": int(record.cause),
        "evidence": [tuple(each) for each in record.evidence],
    }


def _record(plain: Mapping[str, Any]) -> StepRecord:
    """The record of a dictionary that `_plain` has made."""
    evidence = tuple(SuspectGradient(*each) for each in plain["evidence"])
    flags = {"action": Action(plain["action"]), "cause": Cause(plain["cause"])}
    return StepRecord(**{**plain, **flags, "evidence": evidence})
