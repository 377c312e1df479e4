"""Two ranks that see different things do the same all the same, and nobody waits for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from healcore.runtime.events import reading
from tests.healer.two_ranks import BAD, HOOKS, ODD, SECONDS

REPOSITORY = Path(__file__).parents[2]
SCENARIOS = [*ODD, *HOOKS]


class Pair:
    """What both ranks have said, scenario by scenario."""

    def __init__(self, root: Path) -> None:
        self.root = root
        command = [sys.executable, "-m", "tests.healer.two_ranks"]
        running = [
            subprocess.Popen(
                [*command, str(rank), root, *SCENARIOS],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in (0, 1)
        ]
        try:
            self._ends = [each.communicate(timeout=SECONDS * len(SCENARIOS)) for each in running]
        finally:
            for process in running:
                process.kill()

    def said(self, scenario: str) -> dict[str, Any]:
        """The same on both."""
        told = []
        for out, errors in self._ends:
            lines = dict(zip(SCENARIOS, out.splitlines(), strict=False))
            assert scenario in lines, errors[-3000:]
            told.append(json.loads(lines[scenario]))
        assert told[0] == told[1]
        return told[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    ("scenario", "target"),
    [("agree", 15), ("listing", 10), ("forgets", 15), ("rots", 15), ("without a disk", 10)],
)
def test_both_go_back_to_the_newest_common_step(scenario, target, pair):
    told = pair.said(scenario)
    assert told["rollbacks"] == 1
    assert told["step"] == 39
    assert told["order"].count(BAD) == 1
    for name in ("run.events.jsonl", "run.events.rank1.jsonl"):
        events = reading.read(pair.root / scenario / name).events
        assert [e["checkpoint"] for e in events if e["kind"] == "rollback"] == [target]


def test_the_most_severe_of_two_hooks_wins(pair):
    told = pair.said("severe")
    assert "hook" in told["stopped"]
    assert told["rollbacks"] == 0


def test_a_milder_hook_on_one_rank_changes_nothing(pair):
    told = pair.said("milder")
    assert told["stopped"] is None
    assert told["rollbacks"] == 1
