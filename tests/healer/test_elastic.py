"""Ranks that are killed, under torchrun and without its cost: the job continues or ends, whole."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.events.processes import run


@pytest.fixture(autouse=True)
def restarts_do_not_fail(monkeypatch):
    """See https://github.com/pytorch/pytorch/issues/167288."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.stress)])
def test_a_rank_is_killed_again_and_again(kills, in_memory):
    done = run(
        "-m", "tests.healer.elastic_runs", in_memory, "DDP,FSDP2", kills, seconds=600 + 60 * kills
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *of_kinds, sharded, replicated, refused = map(json.loads, done.stdout.splitlines())
    assert len(of_kinds) == 2
    for counts in of_kinds:
        assert counts["kills"] == kills
        assert min(counts[f"in a {phase}"] for phase in ("rollback", "save", "step")) >= 1, counts
    # Another number of ranks at every start.
    assert (sharded["worlds"], len(sharded["resumed"])) == ([2, 4, 1], 2)
    assert (replicated["worlds"], replicated["rollbacks"]) == ([1, 2], 2)
    # SIGTERM may have ended the other ranks before they wrote theirs.
    first = next(line for line in refused if line.startswith("healcore.runtime.data"))
    assert "the position in the data was saved by 2 ranks" in first
    assert re.search("the loader had 45 batches, and range has 2[23]", first)


def torchrun(kind: str, root: Path, *, restarts: int, kills: int, seed: int) -> Any:
    """Two ranks under torchrun; all the starts together."""
    options = "--standalone", "--nproc-per-node", 2, "--max-restarts", restarts
    program = "-m", "tests.healer.elastic_rank", kind, root, kills, seed
    return run("-m", "torch.distributed.run", *options, *program, seconds=600 + 60 * kills)


def test_torchrun_restarts_a_killed_rank_and_ends_when_it_may_no_more(in_memory):
    done = torchrun("DDP", in_memory, restarts=1, kills=2, seed=3)
    assert done.returncode == 1, done.stderr[-3000:]
    assert done.stderr.count("failed (exitcode: -9)") == 2
    assert "healcore: resumes from the checkpoint" in done.stderr
    assert list((in_memory / "store").glob("step-*/manifest.json"))
