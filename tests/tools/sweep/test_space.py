"""The settings that can be varied, and the values drawn for them."""

from __future__ import annotations

import numpy as np
import pytest

from healcore.plugins.sweep import configure
from healcore.policy import fingerprint, load, loads
from healcore.tools.sweep.space import SweepError, default_axes, draw, parse, place_of, policy_with

PRESET = load("pretraining")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("detect.loss_spike.z_threshold", "KEY=LOW..HIGH"),
        ("detect.loss_spike.z=3..5", "has no 'z'"),
        ("detect.plateau.patience=1..5", "has no 'plateau'"),
        ("detect.loss_spike=1..2", "not a number"),
        ("mode=1..2", "not a number"),
        ("respond[0].to=1..2", "not a number"),
        ("respond[2].when.within=50..100", "static"),
        ("respond[2].when.sustained=0..1", "not a number"),
        ("clip.z_threshold=2..3", "recorded curve"),
        ("lr.factor=0.2..0.6", "recorded curve"),
        ("budget.recoveries=1..5", "recorded curve"),
        ("schema=1..2", "not a threshold"),
        ("detect.divergence.rise=5", "rise"),
        ("detect.divergence.rise=9..5", "smaller number first"),
        ("detect.divergence.rise=5..9:quadratic", "log or linear"),
        ("detect.divergence.rise=0..9:log", "above 0"),
        ("detect.divergence.rise=a..9", "'a' is not a number"),
        ("detect.divergence.rise=nan..9", "not a number"),
        ("detect.loss_spike.evidence=5..20", "at most 15"),
        ("detect.divergence.patience=5.5..9", "must be an integer"),
        ("detect..x=1..2", "not a policy key"),
    ],
)
def test_what_cannot_be_varied_has_a_clear_message(text, message):
    if text.endswith("rise=5"):
        assert parse(PRESET, text).listed == (5.0,)
        return
    with pytest.raises(SweepError, match=message.replace("[", r"\[")):
        parse(PRESET, text)


def test_a_size_of_the_memory_is_static():
    text = 'schema = 1\nname = "x"\n[detect.loss_ratio]\n[[respond]]\nto = ["loss_ratio"]\n'
    policy = loads(text + 'do = ["rollback"]\nwhen = { sustained = true }\n')
    with pytest.raises(SweepError, match="static in the core"):
        parse(policy, "detect.loss_ratio.window=50..200")
    assert "detect.loss_ratio.window" not in [axis.key for axis in default_axes(policy)]


def test_the_scale_of_a_range():
    assert not parse(PRESET, "detect.divergence.rise=5..12").log
    assert parse(PRESET, "detect.divergence.rise=1..12").log, "from a factor of ten on"
    assert not parse(PRESET, "detect.divergence.rise=1..12:linear").log
    axis = parse(PRESET, "detect.vanishing.threshold=1e-8..1e-4")
    assert axis.value(0.5) == pytest.approx(1e-6)
    assert axis.unit(1e-6) == pytest.approx(0.5)


def test_the_default_space_is_what_orders_rollbacks():
    keys = [axis.key for axis in default_axes(PRESET)]
    assert "detect.loss_spike.evidence" in keys
    assert "detect.divergence.patience" in keys
    assert not [key for key in keys if "warmup" in key or "grad_spike" in key]
    for axis in default_axes(PRESET):
        assert axis.low < axis.high


def test_variants_differ_and_begin_with_the_base():
    axes = tuple(
        parse(PRESET, text)
        for text in ("detect.divergence.rise=5..12", "detect.divergence.patience=60..90")
    )
    variants = draw(PRESET, axes, 300)
    assert len(variants.values) == 300 == len(np.unique(variants.values, axis=0))
    assert variants.values[0].tolist() == [6.0, 72.0]
    assert np.abs(variants.units.mean(axis=0) - 0.5).max() < 0.02, "spread evenly"
    again = draw(PRESET, axes, 300)
    assert np.array_equal(variants.values, again.values)


def test_lists_make_a_grid():
    axes = tuple(parse(PRESET, t) for t in ("max_skips=0,5,10", "detect.divergence.rise=5,6,7"))
    variants = draw(PRESET, axes, 1000)
    assert len(variants.values) == 9, "all combinations, the base among them"


def test_no_more_variants_than_there_are():
    assert len(draw(PRESET, (parse(PRESET, "max_skips=1..8"),), 50).values) == 9


def test_settings_that_conflict_are_dropped():
    policy = loads('schema = 1\nname = "x"\n[detect.grad_ema]\n')
    axes = (
        parse(policy, "detect.grad_ema.sustain=1..25"),
        parse(policy, "detect.grad_ema.shift.patience=5..25"),
    )
    variants = draw(policy, axes, 200)
    assert variants.dropped > 0
    assert (variants.values[:, 0] <= variants.values[:, 1]).all()


def test_a_variant_is_the_policy_that_would_be_written():
    """The scan gets the numbers that the core makes of the file."""
    axes = default_axes(PRESET)
    variants = draw(PRESET, axes, 40)
    places = tuple(axis.place for axis in axes)
    for i in (0, 11, 39):
        policy = policy_with(PRESET, axes, variants.values[i])
        plain = tuple(each[i].item() for each in variants.numbers(slice(None)))
        assert configure(PRESET.config(), places, plain) == policy.config()
        assert (fingerprint(policy) == fingerprint(PRESET)) == (i == 0)


def test_rules_are_counted_as_the_engine_has_them():
    text = (
        'schema = 1\nname = "x"\n[detect.nonfinite]\n[[respond]]\nto = ["nonfinite"]\n'
        'do = ["alert"]\n[[respond]]\nto = ["nonfinite"]\ndo = ["rollback"]\n'
    )
    policy = loads(text)
    assert place_of(policy, "respond[1].when.consecutive") == ("rules", 1, "consecutive")
    with pytest.raises(SweepError, match="has a number"):
        default_axes(policy)
