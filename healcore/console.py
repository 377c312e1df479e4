"""Logs to the logger `healcore`, or prints to standard error if no logging is set up.

Handlers, levels and propagation of loggers are never changed. Without any handler healcore prints
its lines with the prefix `healcore:`. A bare `logging.basicConfig()` counts as no setup, because
absl calls it for Orbax.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

from healcore.core.printable import clean

Console = bool | Literal["auto"]
"""Whether healcore prints its lines itself.

"auto": only if no logging handler receives them. True: unless a handler prints them to the
terminal. False: never.
"""

_logger = logging.getLogger("healcore")


def checked(console: Any) -> Console:
    """Returns its argument. Raises ValueError if that is not a `Console`."""
    if console is True or console is False or console == "auto":
        return console
    raise ValueError(f'console is "auto", True or False, not {console!r}')


def info(line: str, console: Console = "auto") -> None:
    """Logs or prints at INFO."""
    _log(logging.INFO, line, console)


def warning(line: str, console: Console = "auto") -> None:
    """Logs or prints at WARNING."""
    _log(logging.WARNING, line, console)


def _log(level: int, line: str, console: Console) -> None:
    line, handlers = clean(line), _handlers()
    if handlers:
        _logger.log(level, "%s", line, stacklevel=3)
        shown = _logger.isEnabledFor(level) and any(
            _is_terminal(each) and level >= each.level for each in handlers
        )
        if console is True and not shown:
            _print(line)
    elif console and _is_wanted(level):
        _print(line)


def _is_wanted(level: int) -> bool:
    """Whether the levels of the loggers let a line pass, without a handler."""
    least = _logger.level or logging.root.level
    if least == logging.WARNING and not _logger.level:
        least = logging.INFO  # the level of an untouched root logger
    disabled = _logger.disabled or _logger.manager.disable >= level
    record = _logger.makeRecord(_logger.name, level, __file__, 0, "", (), None)
    return level >= least and not disabled and bool(_logger.filter(record))


def _handlers() -> list[logging.Handler]:
    """The handlers of `healcore`'s records, except the handler of a bare `basicConfig()`."""
    found: list[logging.Handler] = []
    current: logging.Logger | None = _logger
    while current is not None:
        found += current.handlers
        current = current.parent if current.propagate else None
    return [each for each in found if not _is_bare(each)]


def _is_bare(handler: logging.Handler) -> bool:
    """Whether `logging.basicConfig()` without arguments has made the handler."""
    formatter = handler.formatter
    return (
        type(handler) is logging.StreamHandler
        and handler in logging.root.handlers
        and logging.root.level == logging.WARNING
        and handler.level == logging.NOTSET
        and not handler.filters
        and handler.stream is sys.stderr
        and type(formatter) is logging.Formatter
        and formatter._fmt == logging.BASIC_FORMAT
    )


def _is_terminal(handler: logging.Handler) -> bool:
    """Whether a handler writes where `_print` writes, or to standard output."""
    if "rich" in type(handler).__module__:
        return True
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return isinstance(handler, logging.StreamHandler) and handler.stream in streams


def _print(line: str) -> None:
    """Writes to the current `sys.stderr`, above a progress bar of tqdm or rich."""
    line = f"healcore: {line}"
    try:
        tqdm: Any = sys.modules.get("tqdm.std")  # if not imported, there is no bar of tqdm
        if tqdm is None:
            print(line, file=sys.stderr, flush=True)
        else:
            tqdm.tqdm.write(line, file=sys.stderr)
    except Exception:  # a closed stream must not end the run
        return


def counted(number: int, noun: str, nouns: str = "") -> str:
    """A number with its noun: "1 batch", "2,000 batches"."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"
