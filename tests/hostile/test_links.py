"""Links and pipes where healcore writes and reads: nothing goes through, nothing waits."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from healcore.runtime.recovery.journal import NAME, JournalError
from healcore.runtime.store import CheckpointNotFound, StoreError, files
from healcore.runtime.store.claim import LOCK
from healcore.tools.cli import app
from healcore.tools.output_files import replacing
from healcore.torch.store import DCPStore
from tests import forked_programs
from tests.healer.training_loops import loop_of, rules, train
from tests.hostile.run_directories import cut_short
from tests.hostile.test_events import EVENT

needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
EVENTS, METRICS = "healcore.events.jsonl", "healcore.metrics.jsonl"


@pytest.fixture
def precious(tmp_path) -> Path:
    """Somebody's file, outside of the run directory."""
    path = tmp_path / "precious"
    path.write_text("precious\n")
    return path


@pytest.fixture
def root(tmp_path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def run(root: Path, **options: Any) -> Any:
    return train(loop_of("torch"), rules(), range(12), store=root, **options)


@pytest.mark.parametrize("name", [EVENTS, METRICS])
@pytest.mark.parametrize("there", [True, False], ids=["to a file", "to nothing"])
def test_a_link_in_the_run_directory_is_not_written_through(name, there, root, precious):
    if not there:
        precious.unlink()
    (root / name).symlink_to(precious)
    with pytest.raises(StoreError, match=rf"{name} is a link.*(events|metrics)="):
        run(root)
    assert precious.exists() == there
    assert not there or precious.read_text() == "precious\n"


def test_a_link_that_comes_later_is_not_written_through_either(root, precious):
    def swap(healer: Any, number: int) -> None:
        if number == 6:
            (root / EVENTS).unlink()
            (root / EVENTS).symlink_to(precious)

    run(root, before=swap)
    assert precious.read_text() == "precious\n"


def test_a_link_that_the_user_names_is_written_through(root, tmp_path):
    there, link = tmp_path / "there.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(there)
    run(root, events=link)
    assert '"kind":"start"' in there.read_text().replace(" ", "")
    assert link.is_symlink()


@pytest.mark.parametrize("name", [NAME, "healcore.postmortem.x.json"])
def test_a_file_that_is_replaced_takes_the_place_of_the_link(name, root, precious):
    (root / name).symlink_to(precious)
    files.replace(root / name, b"new")
    assert precious.read_text() == "precious\n"
    assert not (root / name).is_symlink()


def test_a_new_file_goes_through_no_link(root, precious):
    (root / "x").symlink_to(precious)
    with pytest.raises(FileExistsError):
        files.write_new(root / "x", b"new")
    precious.unlink()
    with pytest.raises(FileExistsError):
        files.write_new(root / "x", b"new")
    assert not precious.exists()


def test_the_draft_of_an_output_cannot_be_foreseen(tmp_path, precious):
    """Links under every name that it used to have."""
    for suffix in (".html", ".jsonl", ""):
        (tmp_path / f".page.{os.getpid()}.part{suffix}").symlink_to(precious)
        with replacing(tmp_path / f"page{suffix}") as draft:
            assert draft.suffix == suffix
            draft.write_text("page")
        assert (tmp_path / f"page{suffix}").read_text() == "page"
    assert precious.read_text() == "precious\n"


def test_a_temporary_file_is_in_a_private_folder(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    with replacing(folder / "page.html") as draft:
        assert draft.parent.stat().st_mode & 0o077 == 0
        draft.write_text("page")
    assert (folder / "page.html").stat().st_mode & 0o777 == 0o666 & ~_umask()
    assert sorted(path.name for path in folder.iterdir()) == ["page.html"]


def _umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


def in_time(code: str, *arguments: str, seconds: int = 120) -> str:
    """The output of a child within a generous time limit: it must not wait for a pipe."""
    done = forked_programs.run("-c", textwrap.dedent(code), *arguments, timeout=seconds)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_pipes
@pytest.mark.parametrize("name", ["status.json", "manifest.json"])
def test_a_pipe_in_a_checkpoint_is_not_waited_for(name, root):
    store = DCPStore(root)
    store.save(1, {"x": {"y": 1}})
    store.wait()
    store.mark(1, "good")
    (folder,) = root.glob("step-*")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    out = in_time(
        """
        import sys
        from healcore.torch.store import DCPStore
        store = DCPStore(sys.argv[1])
        print([saved.status for saved in store.steps()], list(map(str, store.damaged())))
        """,
        str(root),
    )
    assert "['candidate']" in out if name == "status.json" else "manifest.json" in out
    if name == "manifest.json":
        with pytest.raises((CheckpointNotFound, StoreError)):
            store.verify(1)


@needs_pipes
@pytest.mark.parametrize("name", [NAME, LOCK, EVENTS, METRICS])
def test_a_pipe_in_the_run_directory_is_not_waited_for(name, root):
    cut_short("torch", root)
    (root / name).unlink(missing_ok=True)
    os.mkfifo(root / name)
    out = in_time(
        """
        import sys
        from pathlib import Path
        from tests.hostile.run_directories import go_on
        try:
            print(go_on("torch", Path(sys.argv[1]))["step"])
        except Exception as error:
            print(type(error).__name__, error)
        """,
        str(root),
    )
    expected = {NAME: JournalError.__name__, LOCK: "no regular file", EVENTS: "36", METRICS: "36"}
    assert expected[name] in out


# -- the lock --------------------------------------------------------------------------------------


def test_the_lock_is_held_as_long_as_the_run_lasts(root):
    fcntl = pytest.importorskip("fcntl")
    del fcntl
    looked = []

    def look(healer: Any, number: int) -> None:
        if number in (0, 6, 11):
            looked.append(
                in_time(
                    """
                    import fcntl, sys
                    try:
                        fcntl.flock(open(sys.argv[1], "rb+"), fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        print("held")
                    """,
                    str(root / LOCK),
                ).strip()
            )

    run(root, before=look)
    assert looked == ["held"] * 3


def test_a_held_lock_is_not_waited_for_without_end(root):
    """The lock of a process that never writes its name."""
    pytest.importorskip("fcntl")
    out = in_time(
        """
        import fcntl, subprocess, sys, time
        held = open(sys.argv[1], "wb+")
        fcntl.flock(held, fcntl.LOCK_EX)
        code = "import sys; from healcore.runtime.store.claim import claim; claim(sys.argv[1])"
        root = sys.argv[2]
        done = subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True)
        print(done.stderr)
        """,
        str(root / LOCK),
        str(root),
    )
    assert "StoreInUse" in out


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_report_is_not_written_through_what_is_at_its_default_path(kind, root, precious):
    (root / EVENTS).write_bytes(EVENT)
    page = root / "healcore.report.html"
    page.symlink_to(precious) if kind == "link" else os.mkfifo(page)
    result = CliRunner().invoke(app, ["report", str(root / EVENTS)])
    assert result.exit_code == 2
    assert "is a link or not a regular file" in result.output
    assert precious.read_text() == "precious\n"
    if kind == "link":  # the user may name the link
        result = CliRunner().invoke(app, ["report", str(root / EVENTS), "--out", str(page)])
        assert result.exit_code == 0
        assert precious.read_text().startswith("<!")


@pytest.mark.parametrize("place", ["link", "folder"])
def test_the_demo_writes_only_to_a_new_folder(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    mine.rename("healcore-demo") if place == "folder" else Path("healcore-demo").symlink_to(mine)
    refused = CliRunner().invoke(app, ["demo", "--framework", "torch", "--steps", "30"])
    assert refused.exit_code == 2
    assert "--out" in refused.output
    assert [path.name for path in Path("healcore-demo").iterdir()] == ["thesis.txt"]
