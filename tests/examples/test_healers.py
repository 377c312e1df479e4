"""The examples are rolled back and train to the end; what some of them print is checked."""

import contextlib
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytestmark = [
    pytest.mark.slow,  # about our own examples
    pytest.mark.filterwarnings("ignore"),
]

EXAMPLES: dict[str, tuple[float, str]] = {
    "torch_healer": (0.45, "torch"),
    "accelerate_loop": (0.45, "accelerate"),
    "lightning_trainer": (0.45, "lightning"),
    "fabric_loop": (0.7, "lightning"),
    "self_healing_trainer": (3.0, "transformers"),
    "optax_healer": (0.45, "optax"),
    "linen_healer": (0.45, "flax"),
    "nnx_healer": (0.45, "flax"),
}
"""Example -> an upper bound of the healed loss (a guess has 0.5, or 3.4 for words), its needs."""
ADDED = {"optax_healer": 5, "linen_healer": 8, "nnx_healer": 6}
"""Most lines that healcore adds to a program."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_rolls_back_and_ends_with_a_low_loss(
    name: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]
):
    most, needed = EXAMPLES[name]
    pytest.importorskip(needed)
    example = importlib.import_module(f"examples.{name}")
    example.main(str(tmp_path))
    steps = getattr(example, "STEPS", 0) or example.EPOCHS * example.BATCHES
    last = r"^loss (\S+), steps (\d+), rollbacks [1-9]\d*$"
    match = re.search(last, capsys.readouterr().out, re.MULTILINE)
    assert match
    assert float(match[1]) < most
    assert steps - 2 <= int(match[2]) <= steps, "the rate was at fault: hardly a batch is left out"
    if name in ADDED:
        assert inspect.getsource(example).count("# <- healcore") <= ADDED[name]


@pytest.mark.parametrize("name", ["out_of_memory", "out_of_memory_jax"])
def test_memory_that_runs_out_in_the_first_step(name: str, capsys: pytest.CaptureFixture[str]):
    example = importlib.import_module(f"examples.{name}")
    example.main()
    match = re.fullmatch(r"loss (\S+), steps (\d+), largest part (\d+)\n", capsys.readouterr().out)
    assert match
    assert float(match[1]) < 0.45
    assert (int(match[2]), int(match[3])) == (example.STEPS, example.FITS)


def printed(main, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], float, int, int]:
    """The lines of the example; and loss, steps and rollbacks of the last one."""
    main()
    *lines, last = capsys.readouterr().out.splitlines()
    match = re.fullmatch(r"loss (\S+), steps (\d+), rollbacks (\d+)", last)
    assert match
    return lines, float(match[1]), int(match[2]), int(match[3])


@contextlib.contextmanager
def jax_optimizations() -> Iterator[None]:
    """Compiles as in a program, not as in other tests."""
    jax = pytest.importorskip("jax")
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", True)  # as `few_optimizations`
        jax.clear_caches()


def test_a_limit_multiplies_the_schedule_which_keeps_its_shape(capsys):
    from examples import optax_schedule

    # A run above 1e15 is chaotic: compiled as the tests are, its first NaN comes steps later, and
    # a third rollback follows.
    with jax_optimizations():
        lines, loss, steps, rollbacks = printed(optax_schedule.main, capsys)
    assert loss < 0.45  # guessing the mean of sin() gives 0.5
    assert (steps, rollbacks) == (optax_schedule.STEPS, 2)
    rows = np.array([[float(word) for word in line.split()[1::2]] for line in lines])
    backs = np.flatnonzero(np.diff(rows[:, 0]) < 0) + 1
    broken, guessed, healed = np.split(rows, backs)
    _, _, multiplier, rate = broken.T
    assert (multiplier == 1).all(), "no cut before the rollback"
    highest = rate.max()
    assert guessed[0][0] == 0, "back to the start, where no healthy rate is known"
    assert guessed[-1][2] == 1, "so that the limit ends at a healthy checkpoint"
    _, schedule, multiplier, rate = healed.T
    np.testing.assert_allclose(rate, schedule * multiplier, rtol=2e-3, atol=2e-4)
    assert rate.max() < 0.5 * highest
    assert multiplier.min() < 0.25


def test_grain_data_are_rewound_exactly_and_the_bad_batches_left_out(capsys):
    grain = pytest.importorskip("grain")
    from examples import grain_healer

    lines, loss, steps, rollbacks = printed(grain_healer.main, capsys)
    assert loss < 0.45
    assert rollbacks == 1
    *passes, left_out = [line.split(":") for line in lines]
    out = {int(index) for index in left_out[1].split()}
    assert set(grain_healer.BAD) <= out
    assert len(out) < 2 * len(grain_healer.BAD)
    first, second = ([int(each) for each in ids.split()] for _, ids in passes)
    start, back = (int(label.split()[-1]) for label, _ in passes)
    order = list(grain.MapDataset.range(grain_healer.STEPS).shuffle(seed=0))
    assert start == 0 < back < min(grain_healer.BAD)
    assert first == order[: len(first)]
    assert second == [each for i, each in enumerate(order) if i >= back and i not in out]
    assert steps == grain_healer.STEPS - len(out)


def test_a_compiled_ppo_learns_on_after_an_update_of_nan(tmp_path, capsys):
    from examples import ppo_scan

    ppo_scan.main(str(tmp_path))
    match = re.fullmatch(r"length (\d+), steps 1280, skips 16\n", capsys.readouterr().out)
    assert match
    assert int(match[1]) > 40, "about 20 at the start"
    assert inspect.getsource(ppo_scan).count("# <- healcore") <= 6


def test_each_step_of_a_scan_is_judged_and_a_rising_rate_rolls_back(capsys):
    from examples import scan_healer

    lines, loss, steps, rollbacks = printed(scan_healer.main, capsys)
    assert loss < 0.45
    # No step is finite any more. The first repeat changes nothing, the others limit the rate.
    assert (steps, rollbacks) == (scan_healer.STEPS, 3)
    assert lines == ["from step 40, skipped: 0 0 0 0 0 1 0 0 0 0"]
