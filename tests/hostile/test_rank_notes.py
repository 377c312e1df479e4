"""Notes of other ranks that somebody has planted next to the events file: text, or nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from healcore.events.models import Ending
from healcore.runtime.postmortem.postmortem import RankNote, RankNotes

RUN = "20261123T000000Z-0a1b2c3d"


def note(rank: int, time: float = 1.0, **more: Any) -> RankNote:
    fields = {"ending": Ending.EXCEPTION, "step": 7, "why": "ValueError: no"}
    return RankNote(rank=rank, time=time, **fields, **more)


@pytest.fixture
def notes(tmp_path: Path) -> RankNotes:
    return RankNotes(tmp_path / "healcore.events.jsonl", RUN)


def path_of(notes: RankNotes, rank: int) -> Path:
    assert notes.events is not None
    return notes.events.with_name(f"healcore.end.rank{rank}.{RUN}.json")


def test_notes_come_back_with_the_cause_first(notes):
    given = [note(2, follows=True), note(1, time=2.0, trace="Traceback ..."), note(3, time=3.0)]
    for each in given:
        notes.leave(each)
    assert [each.rank for each in notes.found()] == [1, 3, 2]
    assert notes.found()[0] == given[1]
    assert notes.found(hangs=True) == []
    notes.remove()
    assert notes.found() == []


@pytest.mark.parametrize(
    "planted",
    [
        "", "[]", "null", "{", '{"rank": 1}',
        json.dumps({**note(1).model_dump(mode="json"), "rank": "1"}),
        " " * (1 << 20) + note(1).model_dump_json(),
    ],
)  # fmt: skip
def test_what_is_no_note_is_ignored(planted, notes):
    path_of(notes, 1).write_text(planted)
    notes.leave(note(2))
    assert [each.rank for each in notes.found()] == [2]


def test_pipes_links_and_folders_are_neither_followed_nor_waited_for(notes, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    os.mkfifo(path_of(notes, 1))
    path_of(notes, 2).symlink_to(precious)
    path_of(notes, 3).mkdir()
    notes.leave(note(2))
    notes.leave(note(3))
    assert [each.rank for each in notes.found()] == [2]
    assert precious.read_text() == "precious"
    notes.remove()
    assert precious.read_text() == "precious"
