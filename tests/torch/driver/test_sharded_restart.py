"""A sharded run (FSDP2, tensor parallel) with a restart is the run without one, to the bit."""

from __future__ import annotations

import json

import pytest

from tests.torch.driver.sharded_run_rank import OPTIMIZERS
from tests.torch.forked_ranks import run_ranks


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[str], str]]:
    root = tmp_path_factory.mktemp("sharded")
    found = run_ranks("tests.torch.driver.sharded_run_rank", root, seconds=1200)
    return [(out.splitlines(), errors) for out, errors in found]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restart_changes_nothing(name: str, outcomes: list[tuple[list[str], str]]):
    for lines, errors in outcomes:
        digests = dict(zip(OPTIMIZERS, lines, strict=False))
        assert name in digests, errors[-3000:]
        whole, restarted = json.loads(digests[name])
        assert whole == restarted
