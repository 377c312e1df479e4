"""For all tests: none may depend on how fast the machine is, or on how the tests were started."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("any speed", deadline=None)
settings.load_profile("any speed")

# A shell's background jobs ignore Ctrl-C, and so would every process that a test starts: those that
# are sent one would never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Clients of trackers read these when they are imported, which transformers and TRL may do for any
# test: nothing goes to a network, and all that they store is in a directory of this session.
_trackers = tempfile.TemporaryDirectory(prefix="trackers-")
os.environ |= {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_DIR": _trackers.name,
    "TRACKIO_DIR": str(Path(_trackers.name) / "trackio"),
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_TRACKING_URI": (Path(_trackers.name) / "mlruns").as_uri(),
}


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Collecting garbage takes a second with all frameworks imported, and Trainers often do it."""
    gc.collect()
    gc.freeze()


OPTIMIZED = (
    "tests.parity",
    "tests.core",
    "tests.tools.replay",
    "tests.tools.sweep",
    "tests.jax.test_bad_updates",
    "tests.jax.test_commit",
    "tests.jax.test_fixed_cost",
    "tests.jax.test_skip_exact",
)
"""About what XLA makes of a step: that its optimizations change no decision."""


@pytest.fixture(autouse=True, scope="module")
def few_optimizations(request: pytest.FixtureRequest, small_heap: None) -> Iterator[None]:
    """Elsewhere most of the time in JAX goes into compiling: a third less of it."""
    few = not request.module.__name__.startswith(OPTIMIZED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", str(int(few)))  # also for other processes
        if "jax" in sys.modules:
            sys.modules["jax"].config.update("jax_disable_most_optimizations", few)
        yield
