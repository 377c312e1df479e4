"""A rollback with no other change replays the run bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.healer.training_loops import Faults, loop_of, rules, same, skip_no_batches, train

BOTH = pytest.mark.parametrize("framework", ["torch", "jax"])


@BOTH
def test_a_transient_fault_leaves_no_trace(framework, monkeypatch):
    skip_no_batches(monkeypatch)
    policy = rules(cut=False)
    clean = loop_of(framework, policy=policy)
    train(clean, policy, range(40))
    hurt = loop_of(framework, Faults(once=[23]), policy)
    facts = train(hurt, policy, range(40))
    assert facts["rollbacks"] == 1
    assert facts["step"] == 40
    assert hurt.faults.seen[22] == 2, "the run did not go back"
    assert same(hurt.weights(), clean.weights())


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_dropout_and_shuffling_included(kind, monkeypatch):
    skip_no_batches(monkeypatch)

    def loader() -> Any:
        return kind(list(range(50)), batch_size=None, shuffle=True)

    clean = loop_of("torch")
    train(clean, rules(), loader(), epochs=2)
    bad = clean.faults.order[70]
    # Bad in the second epoch only.
    hurt = loop_of("torch", Faults())
    hurt.faults.once = frozenset({bad})
    hurt.faults.seen[bad] = -1
    facts = train(hurt, rules(cut=False), loader(), epochs=2)
    assert facts["rollbacks"] == 1
    assert same(hurt.weights(), clean.weights())
