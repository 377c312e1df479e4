"""A run directory that somebody else can write to is reported once and used all the same."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from healcore.runtime.store.claim import open_to_others
from tests.healer.run_directory import events
from tests.hostile.run_directories import cut_short, go_on

needs_users = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs users and groups")
needs_root = pytest.mark.skipif(
    getattr(os, "geteuid", lambda: 1)() != 0, reason="only root can give a file away"
)


def reported(root: Path) -> list[str]:
    problems = [event["problem"] for event in events(root, "problem")]
    return [problem for problem in problems if "can change the state" in problem]


@needs_users
def test_ones_own_directory_is_not_reported(tmp_path):
    tmp_path.chmod(0o755)
    cut_short("torch", tmp_path)
    assert open_to_others(tmp_path) is None
    assert reported(tmp_path) == []


@needs_users
@pytest.mark.parametrize(("mode", "who"), [(0o775, "its group"), (0o777, "everybody")])
def test_a_directory_that_others_can_write_to_is_reported_once(mode, who, tmp_path, caplog):
    cut_short("torch", tmp_path)
    tmp_path.chmod(mode)
    with caplog.at_level(logging.WARNING, "healcore"):
        go_on("torch", tmp_path)
    (problem,) = reported(tmp_path)
    assert who in problem
    assert "chmod go-w" in problem
    assert sum("can change the state" in record.getMessage() for record in caplog.records) == 1


@needs_users
def test_a_checkpoint_that_others_can_write_to_is_reported(tmp_path):
    cut_short("torch", tmp_path)
    next(tmp_path.glob("step-*")).chmod(0o777)
    assert "step-" in (open_to_others(tmp_path) or "")


@needs_root
@pytest.mark.parametrize("part", [".", "healcore.json"])
def test_what_belongs_to_somebody_else_is_reported(part, tmp_path):
    cut_short("torch", tmp_path)
    os.chown(tmp_path / part, 12345, 12345)
    assert "user 12345" in (open_to_others(tmp_path) or "")
    go_on("torch", tmp_path)
    assert len(reported(tmp_path)) == 1
