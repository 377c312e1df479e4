"""docs/cli.md lists every command and option, as the command itself describes them.

`python -m tests.tools.cli.test_page` writes the generated part of the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from healcore.tools.cli import app

PATH = Path(__file__).parents[3] / "docs" / "cli.md"
BEGIN = "<!-- options: begin (written by python -m tests.tools.cli.test_page) -->"
END = "<!-- options: end -->"


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """All commands without subcommands, with their names."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, each in command.commands.items():
        yield from commands(each, f"{name} {word}")


COMMANDS = dict(commands(typer.main.get_command(app), "healcore"))


def default_of(option: Any) -> str:
    """Default of an option as text; an empty string for a flag or without a default."""
    shown = option.show_default
    if isinstance(shown, str):
        return f"`{shown}`"
    if option.default is None or isinstance(option.default, bool):
        return ""
    return f"`{getattr(option.default, 'value', option.default)}`"


def section(name: str, command: Any) -> str:
    """The part of the page about one command."""
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    usage = " ".join([name, *(each.metavar for each in arguments)])
    lines = [f"### {name}", "", f"    {usage}", "", command.help, ""]
    lines += [f"`{each.metavar}`: {each.help}\n" for each in arguments]
    if options:
        lines += ["| option | default | |", "|---|---|---|"]
    for each in options:
        value = f" {each.metavar}" if each.metavar else ""
        *aliases, last = each.opts
        names = ", ".join([*(f"`{flag}`" for flag in aliases), f"`{last}{value}`"])
        default, help_ = default_of(each), each.help
        if found := re.search(r" \[(.+)\]$", help_):  # of probes, whose defaults come from a model
            default, help_ = f"`{found[1]}`", help_[: found.start()]
        lines.append(f"| {names} | {default} | {help_} |")
    return "\n".join(lines).rstrip() + "\n"


def generated() -> str:
    """The generated part of the page."""
    return "\n".join(section(name, command) for name, command in COMMANDS.items())


def written(page: str) -> str:
    """The page with the generated part of the present commands, between its two marks."""
    assert page.count(BEGIN) == page.count(END) == 1
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{generated()}\n{END}{rest.split(END)[1]}"


def test_every_command_and_option_is_on_the_page():
    page = PATH.read_text()
    assert written(page) == page, "run python -m tests.tools.cli.test_page"


if __name__ == "__main__":
    PATH.write_text(written(PATH.read_text()))
