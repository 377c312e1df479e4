"""Every order and skip of a variant in a sweep is that of the whole engine running it alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from healcore.core.signals import Signals
from healcore.jax.recorded_runs import JaxSweepScan
from healcore.plugins.sweep import configure, variants_of
from healcore.policy import load, loads
from healcore.tools.sweep.search import NumpySweepScan
from healcore.tools.sweep.series import RecoveryOrders, Series, pack, series_of, unpack
from healcore.tools.sweep.space import draw, parse
from healcore.tools.traces import open_traces
from tests.core import fuzz, policies
from tests.parity import recorded_runs
from tests.tools.sweep import sample_series

VARIANTS, ROWS = 32, 200
SIGNALS = ("loss", "grad_norm", "update_norm", "eval_loss")
PLACES = (
    ("detectors", "loss_spike", "z_threshold"),
    ("detectors", "loss_spike", "evidence"),
    ("detectors", "grad_spike", "min_noise"),
    ("detectors", "grad_spike", "evidence"),
    ("detectors", "divergence", "patience"),
    ("detectors", "update_spike", "z_threshold"),
    ("detectors", "vanishing", "patience"),
    ("rules", 2, "consecutive"),
    ("rules", 3, "count"),
    ("incident", "quiet_steps"),
    ("incident", "patience"),
    ("max_skips",),
)
RANGES = (
    (1.5, 6.0), (0.5, 4.0), (0.1, 1.0), (0.5, 4.0), (3, 30), (1.0, 12.0), (1, 12), (1, 8),
    (1, 10), (1, 30), (1, 40), (0, 12),
)  # fmt: skip


def numbers(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """A value for each place and variant."""
    return tuple(
        rng.integers(low, int(high) + 1, VARIANTS).astype(np.int32)
        if isinstance(low, int)
        else rng.uniform(low, high, VARIANTS).astype(np.float32)
        for low, high in RANGES
    )


KINDS = (SIGNALS, ("grad_norm", "eval_loss"))


def fuzzed(rng: np.random.Generator, *, resumed: bool, kinds: Any = KINDS) -> Series:
    """A run in trouble, whose rows log now one signal, now all of them."""
    trace = Signals(*(None if x is None else x[:, 0] for x in fuzz.signals(rng, ROWS, 1)))
    kind = np.where(rng.random(ROWS) < 0.1, len(kinds) - 1, 0)
    series = sample_series.series_of(trace, kinds, kind)
    if resumed:
        series.resumed[ROWS // 2] = True
        series = series._replace(own=ROWS // 2)
    return series


def one(scan: Any, values: Any, series: Series) -> RecoveryOrders:
    """A scan over one series."""
    return orders_of(scan, values, [series])[0]


def orders_of(scan: Any, values: Any, series: list[Series]) -> list[RecoveryOrders]:
    """A scan over series that are packed together."""
    (packed,) = pack(series)
    return unpack(series, packed, *scan.run(values, packed))


def assert_as_alone(
    config: Any, places: Any, values: Any, orders: Any, series: Series, which: Any
) -> int:
    """Compares variants with the engine; returns the orders compared."""
    compared = 0
    for i in which:
        plain = tuple(each[i].item() for each in values)  # Python numbers, as from a policy file
        expected = sample_series.alone(configure(config, places, plain), series)
        assert sample_series.of_variant(orders, int(i)) == expected, (series.trace, i, plain)
        compared += len(expected[0])
    return compared


@pytest.mark.parametrize("seed", range(2))
def test_in_numpy_on_fuzzed_runs(seed):
    rng = np.random.default_rng(seed)
    config, values = policies.full(), numbers(rng)
    series = fuzzed(rng, resumed=seed % 2 == 1)
    scan = NumpySweepScan(config, PLACES)
    orders = one(scan, values, series)
    assert_as_alone(config, PLACES, values, orders, series, range(4))


# Each kind of rows is a program of its own, which takes most of a minute to compile.
@pytest.mark.parametrize(
    ("series", "kinds"), [(2, KINDS[:1]), pytest.param(8, KINDS, marks=pytest.mark.stress)]
)
def test_jax_equals_numpy_on_fuzzed_runs(series, kinds):
    rng = np.random.default_rng(50)
    config = policies.full()
    compiled, plain = JaxSweepScan(config, PLACES), NumpySweepScan(config, PLACES)
    values = numbers(rng)
    runs = [fuzzed(rng, resumed=run % 2 == 1, kinds=kinds) for run in range(series)]
    seen = 0
    pairs = zip(orders_of(compiled, values, runs), orders_of(plain, values, runs), strict=True)
    for mine, its in pairs:
        for ours, other in zip(mine, its, strict=True):
            np.testing.assert_array_equal(ours, other)
        seen += len(mine.row)
    assert seen > VARIANTS // 2, "the runs are in trouble"


@recorded_runs.needed
@pytest.mark.parametrize("every", [40, pytest.param(6, marks=pytest.mark.stress)])
def test_recorded_runs_in_jax(every):
    """Each of them is compiled for its length."""
    policy = load("pretraining")
    axes = tuple(
        parse(policy, text)
        for text in (
            "detect.loss_spike.z_threshold=2..6",
            "detect.loss_spike.evidence=1..4",
            "detect.divergence.rise=4..12",
            "detect.divergence.patience=20..90",
        )
    )
    variants = draw(policy, axes, 32)
    places = tuple(axis.place for axis in axes)
    scan = JaxSweepScan(policy.config(), places)
    files = sorted(str(f) for f in recorded_runs.FOLDER.glob("algoperf/spiky/*.csv"))[::every]
    opened, unreadable = open_traces(files)
    assert not unreadable
    compared = 0
    for trace in opened:
        (series,) = series_of(trace, policy.engine())
        orders = one(scan, variants.numbers(slice(None)), series)
        which = (0, 7, 19)
        values = variants.numbers(slice(None))
        compared += assert_as_alone(policy.config(), places, values, orders, series, which)
    assert compared > 0


def test_what_is_trimmed_changes_no_decision():
    config = load("pretraining").config()
    fewer = variants_of(config, (), ()).config
    assert fewer.clip is None
    assert [name for name, _ in fewer.detectors] == [
        "nonfinite",
        "loss_spike",
        "divergence",
        "instability",
        "records",
    ]
    assert len(fewer.rules) == len(config.rules) - 1, "only what alerts and no more goes"


def test_an_own_policy_of_presets():
    """Preset policies, unvaried but for one number, on a run with spikes."""
    rng = np.random.default_rng(3)
    loss = sample_series.losses(rng, 700, (300, 500)).astype(np.float32)
    loss[600:630] = np.nan
    norm = np.exp(rng.standard_normal(700) * 0.2).astype(np.float32)
    norm[300:312] *= 50
    series = sample_series.series_of(
        Signals(loss=loss, grad_norm=norm), (("loss", "grad_norm"),), np.zeros(700)
    )
    for name in ("pretraining", "aggressive"):
        config = load(name).config()
        values = (np.array([config.max_skips, 1], np.int32),)
        orders = one(NumpySweepScan(config, (("max_skips",),)), values, series)
        checked = assert_as_alone(config, (("max_skips",),), values, orders, series, range(2))
        assert checked > 0, name


def test_a_rule_after_one_that_only_alerts():
    """The place of a rule counts all rules of the policy, also those that the scan drops."""
    text = (
        'schema = 1\nname = "x"\n[detect.nonfinite]\n[[respond]]\nto = ["nonfinite"]\n'
        'do = ["alert"]\n[[respond]]\nto = ["nonfinite"]\ndo = ["rollback"]\n'
        "when = { consecutive = 2 }\n"
    )
    loss = np.ones(300, np.float32)
    loss[[100, 150, 151, 200, 201, 202, 203]] = np.nan
    series = sample_series.series_of(Signals(loss=loss), (("loss",),), np.zeros(300))
    config, places = loads(text).config(), (("rules", 1, "consecutive"),)
    values = (np.array([1, 2, 4], np.int32),)
    orders = one(NumpySweepScan(config, places), values, series)
    assert_as_alone(config, places, values, orders, series, range(3))
    first = [orders.row[orders.variant == i].min() for i in range(3)]
    assert first == [100, 151, 203]
