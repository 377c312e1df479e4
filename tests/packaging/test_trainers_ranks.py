"""The snippets of trainers in the README and docs/trainers, unchanged, on two ranks."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.jax.processes import free_port
from tests.torch.forked_ranks import run_ranks

CASES = ["SFTTrainer", "Trainer, heal", "Lightning", "Lightning, store", "Fabric", "Accelerate",
         "Accelerate, Healer"]  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has seen, by case."""
    root = tmp_path_factory.mktemp("trainers")
    module = "tests.packaging.trainers_ranks"
    found = run_ranks(module, free_port(), root, world=2, seconds=400)
    seen = [dict(map(json.loads, re.findall(r'^\["[A-Z].*', out, flags=re.M))) for out, _ in found]
    assert [[*each] for each in seen] == [CASES] * 2, "\n".join(err[-3000:] for _, err in found)
    return seen


@pytest.mark.parametrize("case", CASES)
def test_a_nan_on_one_rank_is_skipped_on_both(case: str, ranks: list[dict[str, Any]]):
    first, second = (each[case] for each in ranks)
    assert first == second, "the weights of both are the same, bit for bit"
    assert first["skips"] == 1
    assert first["finite"]


def test_both_ways_to_use_accelerate_train_the_same(ranks: list[dict[str, Any]]):
    assert ranks[0]["Accelerate"]["weights"] == ranks[0]["Accelerate, Healer"]["weights"]
