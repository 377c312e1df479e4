"""Writes the lines that a user reads: logs or prints them, and formats the words in them.

Lines go to the logger `healcore`, or to standard error if no logging is set up. healcore never
changes handlers, levels or propagation of loggers. Lines have the prefix `healcore:`, unless each
handler's format has the logger's name. A `logging.basicConfig()` without arguments counts as no
setup, because absl makes this call for Orbax.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, Literal

from healcore.core.errors import clean

Console = bool | Literal["auto"]
"""Whether healcore prints its lines itself.

"auto": only if no logging handler receives them. True: always. False: never.
"""

_MAX_LINE = 160 - len("healcore: ")
_logger = logging.getLogger("healcore")

_REMOVED_FRAMES = f"\n{'-' * 20}\nFor simplicity, JAX has removed its internal frames"
"""How a note of JAX about the traceback of an exception begins; it is the last one."""


def checked_console(console: Any) -> Console:
    """Checks that `console` is a `Console`, or raises ValueError."""
    if console is True or console is False or console == "auto":
        return console
    raise ValueError(f'console must be "auto", True or False, got {console!r}')


def stacklevel_of_program() -> int:
    """The `stacklevel` with which `warnings.warn` points to the line of the program.

    Call it in the arguments of `warnings.warn`. A warning then names the line that has called
    healcore, however many functions of healcore are between.
    """
    level = 1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and f"{frame.f_globals.get('__name__')}.".startswith("healcore."):
        frame = frame.f_back
        level += 1
    return level


def _log(level: int, line: str, console: Console = "auto") -> None:
    line = clean(line)
    handlers = _handlers()
    if handlers:
        formats = [getattr(each.formatter, "_fmt", None) or "" for each in handlers]
        prefix = "healcore: "
        if all("(name)" in each or "{name" in each for each in formats):
            prefix = ""
        _logger.log(level, "%s%s", prefix, line, stacklevel=2)
    if console is True or (console == "auto" and not handlers and _is_enabled(level)):
        _print(f"healcore: {line}")


info = partial(_log, logging.INFO)
"""Logs or prints a line at INFO."""
warning = partial(_log, logging.WARNING)
"""Logs or prints a line at WARNING."""
error = partial(_log, logging.ERROR)
"""Logs or prints a line at ERROR."""


def _is_enabled(level: int) -> bool:
    """Whether the logger's level lets a line pass; by default INFO and above."""
    threshold = _logger.level or logging.root.level
    if threshold == logging.WARNING and not _logger.level:
        threshold = logging.INFO  # WARNING is the root logger's default
    return level >= threshold and level > _logger.manager.disable


def _handlers() -> list[logging.Handler]:
    """Handlers that receive `healcore`'s records, except one of a bare `basicConfig()`."""
    handlers: list[logging.Handler] = []
    current: logging.Logger | None = _logger
    while current is not None:
        handlers += current.handlers
        if not current.propagate:
            break
        current = current.parent
    return [handler for handler in handlers if not _is_basic_config(handler)]


def _is_basic_config(handler: logging.Handler) -> bool:
    """Whether the handler comes from `logging.basicConfig()` without arguments."""
    return (
        handler in logging.root.handlers
        and logging.root.level == logging.WARNING
        and getattr(handler, "stream", None) is sys.stderr
        and getattr(handler.formatter, "_fmt", None) == logging.BASIC_FORMAT
    )


def _print(line: str) -> None:
    """Prints to the current `sys.stderr`, above a progress bar of tqdm or rich."""
    with suppress(Exception):  # a closed stream must not end the run
        tqdm: Any = sys.modules.get("tqdm.std")  # without the module no tqdm bar is shown
        if tqdm is None:
            print(line, file=sys.stderr, flush=True)
        else:
            tqdm.tqdm.write(line, file=sys.stderr)


def fitted(line: str) -> str:
    """The first line of a text about an event, at most 160 characters with its prefix.

    The event and the report have the rest.
    """
    line = line.partition("\n")[0]
    return line if len(line) <= _MAX_LINE else f"{line[: _MAX_LINE - 3]}..."


def counted(number: int, noun: str, plural: str = "") -> str:
    """Formats a number with its noun: "1 batch", "2,000 batches"."""
    if number != 1:
        noun = plural or f"{noun}s"
    return f"{number:,} {noun}"


def first_of(items: Sequence[str], limit: int = 3, separator: str = ", ") -> str:
    """Joins the first items, and adds the number of the other items: "a, b, c and 2 more"."""
    text = separator.join(items[:limit])
    if len(items) > limit:
        text += f"{separator.rstrip(', ')} and {len(items) - limit} more"
    return text


def first_lines(lines: Sequence[str], limit: int, prefix: str = "") -> list[str]:
    """Lists the first lines, each with a prefix, then the number of the other lines."""
    first = [f"{prefix}{line}" for line in lines[:limit]]
    if len(lines) > limit:
        first.append(f"{prefix}and {len(lines) - limit:,} more")
    return first


def is_logged(number: int) -> bool:
    """Whether occurrence `number` has a line: the first ten, then each power of two."""
    return number <= 10 or number & (number - 1) == 0


def is_power_of_ten(number: int) -> bool:
    """Whether a count has just reached 1, 10, 100, ..."""
    return str(number).rstrip("0") == "1"


def error_text(error: BaseException) -> str:
    """Formats an exception for an event or a message: its type, its message and its notes.

    Args:
        error: any exception, also one whose `__str__` raises.
    """
    text = "".join(traceback.format_exception_only(error)).strip()
    return text.partition(_REMOVED_FRAMES)[0]
