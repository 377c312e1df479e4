"""`SubcommandGroup`: a group of commands that names the commands for a file without a command."""

from __future__ import annotations

import difflib
import shlex
from typing import Any, NoReturn

from typer.core import TyperGroup

from healcore.tools.output import fail


class SubcommandGroup(TyperGroup):
    """A group of commands. If the first argument is not a command, it says what to write instead.

    `healcore probe runs/7` prints `healcore probe checkpoint runs/7` and the other probes, instead
    of "No such command". A mistyped command gets the suggestion of typer.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command that the first argument names.

        Args:
            ctx: the context of the command line.
            args: arguments after the name of the group, at least one.

        Returns:
            Name, command and its arguments, as typer expects them.

        Raises:
            typer.Exit: the first argument is not a command and resembles none.
        """
        given = args[0]
        is_mistyped = bool(difflib.get_close_matches(given, self.commands))
        if given not in self.commands and not given.startswith("-") and not is_mistyped:
            self._suggest(str(ctx.info_name), args)
        return super().resolve_command(ctx, args)

    def _suggest(self, group: str, args: list[str]) -> NoReturn:
        """Prints the commands of the group with these arguments, and exits."""
        lines: list[str] = []
        for name, command in self.commands.items():
            if any(param.param_type_name == "argument" for param in command.params):
                words = shlex.join(["healcore", group, name, *args])
                lines.append(f"  {words}\n      {command.get_short_help_str(90)}")
        fail("\n".join([f"name a command before {args[0]!r}:", *lines]))
