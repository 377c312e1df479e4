"""Links, pipes and notes that somebody has planted: nothing is followed, nothing waits."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from healcore.events.models import Ending
from healcore.runtime.store import CheckpointNotFound, StoreError
from healcore.runtime.store.claim import LOCK
from healcore.runtime.store.manifest import HEALING, MANIFEST
from healcore.runtime.story.postmortem import RankNote, RankNotes
from healcore.torch.store import DCPStore
from tests import forked_programs
from tests.healer.training_loops import loop_of, rules, train
from tests.hostile.run_directories import cut_short

EVENTS, METRICS = "healcore.events.jsonl", "healcore.metrics.jsonl"


@pytest.fixture
def root(tmp_path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def run(root: Path, **options: Any) -> Any:
    return train(loop_of("torch"), rules(), range(12), store=root, **options)


@pytest.mark.parametrize("name", [EVENTS, METRICS])
def test_a_link_in_the_run_directory_is_not_written_through(name, root, tmp_path):
    """First to nothing, then to somebody's file."""
    precious = tmp_path / "precious"
    (root / name).symlink_to(precious)
    for _ in range(2):
        with pytest.raises(StoreError, match=rf"{name} is a link.*(events|metrics)="):
            run(root)
        assert not precious.exists() or precious.read_text() == "precious\n"
        precious.write_text("precious\n")


def test_a_link_that_the_user_names_is_written_through(root, tmp_path):
    there, link = tmp_path / "there.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(there)
    run(root, events=link)
    assert '"kind":"start"' in there.read_text().replace(" ", "")
    assert link.is_symlink()


@pytest.mark.parametrize("name", [HEALING, MANIFEST])
def test_a_pipe_in_a_checkpoint_is_not_waited_for(name, root):
    store = DCPStore(root)
    store.save(1, {"x": {"y": 1}}, healing={})
    store.wait()
    (folder,) = root.glob("step-*")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    code = "store = DCPStore(root); print(store.steps(), list(map(str, store.damaged())))"
    assert name in in_time(f"from healcore.torch.store import DCPStore; {code}", root)
    with pytest.raises((CheckpointNotFound, StoreError)):
        store.verify(1)


@pytest.mark.parametrize(
    ("name", "expected"), [(LOCK, "no regular file"), (EVENTS, "36"), (METRICS, "36")]
)
def test_a_pipe_in_the_run_directory_is_not_waited_for(name, expected, root):
    cut_short("torch", root)
    (root / name).unlink(missing_ok=True)
    os.mkfifo(root / name)
    code = "from tests.hostile.run_directories import go_on; print(go_on('torch', root)['step'])"
    assert expected in in_time(code, root)


def in_time(code: str, root: Path) -> str:
    """What a child prints within a generous time limit: it must not wait for a pipe."""
    start = f"from pathlib import Path; root = Path({str(root)!r}); "
    done = forked_programs.run("-c", start + code, timeout=120)
    return done.stdout + done.stderr


RUN = "20261123T000000Z-0a1b2c3d"


def note(rank: int, time: float = 1.0, **more: Any) -> RankNote:
    fields = {"ending": Ending.EXCEPTION, "step": 7, "why": "ValueError: no"}
    return RankNote(rank=rank, time=time, **fields, **more)


def test_notes_come_back_with_the_cause_first(tmp_path):
    notes = RankNotes(tmp_path / "healcore.events.jsonl", RUN)
    given = [note(2, follows=True), note(1, time=2.0, trace="Traceback ..."), note(3, time=3.0)]
    for each in given:
        notes.leave(each)
    assert notes.found() == [given[1], given[2], given[0]]
    assert notes.found(hangs=True) == []
    notes.remove()
    assert notes.found() == []


PLANTED = (
    "", "[]", "null", "{", '{"rank": 1}',
    json.dumps({**note(1).model_dump(mode="json"), "rank": "1"}),
    " " * (1 << 20) + note(1).model_dump_json(),
)  # fmt: skip


def test_what_is_no_note_is_ignored_and_nothing_is_followed_or_waited_for(tmp_path):
    notes = RankNotes(tmp_path / "healcore.events.jsonl", RUN)
    first, second, third = (tmp_path / f"healcore.end.rank{rank}.{RUN}.json" for rank in (1, 2, 3))
    notes.leave(note(2))
    for planted in PLANTED:
        first.write_text(planted)
        assert [each.rank for each in notes.found()] == [2]
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for path in (first, second):
        path.unlink()
    os.mkfifo(first)
    second.symlink_to(precious)
    third.mkdir()
    notes.leave(note(2))
    notes.leave(note(3))
    assert [each.rank for each in notes.found()] == [2]
    notes.remove()
    assert precious.read_text() == "precious"
