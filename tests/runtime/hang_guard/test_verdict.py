"""What the guards of all ranks conclude from their evidence, where no run is needed to see it."""

from __future__ import annotations

from healcore.runtime.hang_guard.alarm import Evidence, verdict
from healcore.runtime.hang_guard.settings import Settings


def settings(*, world: int = 2, confirm: bool = True) -> Settings:
    return Settings(
        pid=1, thread=1, rank=0, world=world, heartbeat=0, stacks=0, dump=0, folder="",
        secret="", removes=False, events=None, follow_links=False, run="", timeout_s=1.0,
        first_step_s=1.0, confirm=confirm, ends=True, observes=False, path=(),
    )  # fmt: skip


def waits(rank: int) -> Evidence:
    """Of a rank that does nothing within a step."""
    return Evidence(
        rank=rank, host="", pid=1, step=9, first=False, within_step=True, waits_s=2.0,
        stopped=False, moves=False, stacks="",
    )  # fmt: skip


def test_a_rank_that_has_not_answered_may_be_busy_elsewhere():
    assert verdict(settings(), [waits(0), waits(1)]).ends
    found = verdict(settings(), [waits(0)])
    assert not found.ends
    assert "rank 1 has not answered" in found.why_not
    assert verdict(settings(confirm=False), [waits(0)]).ends
