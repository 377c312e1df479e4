"""How often the host waits for the device because of healcore."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from healcore.torch import attach
from tests.torch import policies
from tests.torch.optimizer_cases import FUSED, PLAIN, Case, Where, host_and_device
from tests.torch.sync_counter import CountSyncs


def counted(case: Case, where: Where, engine: Any, steps: int, *, attached: bool = True) -> int:
    """Syncs of some steps, skips and clips among them."""
    optimizer = case.build()
    heal = attach(optimizer, engine, engine=where) if attached else None
    with CountSyncs() as syncs:
        for i in range(steps):
            case.step(optimizer, i, heal=heal, factor=float("nan") if i == 4 else 1.0)
        if heal is not None:
            heal.metrics()
            heal.observe_eval(torch.tensor(1.0))
            heal.expect_change()
    return syncs.count


@host_and_device
@pytest.mark.parametrize("case", FUSED, ids=lambda case: case.name)
@pytest.mark.parametrize("policy", ["EVERYTHING", "CUTS", "ADAGC", "OBSERVES"])
def test_fused_optimizers_never_wait(case: Case, where: Where, policy: str):
    assert counted(case, where, getattr(policies, policy), 7) == 0


@pytest.mark.parametrize(
    "case", [c for c in PLAIN if not c.closure and not c.sparse], ids=lambda case: case.name
)
def test_other_optimizers_wait_no_more_than_without_healcore(case: Case):
    # Equal, not less: the skipped step (no gradients) must not hide a sync of ours.
    steps = 4
    alone = counted(case, "host", None, steps, attached=False)
    assert counted(case, "host", policies.SKIPS, steps) == alone
    assert counted(case, "device", policies.SKIPS, steps) == alone
