"""For all tests: none may depend on how fast the machine is, or on how the tests were started."""

import gc
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# A test that names no number tries 25 random cases; `make test-slow` chooses the other profile.
settings.register_profile("few cases", deadline=None, max_examples=25)
settings.register_profile("many cases", deadline=None)
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
    prints, root = bool({"capsys", "capfd"} & names) and "caplog" not in names, logging.root
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


SLOW = (
    # Several processes; the ranks of `tests/healer/test_ranks.py` are in `make test`.
    "tests/healer/test_elastic.py",
    "tests/healer/test_ending_ranks.py",
    "tests/healer/test_killed.py",
    "tests/jax/test_several_processes.py",
    "tests/jax/test_signals.py::test_inside_shard_map_on_four_devices",
    "tests/runtime/test_hang_guard.py",
    "tests/torch/driver/test_out_of_memory_on_ranks.py",
    "tests/torch/test_four_ranks.py",
    # The same bits once more: `tests/parity/test_fuzz.py` is in `make test`.
    "tests/parity/test_fuzz.py::test_the_same_bits_in_numpy_jax_and_torch[catalogue",
    "tests/parity/test_fuzz.py::test_from_jax_to_torch_to_numpy_and_on",
    "tests/parity/test_fuzz.py::test_compiled_by_torch_as_one_graph",
    "tests/parity/test_fuzz.py::test_random_policies",
    "tests/parity/test_fuzz.py::test_a_lane_is_a_run_of_its_own",
    # Many random cases, of what `make test` has examples of.
    "tests/core/test_reference.py::test_random_policies",
    "tests/core/test_reference.py::test_every_clipping_rule_with_every_detector_and_rule",
    "tests/hostile/test_fuzz.py",
    "tests/hostile/test_resume.py::test_random_states_and_positions_of_a_checkpoint_run_no_code",
    "tests/events/test_real_runs.py",
    "tests/runtime/run/test_random_histories.py::TestHistory",
    # Published policies against their originals: each policy is loaded, replayed and attached.
    "tests/catalogue/skip/",
    "tests/catalogue/watch/",
    "tests/catalogue/test_every_policy.py::test_it_protects_in_jax_as_in_torch",
    # About our own oracles, benchmarks, examples and limits.
    "tests/benchmarks/test_busy_machine.py",
    "tests/benchmarks/test_gpu_kit.py",
    "tests/benchmarks/test_healbench.py::test_no_run_stops_the_rest",
    "tests/benchmarks/test_healbench_jax.py",
    "tests/core/test_clipping.py::test_clipping_is_back_at_its_usual_amount",
    "tests/core/test_reference.py::test_nearly_all_errors_in_each_file_are_noticed",
    "tests/core/test_reference.py::test_the_core_as_it_is_gives_no_complaint",
    "tests/tools/test_demo.py",
    "tests/tools/probe/test_loss.py::test_verdicts_of_recorded_runs",
    "tests/tools/replay/test_sweep.py::test_the_spikes_that_pretraining_finds",
    # The other framework, store or optimizer for what `make test` shows with one.
    "tests/healer/test_jax_states.py::test_a_nan",
    "tests/healer/test_changed_states.py",
    "tests/healer/test_unreliable_disks.py",
    "tests/jax/test_optax_states.py::test_the_parameters_move_by_the_cut_rate",
    "tests/tools/probe/test_optimizer_jax.py",
    "tests/torch/test_compile.py",
)
"""What begins like one of these has the marker `slow`, unless it has `stress`: more than half of
the time of all tests."""

SLOW_CASES = re.compile(
    # A Healer's tests in JAX, where torch has the same: `tests/jax/driver` is in `make test`.
    r"tests/healer/.*\[(.*-)?(jax|optax|nnx|linen)\b"
    r"|.*/jax/driver/test_comparison\.py::test_(every|objects|a_limit)"
    r"|.*/jax/driver/test_scan\.py::test_(a_|updates|what|functions|more)"
    r"|.*/jax/driver/test_static_leaves\.py::test_a_(killed|rollback)"
    r"|.*/test_opt_state\.py::test_(a_state_of_another|a_forgotten)"
    r"|.*/test_healers\.py::test_(memory|a_limit|grain|each)"
    r"|.*/test_healers\.py::test_example\[(accelerate|fabric|lightning|linen|nnx|optax)"
    r"|.*/test_read_reports\.py::test_(any_value|a_picture_of|every_incident_and)"
    r"|.*/test_fuzz\.py::test_no_promise.*\[300-300-(zclip-|fixed|auto|adagc|limits|win|averages)"
    # More cases of a battery; those that `make test` has reach the same code.
    r"|.*/test_positions\.py::.*\[plain\]"
    r"|.*/test_restarts\.py::test_epochs_continue.*-resumed([012]-0-True|[34]-.-False)-"
    r"|.*/test_damage_or_data\.py::.*\[(at the end|over epochs|None-.'drop|245-|False\])"
    r"|.*/test_self_healing\.py::test_a_healthy.*\[(cpo|summed)"
    r"|.*/test_interrupted_steps\.py::.*\[[04]-DataLoader"
    r"|.*/test_examples\.py::.*\[tutorial_(torch.*(faults|none)|jax.*protect)\]"
    r"|.*/test_rewinding\.py::.*\[grain-(iter|DataLoader)\]"
    r"|.*/test_resume\.py::test_values.*\[jax"
    r"|.*/test_fuzz\.py::test_the_same_bits.*\[zclip-"
    r"|.*/test_fit\.py::test_a_resumed_fit.*\[on_train_batch_end-(16|10)"
    r"|.*/test_reference\.py::test_some_detectors_alone\[.*-plain"
)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gc.enable()
    for item in items:
        slow = item.nodeid.startswith(SLOW) or SLOW_CASES.match(item.nodeid)
        if slow and not item.get_closest_marker("stress"):
            item.add_marker(pytest.mark.slow)


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
