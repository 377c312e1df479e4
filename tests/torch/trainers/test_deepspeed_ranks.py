"""Two ranks under DeepSpeed, ZeRO stages 0, 1 and 2: what one rank sees, both act on."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.torch.two_ranks import run_two_ranks

pytest.importorskip("deepspeed", reason="run by .ci/run with DeepSpeed on its path")

KINDS = ("float32", "ZeRO-1", "ZeRO-2, bfloat16")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By kind: what rank 0 and rank 1 have done."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    outputs = run_two_ranks("tests.torch.trainers.deepspeed_rank", port, folder, seconds=400)
    found: dict[str, list[dict[str, Any]]] = {}
    for out, err in outputs:
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        assert len(lines) == len(KINDS), err[-4000:]
        for line in lines:
            found.setdefault(line["kind"], []).append(line)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_on_one_rank_skips_the_step_on_both(kind: str, ranks: Any):
    first, second = (each["one_nan"] for each in ranks[kind])
    assert first == second
    assert first["changed"] == [i != 5 for i in range(8)]
    assert first["skips"] == 1


def test_the_norm_is_that_of_all_ranks(ranks: Any):
    """With ZeRO-1 each rank has half of the gradient; without it the whole."""
    whole, sharded = (ranks[kind][0]["one_nan"]["norms"][:5] for kind in ("float32", "ZeRO-1"))
    assert sharded == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_spike_on_one_rank_skips_the_step_on_both(kind: str, ranks: Any):
    first, second = (each["loss_spike"] for each in ranks[kind])
    assert first == second
    assert first["skips"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_both_ranks_go_back_to_the_same_checkpoint(kind: str, ranks: Any):
    first, second = (each["rollback"] for each in ranks[kind])
    assert first == second
    assert first["rollbacks"] == [1, 0]
    assert first["step"] > 0
    assert first["same"], "not the weights of a run that never saw the bad batch"
