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


SLOW = (
    # Several processes; the ranks of `tests/healer/test_ranks.py` are in `make test`.
    "tests/healer/test_cut_link.py",
    "tests/healer/test_elastic.py",
    "tests/healer/test_ending_ranks.py",
    "tests/healer/test_failing_rank.py",
    "tests/healer/test_killed.py",
    "tests/jax/test_several_processes.py",
    "tests/jax/test_signals.py::test_inside_shard_map_on_four_devices",
    "tests/packaging/test_trainers_ranks.py",
    "tests/torch/driver/test_out_of_memory_on_ranks.py",
    "tests/torch/driver/test_rollback_of_two_ranks.py",
    "tests/torch/driver/test_sharded_restart.py",
    "tests/torch/test_four_ranks.py",
    "tests/torch/test_signal_allreduce.py",
    # The same bits once more: `tests/parity/test_fuzz.py` and `test_safety.py` are in `make test`.
    "tests/parity/test_compiled.py",
    "tests/parity/test_moving.py",
    "tests/parity/test_random_policies.py",
    "tests/parity/test_recorded_runs.py",
    "tests/parity/test_scalars.py",
    "tests/parity/test_vmapped_policies.py",
    "tests/tools/replay/test_backends.py",
    "tests/tools/replay/test_recorded.py",
    "tests/tools/sweep/test_same_decisions.py::test_jax_equals_numpy_on_fuzzed_runs",
    "tests/tools/sweep/test_same_decisions.py::test_recorded_runs_in_jax",
    # Published policies against their originals: each policy is loaded, replayed and attached.
    "tests/catalogue/skip/",
    "tests/catalogue/watch/",
    "tests/catalogue/test_every_policy.py::test_it_protects_in_jax_as_in_torch",
    # About our own oracles, benchmarks, examples and limits.
    "tests/benchmarks/test_healbench_jax.py",
    "tests/core/test_escape.py::test_clipping_is_back_at_its_usual_amount",
    "tests/core/test_planted_errors.py",
    "tests/demo/test_comparison.py",
    "tests/examples/test_accelerate_loop.py",
    "tests/examples/test_jax_data_and_rates.py",
    "tests/examples/test_jax_healers.py",
    "tests/examples/test_lightning.py",
    "tests/hostile/test_logs.py::test_zeros_in_a_gz",
    "tests/tools/probe/test_loss.py::test_memory_does_not_grow_with_the_log",
    "tests/tools/probe/test_recorded_runs.py",
    # The other framework, store or optimizer for what `make test` shows with one.
    "tests/healer/test_crashes.py::test_every_point_of_a_rollback[jax]",
    "tests/healer/test_drift.py::test_it_is_left_behind[jax]",
    "tests/healer/test_slow_disks.py::test_the_rollback_target_depends_only_on_the_steps",
    "tests/jax/test_skip_exact.py::test_eager_steps_are_as_exact",
    "tests/tools/probe/test_optimizer_jax.py::test_wherever_the_moments_are",
    "tests/tools/sweep/test_command.py",
    "tests/tools/sweep/test_report.py",
    "tests/torch/test_compile.py",
)
"""What begins like one of these has the marker `slow`, unless it has `stress`. More than a third of
the time is for these tests."""


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the slow tests."""
    for item in items:
        if item.nodeid.startswith(SLOW) and not item.get_closest_marker("stress"):
            item.add_marker(pytest.mark.slow)


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
