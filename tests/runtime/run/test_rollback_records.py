"""The names that the record of a rollback had before an order was a part of it."""

import json
from typing import Any

import pytest

from healcore.runtime.data import BatchId
from healcore.runtime.run.healthy_ranges import Held
from healcore.runtime.run.orders import Order, OrderReason, RepeatChanges, RollbackRecord
from healcore.runtime.run.record.run_record import RunRecord

SAVED: dict[str, Any] = {
    "index": 30,
    "onset": 25,
    "since": 26,
    "action": 16,
    "cause": 2,
    "depth": 2,
    "batches": [[0, 25]],
    "by_host": True,
    "better_step": 20,
    "trial": "hold",
    "held": {"until": 40},
    "number": 1,
    "step": 31,
    "target": 20,
    "why_lost": "no position",
    "why_forward": "no position: write a loader with state_dict",
    "lost": 3,
}
"""A rollback in a checkpoint from before `reason` was saved; other keys have their defaults."""


def read(saved: dict[str, Any]) -> RollbackRecord:
    content = json.loads(json.dumps(RunRecord().to_dict()))
    content["ledger"]["rollbacks"] = [saved]
    (found,) = RunRecord.of(content).ledger.rollbacks
    return found


def test_a_checkpoint_has_the_same_keys_as_before_the_parts_of_an_order():
    record = read(SAVED | {"unknown": 1})
    order = record.order
    assert (order.reason, order.anchor_step) == (OrderReason.BETTER_WEIGHTS, 20)
    assert (order.first_alarm_of_cause, record.continues_at) == (26, 20)
    assert (order.changes.trial, order.changes.held) == ("hold", Held(until=40))
    assert record.why_lost == "no position"
    saved = json.loads(json.dumps(record.to_saved()))
    assert saved["held"].pop("until") == 40
    assert SAVED | {"held": saved["held"]} == {name: saved[name] for name in SAVED}
    assert read(saved | {"held": {"until": 40}}) == record


@pytest.mark.parametrize("earlier", [{"since": -1}, {}], ids=["-1", "no key"])
def test_an_order_whose_first_step_is_unknown_begins_at_its_onset(earlier):
    """Earlier versions had -1 for an order that did not say since when."""
    saved = {name: value for name, value in SAVED.items() if name != "since"}
    assert read(saved | earlier).order.first_alarm_of_cause == 25


def test_the_reason_of_lost_steps_is_saved_and_not_cut_out_of_the_text():
    record = read(SAVED | {"why_lost": "a: b", "why_forward": "a: b: write a list"})
    assert (record.why_lost, record.rewind_obstacle) == ("a: b", "a: b: write a list")
    assert read(record.to_saved() | {"held": None}).why_lost == "a: b"
    assert read(SAVED | {"why_lost": "", "lost": 0}).why_lost == ""


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        pytest.param({"attempt": 2}, OrderReason.DEAD_RUN, id="attempt"),
        pytest.param(
            {"better_step": 20, "intended": "lr of 3"}, OrderReason.INTENDED, id="intended"
        ),
        pytest.param({"arrays": ["model.seen"]}, OrderReason.SAVED_NAN, id="arrays"),
        pytest.param({}, OrderReason.HOOK, id="no other key"),
        pytest.param({"by_host": False}, OrderReason.RULE, id="by a rule"),
        pytest.param({"reason": "batch"}, OrderReason.BATCH, id="its own reason"),
    ],
)
def test_a_saved_order_without_a_reason_gets_it_from_its_other_keys(changed, reason):
    assert read(SAVED | {"better_step": None} | changed).order.reason is reason


def test_the_earlier_names_warn():
    changes = RepeatChanges(lr_at_fault={"": 0.1})
    order = Order(
        index=30, onset=25, first_alarm_of_cause=25, batches=(BatchId(0, 3),), changes=changes
    )
    record = RollbackRecord(order=order, continues_at=20)
    assert (record.onset, record.batches) == (25, order.batches)
    with pytest.warns(DeprecationWarning, match=r"read rollback\.continues_at"):
        assert record.target == 20  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match=r"read rollback\.order\.changes\.lr_at_fault"):
        assert record.lr_at_fault == {"": 0.1}  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="has no attribute 'targets'"):
        record.targets  # type: ignore[attr-defined] # noqa: B018
