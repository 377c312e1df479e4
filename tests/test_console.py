"""Lines go where the program's logging sends them, and to standard error if it has none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from healcore import console

Err = Callable[..., list[str]]


@pytest.fixture
def err(capsys: pytest.CaptureFixture[str]):
    """Standard error of a program that sets its logging up by `setup`, and has two lines."""
    logger, root = logging.getLogger("healcore"), logging.root

    def lines(setup: str, *, mode: console.Console = "auto") -> list[str]:
        state = (list(root.handlers), root.level, logger.level, logger.propagate)
        try:
            exec(setup, {"logging": logging})
            console.info("begun", mode)
            console.warning("trouble", mode)
        finally:
            for handler in {*root.handlers, *logger.handlers}:
                handler.close()
            logger.handlers.clear()
            root.handlers[:], root.level = state[:2]
            logger.setLevel(state[2])
            logger.propagate = state[3]
            logging.disable(logging.NOTSET)
        return capsys.readouterr().err.splitlines()

    return lines


PRINTED = ["healcore: begun", "healcore: trouble"]
LOGGER = "logging.getLogger('healcore')"


@pytest.mark.parametrize(
    ("setup", "lines"),
    [
        ("", PRINTED),
        ("logging.basicConfig()", PRINTED),  # absl does this in programs with Orbax
        (f"{LOGGER}.addHandler(logging.NullHandler())", []),
        (f"{LOGGER}.setLevel(logging.ERROR)", []),
        (f"{LOGGER}.setLevel(logging.WARNING)", ["healcore: trouble"]),
        (f"{LOGGER}.propagate = False", PRINTED),
        ("logging.disable()", []),
        ("logging.basicConfig(format='%(name)s|%(message)s')", ["healcore|trouble"]),
        (
            "logging.basicConfig(format='%(name)s|%(message)s', level=logging.INFO)",
            ["healcore|begun", "healcore|trouble"],
        ),
    ],
)
def test_what_the_program_has_set_up_decides(setup: str, lines: list[str], err: Err):
    assert err(setup) == lines


def test_the_users_file_has_the_warnings_and_the_terminal_nothing(tmp_path: Path, err: Err):
    file = tmp_path / "run.log"
    assert err(f"logging.basicConfig(filename={str(file)!r})") == []
    assert file.read_text() == "WARNING:healcore:trouble\n"


def test_console_true_prints_beside_a_file_and_never_twice(tmp_path: Path, err: Err):
    file = tmp_path / "run.log"
    assert err(f"logging.basicConfig(filename={str(file)!r})", mode=True) == PRINTED
    assert file.read_text() == "WARNING:healcore:trouble\n"
    shown = err("logging.basicConfig(format='%(message)s', level=logging.INFO)", mode=True)
    assert shown == ["begun", "trouble"]


def test_console_false_prints_nothing(err: Err):
    assert err("", mode=False) == []
    assert err("logging.basicConfig(format='%(message)s')", mode=False) == ["trouble"]


def test_the_programs_logging_is_never_changed():
    logger = logging.getLogger("healcore")
    before = (logger.level, logger.propagate, list(logger.handlers), list(logging.root.handlers))
    console.warning("a line")
    now = (logger.level, logger.propagate, list(logger.handlers), list(logging.root.handlers))
    assert now == before


def test_another_value_is_refused():
    with pytest.raises(ValueError, match='console must be "auto", True or False, got 3'):
        console.checked(3)
