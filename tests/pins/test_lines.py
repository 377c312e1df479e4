"""What a run says: its lines on the console, and the row of each kind of event.

`lines/console/PROGRAM.txt` has all lines that a program of `programs/lines.py` prints.
`lines/KIND.txt` has the rows of `healcore events show` of a kind, by program. The golden files are
written again as `tests/pins/golden.py` says.
"""

import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from healcore.tools.cli import app
from tests import forked_programs
from tests.pins import golden

GOLDEN = Path(__file__).parent / "lines"
KINDS = {
    "start": ["restart", "observed"],
    "resume": ["restart", "flipped_bit"],
    "save": ["restart", "exception"],
    "save_failed": ["full_disk"],
    "good": ["restart", "bad_weights"],
    "damaged": ["flipped_bit"],
    "alarm": ["bad_batch", "observed", "bad_weights", "cut"],
    "over": ["bad_batch", "bad_weights"],
    "assessment": ["bad_weights"],
    "rollback": ["bad_weights", "bad_weights_again", "cut"],
    "hook": ["hooked"],
    "fault": ["exception", "out_of_memory", "lost_connection"],
    "note": ["ranks", "bad_weights_again"],
    "stop": ["stopped"],
    "problem": ["observed", "flipped_bit", "unfinished_window"],
    "end": ["restart", "exception", "stopped", "bad_batch"],
}
"""Kind of event -> programs whose rows are in its file."""
PROGRAMS = sorted({program for programs in KINDS.values() for program in programs})
COMPARED = ("worse", "kept_damage")
"""Programs of 200 steps that compare weights. Their rows are in `lines/console` too."""


class Output(NamedTuple):
    """What a program has printed, and what `healcore events show` prints about it."""

    console: str
    rows: list[str]

    def of_kind(self, kind: str) -> list[str]:
        return [row for row in self.rows if row.split()[2] == kind]


@cache
def output(program: str) -> Output:
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        done = forked_programs.run("-m", "tests.pins.programs.lines", run, program)
        assert done.returncode == 0, done.stderr[-3000:]
        shown = CliRunner().invoke(app, ["events", "show", str(run / "store")])
        assert shown.exit_code == 0, shown.output
        console = rounded(golden.normalized(done.stderr, run))
        rows = rounded(golden.normalized(shown.stdout, run)).splitlines()
    return Output(console, [row for row in rows if row.startswith("TIME")])


def rounded(text: str) -> str:
    """Two digits of each loss and norm: another processor has other last digits."""

    def short(found: re.Match[str]) -> str:
        return f"{found[1]} {float(found[2]):.2g}"

    names = "loss|gradient norm|kept below|it was|gradients ×"
    return re.sub(rf"({names}) (\d[\d.]*\d)", short, text)


@pytest.mark.parametrize("kind", KINDS)
def test_the_row_of_a_kind_of_event(kind: str):
    lines = []
    for program in KINDS[kind]:
        found = output(program).of_kind(kind)
        assert found, f"{program} has no event {kind}"
        lines += [f"{program}:", *found, ""]
    golden.check(GOLDEN / f"{kind}.txt", "\n".join(lines))


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_lines_of_a_program(program: str):
    golden.check(GOLDEN / f"console/{program}.txt", output(program).console)


@pytest.mark.slow
@pytest.mark.parametrize("program", COMPARED)
def test_the_lines_of_a_program_that_compares_weights(program: str):
    found = output(program)
    rows = [row for kind in ("assessment", "rollback") for row in found.of_kind(kind)]
    golden.check(GOLDEN / f"console/{program}.txt", "\n".join([found.console, *rows, ""]))


def test_each_kind_has_its_file():
    schema: Any = json.loads(Path("docs/events.schema.json").read_text())
    kinds = {each["if"]["properties"]["kind"]["const"] for each in schema["allOf"]}
    assert kinds == {*KINDS} == {path.stem for path in GOLDEN.glob("*.txt")}
