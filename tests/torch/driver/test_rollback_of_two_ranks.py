"""Two processes with one sharded model decide the same and return to the same checkpoint."""

from __future__ import annotations

from tests.torch.forked_ranks import run_ranks


def test_two_ranks_roll_back_together(tmp_path):
    paths = tmp_path / "rendezvous", tmp_path / "checkpoints"
    outcomes = run_ranks("tests.torch.driver.rollback_rank", *paths, seconds=600)
    assert [out for out, _ in outcomes] == ["fine\n", "fine\n"], outcomes
