"""`healcore probe checkpoint` reads values of every kind that a checkpoint can hold."""

from __future__ import annotations

from collections import deque

import torch

from healcore.tools.probe.checkpoint import probe_checkpoint
from healcore.tools.probe.inputs import CheckpointInputs
from healcore.torch.store import DCPStore


def test_values_with_a_plain_form_of_their_own_are_checked(tmp_path):
    """A deque, a set, a dtype, a tensor made of others: no damage, and the arrays are found."""

    class Holder:
        def state_dict(self):
            bad = torch.tensor([1.0, float("nan")])
            return {"queue": deque([bad], 4), "seen": {1}, "dtype": torch.half, "far": range(3)}

    store = DCPStore(tmp_path, nonfinite_ok=["*"])
    store.save(1, {"x": Holder()})
    store.wait()
    result = probe_checkpoint(next(tmp_path.glob("step-*")) / "..", CheckpointInputs())
    checks = {check.name: check for check in result.checks}
    assert checks["digests"].verdict.value == "PASS"
    assert checks["finite"].verdict.value == "FAIL"
    assert "x.queue.0" in checks["finite"].message
