"""Another user of the machine plants files where the guards of a run meet: they change nothing."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from healcore.policy.faults import Hang
from healcore.runtime.events import Log
from healcore.runtime.hang_guard import hang_guard
from healcore.runtime.hang_guard.alarm import Alarm, Evidence, Verdict
from healcore.runtime.hang_guard.guard import Guard
from healcore.runtime.hang_guard.heartbeat import SIZE
from healcore.runtime.hang_guard.meeting_folder import MeetingFolder
from healcore.runtime.hang_guard.settings import Settings
from tests.hostile.test_permissions import needs_root

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="guards need Linux")
NOBODY = 65534


def settings(folder: Path, *, pid: int = 0, heartbeat: int = 0, secret: str = "ours") -> Settings:
    return Settings(
        pid=pid or os.getpid(), thread=1, rank=0, world=2, heartbeat=heartbeat, stacks=0, dump=0,
        folder=str(folder), secret=secret, removes=False, events=None, follow_links=False, run="",
        timeout_s=0.5, first_step_s=0.5, confirm=True, ends=True, observes=False, path=(),
    )  # fmt: skip


def as_nobody(action: Callable[[], None]) -> None:
    """Does something as a second user of this machine."""
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            action()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that everybody can write to, as /tmp; other users reach it."""
    base = tmp_path_factory.getbasetemp()
    for each in (base, *base.parents):  # a worker of pytest-xdist has one level more
        if each == Path(tempfile.gettempdir()):
            break
        each.chmod(each.stat().st_mode | 0o011)
    folder = tmp_path_factory.mktemp("shared")
    folder.chmod(0o1777)
    return folder


def plant(folder: Path, secret: str = "theirs", mode: int = 0o777) -> None:
    """An alarm and the verdict that the run ends, as this version and an older one write them."""
    ends = {"ends": True, "why_not": ""}
    older = Path(f"{folder}-1")
    for each in (folder, older):
        each.mkdir()
        each.chmod(0o700)
    theirs = MeetingFolder(str(folder), secret)
    theirs.put("1.alarm", {"rank": 1})
    theirs.put("1.verdict", ends)
    (older / "alarm").write_text("{}")
    (older / "verdict").write_text(json.dumps(ends))
    folder.chmod(mode)
    older.chmod(mode)


@needs_root
def test_the_verdict_of_another_user_ends_no_process(shared):
    folder = shared / "healcore.hang.guessed"
    as_nobody(lambda: plant(folder, mode=0o777))
    with subprocess.Popen(["sleep", "1"]) as process:
        heartbeat = os.memfd_create("heartbeat")
        os.ftruncate(heartbeat, SIZE)
        Guard(settings(folder, pid=process.pid, heartbeat=heartbeat)).run()
        os.close(heartbeat)
        assert process.wait() == 0


@needs_root
def test_nothing_is_written_into_the_folder_of_another_user(shared):
    """Also where its mode is right, and root could write."""
    folder = shared / "healcore.hang.guessed"
    as_nobody(lambda: folder.mkdir(mode=0o700))
    alarm = Alarm(settings(folder), 1)
    alarm.raise_it()
    assert list(folder.iterdir()) == []
    MeetingFolder(str(folder), "ours").remove()
    assert folder.is_dir()
    assert alarm.raised(), "this guard reports all the same"
    assert not Alarm(settings(folder), 1).raised()


@pytest.mark.parametrize("how", ["open to all", "open to the group", "a link", "a file", "a pipe"])
def test_only_a_private_folder_is_used(how, tmp_path):
    folder, own = tmp_path / "meeting", tmp_path / "own"
    own.mkdir(mode=0o700)
    ours = MeetingFolder(str(folder), "ours")
    if how == "a link":
        folder.symlink_to(own)
    elif how == "a file":
        folder.touch()
    elif how == "a pipe":
        os.mkfifo(folder)
    else:
        folder.mkdir()
        folder.chmod(0o707 if how == "open to all" else 0o770)
    ours.make()
    with pytest.raises(OSError, match="meeting"):
        ours.put("1.alarm", {})
    assert not ours.take("1.collector")
    ours.remove()
    assert os.path.lexists(folder)
    assert list(own.iterdir()) == []


