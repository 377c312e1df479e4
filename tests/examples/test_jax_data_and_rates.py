"""A schedule, Grain data and `jax.lax.scan` under a Healer: what the examples print is checked."""

import re

import numpy as np
import pytest


def printed(main, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], float, int, int]:
    """The lines of the example; and loss, steps and rollbacks of the last one."""
    main()
    *lines, last = capsys.readouterr().out.splitlines()
    match = re.fullmatch(r"loss (\S+), steps (\d+), rollbacks (\d+)", last)
    assert match
    return lines, float(match[1]), int(match[2]), int(match[3])


def test_a_limit_multiplies_the_schedule_which_keeps_its_shape(capsys):
    from examples import optax_schedule

    lines, loss, steps, rollbacks = printed(optax_schedule.main, capsys)
    assert loss < 0.45  # guessing the mean of sin() gives 0.5
    assert (steps, rollbacks) == (optax_schedule.STEPS, 1)
    rows = np.array([[float(word) for word in line.split()[1::2]] for line in lines])
    step, schedule, multiplier, rate = rows.T
    back = int(np.argmin(np.diff(step))) + 1
    assert step[back] == 0
    assert (multiplier[:back] == 1).all(), "no cut before the rollback"
    broken, healed = slice(0, back), slice(back, None)
    np.testing.assert_allclose(rate[healed], (schedule * multiplier)[healed], rtol=2e-3, atol=2e-4)
    assert rate[healed].max() < 0.5 * rate[broken].max()
    assert multiplier[healed].min() < 0.25


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


def test_each_step_of_a_scan_is_judged_and_a_rising_rate_rolls_back(capsys):
    from examples import scan_healer

    lines, loss, steps, rollbacks = printed(scan_healer.main, capsys)
    assert loss < 0.45
    assert (steps, rollbacks) == (scan_healer.STEPS, 1)
    assert lines == ["from step 40, skipped: 0 0 0 0 0 1 0 0 0 0"]
