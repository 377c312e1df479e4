"""The two signals by which a guard reaches a process that executes no Python code any more.

Both handlers are C functions, so they run while a thread holds the GIL for ever. They are real-time
signals, which neither shells nor schedulers send. Linux only.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import sys
from pathlib import Path
from typing import NamedTuple

DUMPS = range(61, 49, -1)
"""Signals one of which writes the Python stacks of all threads (faulthandler): the first free one.
"""

END = 62
"""Ends the process with exit status 62.

The handler is libc's `_exit`. The kernel passes the signal's number to a handler, and `_exit` takes
it for the status. That is why the status is below 65, and not 75 (EX_TEMPFAIL of sysexits.h): a
handler that passes another number would have to be machine code of our own.
"""


def supported() -> bool:
    """Whether a guard can work here: on Linux, in a Python that can start another one."""
    if sys.platform != "linux" or not sys.executable or getattr(sys, "frozen", False):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # a kernel before 5.3, or a sandbox
        return False
    return True


class Installed(NamedTuple):
    """What a guard needs to know of its process."""

    stacks: int
    """Descriptor of the file that the stacks are written to."""
    dump: int
    """The signal that has them written; 0: none was free."""


def install() -> Installed:
    """Installs both handlers, where they are not there any more or not yet.

    A signal that something else in this process uses, also in C, is left to it: without `END` the
    process is ended by SIGKILL.
    """
    stacks, used = _stacks_file(os.getpid()), _used()
    # Lightning's Trainer sets back every signal at the end of a fit, and knows nothing of handlers
    # in C; faulthandler installs only what it takes for not installed.
    for number in _own - used:
        faulthandler.unregister(number)
        _own.remove(number)
    used -= _own
    dump = next((number for number in DUMPS if number not in used), 0)
    if dump:
        faulthandler.register(dump, file=stacks, all_threads=True, chain=False)
        _own.add(dump)
    if END not in used | _own:
        _own.add(END)
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        libc.signal(END, ctypes.cast(libc._exit, ctypes.c_void_p))
    return Installed(stacks, dump)


_own: set[int] = set()
"""Signals that this module has installed; a forked child has them too."""


@functools.cache
def _stacks_file(pid: int) -> int:
    del pid  # a forked child needs one of its own
    return os.memfd_create("healcore-stacks")


def _used() -> set[int]:
    """The signals that this process handles or ignores, in Python or in C."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = {key: value for key, _, value in (line.partition(":") for line in lines)}
    mask = int(fields["SigCgt"], 16) | int(fields["SigIgn"], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}
