"""The two signals by which a guard reaches a process that executes no Python code any more.

Both handlers are C functions, so they run while a thread holds the GIL for ever. They are real-time
signals, which neither shells nor schedulers send. Linux only.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import signal
import sys

DUMP = 61
"""Writes the Python stacks of all threads (faulthandler)."""

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


def install() -> int:
    """Installs both handlers, once per process; the descriptor that the stacks are written to.

    A signal that something else in this process uses already is left to it: stacks are then
    missing, or the process is ended by SIGKILL.
    """
    return _install(os.getpid())


@functools.cache  # a forked child has a descriptor, and needs one of its own
def _install(pid: int) -> int:
    del pid
    stacks = os.memfd_create("healcore-stacks")
    if signal.getsignal(DUMP) is signal.SIG_DFL:
        faulthandler.register(DUMP, file=stacks, all_threads=True, chain=False)
    if signal.getsignal(END) is signal.SIG_DFL:
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        libc.signal(END, ctypes.cast(libc._exit, ctypes.c_void_p))
    return stacks
