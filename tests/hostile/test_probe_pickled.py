"""`healcore probe checkpoint` reports which parts of a store are pickled."""

from __future__ import annotations

from pathlib import Path

import pytest

from healcore.tools.probe.checkpoint import probe_checkpoint
from healcore.tools.probe.inputs import CheckpointInputs
from healcore.torch.store import DCPStore
from tests.hostile.run_directories import change_state, cut_short
from tests.hostile.test_resume import Keeps, Thing, as_before

BOTH = pytest.mark.parametrize("framework", ["torch", "jax"])


def probed(root: Path):
    result = probe_checkpoint(root, CheckpointInputs())
    return result, {check.name: check for check in result.checks}


@BOTH
def test_a_run_of_now_has_none(framework, tmp_path):
    cut_short(framework, tmp_path)
    result, checks = probed(tmp_path)
    assert "pickled" not in checks
    assert "every file is what was written" in checks["digests"].message
    assert all(not row["pickled"] for row in result.facts["checkpoints"])


@BOTH
def test_what_healcore_pickled_until_now_is_listed(framework, tmp_path):
    cut_short(framework, tmp_path)
    change_state(tmp_path, as_before)
    result, checks = probed(tmp_path)
    assert checks["pickled"].verdict.value == "WARN"
    assert "state['healcore']['python']" in checks["pickled"].message
    assert "was written" not in checks["digests"].message
    assert "malice" in checks["digests"].message
    assert len(result.facts["checkpoints"][0]["pickled"]) == 4


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
