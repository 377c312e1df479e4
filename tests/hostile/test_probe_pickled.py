"""`healcore probe checkpoint` reports which parts of a store are pickled."""

from __future__ import annotations

from pathlib import Path

import pytest

from healcore.tools.probe.checkpoint import probe_checkpoint
from healcore.tools.probe.inputs import CheckpointInputs
from healcore.torch.store import DCPStore
from tests.hostile.run_directories import cut_short
from tests.hostile.test_resume import Keeps, Thing

BOTH = pytest.mark.parametrize("framework", ["torch", "jax"])


def probed(root: Path):
    result = probe_checkpoint(root, CheckpointInputs())
    return result, {check.name: check for check in result.checks}


@BOTH
def test_a_run_of_now_has_none(framework, tmp_path):
    cut_short(framework, tmp_path)
    result, checks = probed(tmp_path)
    assert "pickled" not in checks
    assert "every file has its recorded digest" in checks["digests"].message
    assert all(not row["pickled"] for row in result.facts["checkpoints"])


def test_the_pickled_state_of_a_loader_is_listed(tmp_path):
    cut_short("torch", tmp_path, Odd(), trust=True)
    _, checks = probed(tmp_path)
    assert checks["pickled"].verdict.value == "WARN"
    assert "the state of a loader" in checks["pickled"].message
    assert "malice" in checks["digests"].message


class Odd(list):
    """A loader whose state has no plain form."""

    def __init__(self):
        super().__init__(range(60))
        self.at = 0

    def __iter__(self):
        while self.at < len(self):
            self.at += 1
            yield self[self.at - 1]

    def state_dict(self):
        return {"at": self.at, "kept": Thing()}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_a_pickled_object_is_listed(tmp_path):
    store = DCPStore(tmp_path, trust=True)
    store.save(1, {"x": Keeps(Thing())})
    store.wait()
    store.mark(1, "good")
    result, checks = probed(tmp_path)
    assert checks["pickled"].verdict.value == "WARN"
    assert "step 1: state['x']['at']['kept']" in checks["pickled"].message
    assert result.verdict.value == "WARN"


def test_values_with_a_plain_form_of_their_own_are_checked(tmp_path):
    """A deque, a set, a dtype, a tensor made of others: no damage, and the arrays are found."""
    from collections import deque

    import torch

    class Holder:
        def state_dict(self):
            bad = torch.tensor([1.0, float("nan")])
            return {"queue": deque([bad], 4), "seen": {1}, "dtype": torch.half, "far": range(3)}

    store = DCPStore(tmp_path, nonfinite_ok=["*"])
    store.save(1, {"x": Holder()})
    store.wait()
    result = probe_checkpoint(next(tmp_path.glob("step-*")) / "..", CheckpointInputs(deep=True))
    checks = {check.name: check for check in result.checks}
    assert checks["digests"].verdict.value == "PASS"
    assert checks["finite"].verdict.value == "FAIL"
    assert "x.queue.0" in checks["finite"].message
