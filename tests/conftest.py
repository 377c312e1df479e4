"""For all tests: none may depend on how fast the machine is, or on how the tests were started."""

import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# A test that names no number tries 25 cases; `make test-slow` chooses the second profile. Both try
# the same cases each time, so that CI judges the change and not its luck. The third looks for more.
settings.register_profile("few cases", deadline=None, max_examples=25, derandomize=True)
settings.register_profile("many cases", deadline=None, derandomize=True)
settings.register_profile("random cases", deadline=None)
settings.load_profile("few cases")

# Compiled programs are shared by all workers, and by later runs on this machine.
_compiled = Path(tempfile.gettempdir()) / f"healcore-tests-{os.getuid()}"
_compiled.mkdir(mode=0o700, exist_ok=True)
os.environ |= {
    "JAX_COMPILATION_CACHE_DIR": str(_compiled),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}

# A shell's background jobs ignore Ctrl-C, and so would every process that a test starts: those that
# are sent one would never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The frameworks make millions of objects that stay: no search for garbage while they are imported.
# And rewriting the assertions of all files takes each worker some seconds: not in each run.
gc.disable()
sys.dont_write_bytecode = False

# Temporary files in memory where it has room: the tests write 15,000 files and sync many of them.
if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 2 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

# Clients of trackers read these when they are imported, which transformers and TRL may do for any
# test: nothing goes to a network, and all that they store is in a directory of this session.
_trackers = tempfile.TemporaryDirectory(prefix="trackers-")
os.environ |= {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_DIR": _trackers.name,
    "TRACKIO_DIR": str(Path(_trackers.name) / "trackio"),
}


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Takes pytest's log handlers away from a test that reads standard error.

    healcore prints its lines only in a program that has set up no logging.
    """
    names = {*pyfuncitem.fixturenames}
    prints = bool({"capsys", "capfd"} & names) and "caplog" not in names
    root = logging.root
    handlers = root.handlers[:]
    if prints:
        root.handlers.clear()
    try:
        return (yield)
    finally:
        if prints:
            root.handlers[:] = handlers


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Collecting garbage takes a second with all frameworks imported, and Trainers often do it."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    gc.enable()


OPTIMIZED = (
    "tests.parity",
    "tests.core",
    "tests.jax.test_norm_limit",
    "tests.jax.test_skip_exact",
)
"""About what XLA makes of a step: that its optimizations change no decision, and no bits."""


@pytest.fixture(autouse=True, scope="module")
def few_optimizations(request: pytest.FixtureRequest, small_heap: None) -> Iterator[None]:
    """Elsewhere most of the time in JAX goes into compiling: a third less of it."""
    few = not request.module.__name__.startswith(OPTIMIZED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", str(int(few)))  # also for other processes
        if "jax" in sys.modules:
            sys.modules["jax"].config.update("jax_disable_most_optimizations", few)
        yield
