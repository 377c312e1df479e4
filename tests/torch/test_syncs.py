"""How often the host waits for the device because of healcore."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from healcore.torch import attach
from healcore.torch.measurement import read_in_one_copy
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


def test_the_counter_counts():
    with CountSyncs() as syncs:
        torch.ones(()).item()
        bool(torch.ones(()) > 0)
    assert syncs.count == 2


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


def test_all_signals_are_copied_at_once():
    """The path that accelerators take to the host, on the CPU."""
    signals = [torch.tensor(1.5), None, torch.tensor([2.0, 3.0, 4.0]), torch.tensor(5.0)]
    found = read_in_one_copy(signals)
    assert [None if f is None else f.tolist() for f in found] == [1.5, None, [2.0, 3.0, 4.0], 5.0]
    assert [f.shape for f in found if f is not None] == [(), (3,), ()]


@pytest.mark.parametrize("case", FUSED[:1] + PLAIN[:1], ids=lambda case: case.name)
def test_the_report_has_the_syncs_per_step(case: Case):
    heal = attach(case.build(), policies.SKIPS)
    report = heal.report()
    assert report.engine == "host"
    assert report.syncs_per_step == 0
    assert report.skip == "grads"
    assert report.clip == ("grad_scale" if case.fused else "one pass over the gradients")
    heal.detach()
    report = attach(case.build(), policies.SKIPS, engine="device").report()
    assert report.skip == ("found_inf" if case.fused else "grads")
    assert case.fused or "not built with fused=True" in report.skip_reason
    assert "syncs   0 per step" in str(report)
