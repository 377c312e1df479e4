"""Groups of commands that say what to write instead of a wrong command line."""

from __future__ import annotations

import difflib
import itertools
import shlex
from typing import Any, NoReturn

from typer.core import TyperGroup

from healcore.tools.output import fail


class CommandGroup(TyperGroup):
    """A group of commands in which no option takes the next option as its value.

    `healcore replay A --jsonl --report page.html` would otherwise write a file `--report`, and read
    `page.html` as a second trace.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command that the first argument names, and checks its options.

        Args:
            ctx: the context of the command line.
            args: arguments after the name of the group, at least one.

        Returns:
            Name, command and its arguments, as typer expects them.

        Raises:
            typer.Exit: an option without a value is followed by another option.
        """
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None:
            _check_values(command, rest)
        return name, command, rest


def _check_values(command: Any, args: list[str]) -> None:
    """Exits with a message if the value of an option is missing and another option follows."""
    flags: set[str] = set()  # every name of an option, such as --policy and -p
    with_value: dict[str, Any] = {}  # name of an option that takes a value -> the option
    for param in command.params:
        if param.param_type_name != "option":
            continue
        flags.update(param.opts, param.secondary_opts)
        if not param.is_flag:
            with_value |= dict.fromkeys(param.opts, param)
    for option, value in itertools.pairwise(args):
        if option == "--":  # only arguments follow
            return
        if option in with_value and (value.startswith("--") or value in flags):
            param = with_value[option]
            long = max(param.opts, key=len)  # `-p=x` would be the value "=x"
            fail(
                f"{option} needs a value, and {value} follows it: write {option} "
                f"{param.metavar or 'VALUE'} {value}, or {long}={value} if {value} is the value"
            )


class SubcommandGroup(CommandGroup):
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