def test_links_and_pipes_in_the_folder_are_not_followed(tmp_path):
    """As in the directory of the events, if another user could get into the folder."""
    precious, folder = tmp_path / "precious", tmp_path / "meeting"
    precious.write_text("precious")
    ours = MeetingFolder(str(folder), "ours")
    ours.make()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in ("1.alarm", "1.collector", "1.verdict"):
        (folder / name).symlink_to(precious)
    os.mkfifo(folder / "1.rank1")
    assert ours.get("1.alarm") is None
    assert ours.get("1.rank1") is None
    assert not ours.take("1.collector")
    ours.put("1.alarm", {"rank": 0})
    assert ours.get("1.alarm") == {"rank": 0}
    assert precious.read_text() == "precious"
    assert stat.S_IMODE((folder / "1.alarm").stat().st_mode) == 0o600


def test_only_what_a_guard_of_the_run_has_written_under_this_name_counts(tmp_path):
    ours = MeetingFolder(str(tmp_path / "meeting"), "ours")
    ours.make()
    ours.put("1.verdict", {"ends": True})
    whole = (tmp_path / "meeting" / "1.verdict").read_bytes()
    (tmp_path / "meeting" / "2.verdict").write_bytes(whole)
    assert ours.get("1.verdict") == {"ends": True}
    assert ours.get("2.verdict") is None, "the verdict of another alarm"
    assert MeetingFolder(ours.path, "theirs").get("1.verdict") is None
    for damaged in (b"", whole[:10], whole.replace(b"true", b"null"), b'{"ends": true}'):
        (tmp_path / "meeting" / "1.verdict").write_bytes(damaged)
        assert ours.get("1.verdict") is None


class TwoRanks:
    """The exchange of two ranks, on one machine or on two, in which rank 0 comes first."""

    world = 2

    def __init__(self, one_machine: bool) -> None:
        self.rank, self.items = 0, list[Any]()
        self._second = "host 0" if one_machine else "host 1"

    def gather(self, item: Any) -> list[Any]:
        self.items.append(item)
        return [("host 0", *self.items[0][1:]), (self._second, *item[1:])]


@pytest.mark.parametrize("one_machine", [True, False])
def test_rank_0_chooses_a_folder_that_cannot_be_guessed(one_machine, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "local"))
    ranks, found = TwoRanks(one_machine), list[Settings]()
    for ranks.rank in (0, 1):
        log = Log(tmp_path / f"{ranks.rank}.jsonl", follow_links=False)
        guard = hang_guard.HangGuard()
        guard.start(Hang(), ends=True, observes=False, ranks=ranks, events=log)
        assert guard._settings is not None
        found.append(guard._settings)
        guard.close()
    assert found[0].folder == found[1].folder
    assert found[0].secret == found[1].secret
    assert Path(found[0].folder).parent == (tmp_path / "local" if one_machine else tmp_path)
    assert [each.removes for each in found] == [one_machine, False]
    assert not found[1].follow_links
    (*_, one, _, first), (*_, other, _, second) = ranks.items
    assert one != other
    assert first != second


def test_the_report_imports_nothing_from_the_current_directory(tmp_path, monkeypatch, capfd):
    (tmp_path / "json.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    given = settings(tmp_path / "meeting")._replace(path=tuple(each for each in sys.path if each))
    evidence = Evidence(0, "", 1, 1, False, True, 1.0, False, False, "")
    Alarm(given, 1)._report([evidence], Verdict(False, ""))
    assert not (tmp_path / "ran").exists()
    assert "rank 0 has been within one step" in capfd.readouterr().err
