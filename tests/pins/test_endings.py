"""How a run may end: exit status, exception, last line, checkpoints, report, and the next start.

`endings/NAME.txt` has what a program leaves that ends in this way. The golden files are written
again as `tests/pins/golden.py` says.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from healcore.jax import OrbaxStore
from healcore.tools.cli import app
from healcore.torch import DCPStore
from tests import forked_programs
from tests.pins import golden

GOLDEN = Path(__file__).parent / "endings"
ENDINGS = {
    "end": ["end"],
    "end of a generator": ["end of a generator"],
    "break": ["break"],
    "exception": ["exception"],
    "exit": ["exit"],
    "KeyboardInterrupt": ["KeyboardInterrupt"],
    "SIGINT": ["SIGINT"],
    "SIGTERM": ["SIGTERM"],
    "SIGUSR1": ["SIGUSR1"],
    "SIGKILL": ["SIGKILL"],
    "stop file": ["stop file"],
    "policy stop": ["policy stop"],
    "only NaN": ["only NaN"],
    "weights become NaN": ["weights become NaN"],
    "out of memory once": ["out of memory once"],
    "out of memory twice": ["out of memory twice"],
    "out of memory without parts": ["out of memory without parts"],
    "no step": ["no step"],
    "empty": ["empty"],
    "second start": ["end", "end"],
    "second start with other weights": ["end", "other weights"],
    "second start after a break": ["break", "end"],
    "second start after SIGKILL": ["SIGKILL", "end"],
    "second start after a stop": ["policy stop", "end"],
    "second start after only NaN": ["only NaN", "only NaN"],
    "second start with a stop file": ["stop file", "end"],
}
"""Name -> the endings of the starts of a run, one after the other."""


def last_line(printed: str) -> str:
    """The last line of healcore, which a traceback of Python may follow."""
    lines = [line for line in printed.splitlines() if line.startswith("healcore")]
    return lines[-1] if lines else "none"


def checkpoints(framework: str, folder: Path) -> str:
    store: Any = (DCPStore if framework == "torch" else OrbaxStore)(folder)
    return ", ".join(f"{each.step} {each.status}" for each in store.checkpoints()) or "none"


def postmortem(folder: Path) -> str:
    """The newest postmortem."""
    found = [json.loads(path.read_text()) for path in folder.glob("*postmortem*.json")]
    if not found:
        return "none"
    newest = max(found, key=lambda each: each["ended"])
    return f"{newest['ending']} at {newest['step']}, last good {newest['last_good']}"


def follow(folder: Path) -> int:
    return CliRunner().invoke(app, ["events", "show", str(folder), "--follow"]).exit_code


def left_by(framework: str, starts: list[str], folder: Path) -> str:
    """What the last start of a run has printed, raised and left."""
    module = "tests.pins.programs.endings"
    done: Any = None
    for ending in starts:
        done = forked_programs.run("-m", module, folder, framework, ending)
    store = folder / "store"
    lines = [
        f"exit status {done.returncode}",
        *done.stdout.strip().splitlines(),
        f"last line: {last_line(done.stderr)}",
        f"postmortem: {postmortem(store)}",
    ]
    # A killed run may have been about to write, and without an event `end` the command waits.
    if starts[-1] != "SIGKILL":
        lines.append(f"checkpoints: {checkpoints(framework, store)}")
        lines.append(f"events show --follow exits with {follow(store)}")
    return golden.normalized("\n".join(each.strip() for each in lines) + "\n", folder)


IN_JAX = ["end", "break", "exception", "SIGTERM", "stop file", "policy stop", "only NaN"]
IN_JAX += ["weights become NaN", "out of memory twice", "second start"]


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_JAX)
def test_a_run_in_jax_ends_in_the_same_way(name: str, tmp_path: Path):
    golden.check(GOLDEN / f"jax/{name}.txt", left_by("jax", ENDINGS[name], tmp_path / "run"))


@pytest.mark.parametrize("name", ENDINGS)
def test_a_run_ends_with_its_status_its_line_and_its_files(name: str, tmp_path: Path):
    golden.check(GOLDEN / f"{name}.txt", left_by("torch", ENDINGS[name], tmp_path / "run"))
