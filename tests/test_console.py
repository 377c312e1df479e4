"""Lines go where the program's logging sends them; the parts of the adapters are found by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from healcore import adapter_registry, console

Err = Callable[..., list[str]]


@pytest.fixture
def err(capsys: pytest.CaptureFixture[str]):
    """Standard error of a program that sets its logging up by `setup`, and has two lines."""
    logger, root = logging.getLogger("healcore"), logging.root

    def lines(setup: str, *, mode: console.Console = "auto") -> list[str]:
        state = (list(root.handlers), root.level, logger.level, logger.propagate)
        try:
            exec(setup, {"logging": logging})
            set_up = (logger.level, logger.propagate, [*logger.handlers], [*root.handlers])
            console.info("begun", mode)
            console.warning("trouble", mode)
            now = (logger.level, logger.propagate, [*logger.handlers], [*root.handlers])
            assert now == set_up, "the program's logging is never changed"
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
        (f"{LOGGER}.setLevel(logging.WARNING)", ["healcore: trouble"]),
        (f"{LOGGER}.propagate = False", PRINTED),
        ("logging.disable()", []),
        (
            "logging.basicConfig(format='%(name)s|%(message)s', level=logging.INFO)",
            ["healcore|begun", "healcore|trouble"],
        ),
    ],
)
def test_what_the_program_has_set_up_decides(setup: str, lines: list[str], err: Err):
    assert err(setup) == lines


def test_console_true_prints_beside_a_file_and_never_twice_and_false_prints_nothing(
    tmp_path: Path, err: Err
):
    file = tmp_path / "run.log"
    for mode, shown in (("auto", []), (True, PRINTED)):
        assert err(f"logging.basicConfig(filename={str(file)!r})", mode=mode) == shown
    assert file.read_text() == "WARNING:healcore:trouble\n" * 2
    to_terminal = "logging.basicConfig(format='%(message)s', level=logging.INFO)"
    assert err(to_terminal, mode=True) == ["begun", "trouble"]
    assert err("", mode=False) == []
    assert err("logging.basicConfig(format='%(message)s')", mode=False) == ["trouble"]
    with pytest.raises(ValueError, match='console must be "auto", True or False, got 3'):
        console.checked(3)


@pytest.mark.parametrize("capability", adapter_registry.PROVIDED)
def test_every_adapter_provides(capability):
    for framework in adapter_registry.PROVIDED[capability]:
        pytest.importorskip("flax" if framework == "jax" else framework)
        provided = adapter_registry.find(framework, capability)
        name = getattr(provided, "__module__", provided.__name__)
        assert name.startswith(f"healcore.{framework}")
