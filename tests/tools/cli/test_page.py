"""docs/cli.md names every command, and options that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from healcore.tools.cli import app

PAGES = [
    path.read_text()
    for name in ("cli", "replay", "recipes", "reports", "tutorial")
    for path in [Path(__file__).parents[3] / "docs" / f"{name}.md"]
]


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """All commands without subcommands, with their names."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, each in command.commands.items():
        yield from commands(each, f"{name} {word}")


COMMANDS = dict(commands(typer.main.get_command(app), "healcore"))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_names_every_command(name: str):
    *group, word = name.split()
    assert re.search(rf"`{' '.join(group)} (\w+`, `)?[^`]*\b{word}\b|`{word}`|`{word} ", PAGES[0])


def test_every_option_on_the_pages_exists():
    known = {flag for each in COMMANDS.values() for param in each.params for flag in param.opts}
    known |= {"--help", "--version"}
    for line in "\n".join(PAGES).splitlines():
        if line.lstrip("|` ").startswith("healcore "):
            assert set(re.findall(r"(?<= )--[a-z-]+", line)) <= known, line
    in_tables = set(re.findall(r"`(--[a-z-]+)", PAGES[0]))
    assert len(in_tables) > 5
    assert in_tables <= known
