"""Links and pipes where healcore writes and reads: nothing goes through, nothing waits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from healcore.runtime.store import CheckpointNotFound, StoreError
from healcore.runtime.store.claim import LOCK
from healcore.runtime.store.manifest import HEALING, MANIFEST
from healcore.torch.store import DCPStore
from tests import forked_programs
from tests.healer.training_loops import loop_of, rules, train
from tests.hostile.run_directories import cut_short

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


def test_a_link_that_the_user_names_is_written_through(root, tmp_path):
    there, link = tmp_path / "there.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(there)
    run(root, events=link)
    assert '"kind":"start"' in there.read_text().replace(" ", "")
    assert link.is_symlink()


@needs_pipes
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


@needs_pipes
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
