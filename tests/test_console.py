"""Lines go where the program's logging sends them."""

from pathlib import Path
from typing import Any

import pytest

from healcore import console
from tests import forked_programs

PROGRAM = """
import logging
from healcore import console
logger, root = logging.getLogger("healcore"), logging.root
{setup}
before = logger.level, logger.propagate, [*logger.handlers], [*root.handlers]
console.info("begun", {mode!r})
console.warning("trouble", {mode!r})
after = logger.level, logger.propagate, [*logger.handlers], [*root.handlers]
assert after == before, "the program's logging is never changed"
"""


def err(setup: str, mode: Any = "auto") -> list[str]:
    """Standard error of a program that sets its logging up by `setup`, and has two lines."""
    program = PROGRAM.format(setup=setup, mode=mode)
    done = forked_programs.run("-c", program, imports=("healcore.console",))
    return done.stderr.splitlines()


PRINTED = ["healcore: begun", "healcore: trouble"]


@pytest.mark.parametrize(
    ("setup", "lines"),
    [
        ("", PRINTED),
        ("logging.basicConfig()", PRINTED),  # absl does this in programs with Orbax
        ("logger.addHandler(logging.NullHandler())", []),
        ("logger.setLevel(logging.WARNING)", ["healcore: trouble"]),
        ("logger.propagate = False", PRINTED),
        ("logging.disable()", []),
        ("logging.basicConfig(format='%(name)s|%(message)s')", ["healcore|trouble"]),
        ("logging.basicConfig(format='%(message)s', level='INFO')", PRINTED),  # nothing names it
    ],
)
def test_what_the_program_has_set_up_decides(setup: str, lines: list[str]):
    assert err(setup) == lines


def test_console_true_prints_beside_a_file_and_false_prints_nothing(tmp_path: Path):
    file = tmp_path / "run.log"
    for mode, shown in (("auto", []), (True, PRINTED)):
        assert err(f"logging.basicConfig(filename={str(file)!r})", mode=mode) == shown
    assert file.read_text() == "WARNING:healcore:trouble\n" * 2
    assert err("", mode=False) == []
    assert err("logging.basicConfig(format='%(message)s')", mode=False) == PRINTED[1:]
    with pytest.raises(ValueError, match='console must be "auto", True or False, got 3'):
        console.checked_console(3)
