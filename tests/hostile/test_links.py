"""Links and pipes that somebody has planted: nothing is followed, nothing waits."""

import os
from pathlib import Path
from typing import Any

import pytest

from healcore.runtime.store.array_format import SMALL_FILE as FILE
from healcore.runtime.store.checkpoints import CheckpointNotFound, StoreError
from healcore.runtime.store.claim import LOCK
from healcore.runtime.store.manifest import MANIFEST
from tests import forked_programs
from tests.healer.training_loops import loop_of, rules, train
from tests.hostile.run_directories import LENGTH, cut_short
from tests.runtime.store.store_cases import DCP, TORCH_FILE

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


@pytest.mark.parametrize("name", [MANIFEST, FILE])
def test_a_pipe_in_a_checkpoint_is_not_waited_for(name, root):
    store = (TORCH_FILE if name == FILE else DCP).make(root)
    store.save(1, {"x": {"y": 1}}, record={})
    store.wait()
    (folder,) = root.glob("step-*")
    (path,) = folder.rglob(name)
    path.unlink()
    os.mkfifo(path)
    assert name in in_time(
        "from healcore.torch.store import DCPStore; DCPStore(root).verify(1)", root
    )
    with pytest.raises((CheckpointNotFound, StoreError)):
        store.verify(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [(LOCK, "no regular file"), (EVENTS, f"{LENGTH}\n"), (METRICS, f"{LENGTH}\n")],
)
def test_a_pipe_in_the_run_directory_is_not_waited_for(name, expected, root):
    cut_short("torch", root)
    (root / name).unlink(missing_ok=True)
    os.mkfifo(root / name)
    code = "from tests.hostile.run_directories import go_on; print(go_on('torch', root).step)"
    assert expected in in_time(code, root)


def in_time(code: str, root: Path) -> str:
    """What a child prints within a generous time limit: it must not wait for a pipe."""
    start = f"from pathlib import Path; root = Path({str(root)!r}); "
    done = forked_programs.run("-c", start + code, timeout=120)
    return done.stdout + done.stderr
