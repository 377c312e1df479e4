"""Two processes save one checkpoint together."""

from __future__ import annotations

from tests.runtime.store.programs import finish, start


def test_two_ranks_save_one_checkpoint(tmp_path):
    finish(*(start("tests.torch.store.ranks_program", rank, tmp_path) for rank in (0, 1)))
    # One process reads what two have written.
    finish(start("tests.torch.store.one_rank_program", tmp_path))
