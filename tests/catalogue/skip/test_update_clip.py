"""levanter-clip-update against the formula of Levanter's clip (not on a package index)."""

from __future__ import annotations

import numpy as np

from healcore.core.engine import Engine
from healcore.core.signals import Signals
from healcore.policy import load
from tests.catalogue.skip import published

RECIPE = "levanter-clip-update"


def ours(norms: np.ndarray) -> np.ndarray:
    """The recipe's factor on each update."""
    engine: Engine = load(RECIPE).engine()
    state, scales = engine.init(), []
    for norm in norms.astype(np.float32):
        state, _ = engine.step(state, Signals(grad_norm=np.float32(0.5)), xp=np)
        state, scale = engine.clip_update(state, norm, np.False_, xp=np)
        scales.append(float(scale))
    return np.array(scales)


def updates(seed: int, steps: int = 400, spread: float = 0.05) -> np.ndarray:
    return np.exp(spread * np.random.default_rng(seed).normal(size=steps))


def test_ordinary_updates_pass_and_spikes_are_brought_to_nearly_the_same_length():
    """Window against moving average: the limits differ by their estimates of mean and sigma."""
    for seed in range(3):
        norms = updates(seed)
        norms[[150, 300]] = 4.0, 20.0
        theirs, mine = published.levanter_update_clip(norms), ours(norms)
        for at in (150, 300):
            assert 1 < theirs[at] * norms[at] < 4
            assert 1 < mine[at] * norms[at] < 1.4
        quiet = np.delete(np.arange(len(norms)), [150, 300])
        assert (mine[quiet] < 1).mean() < 0.02
        assert mine[quiet].min() > 0.9
        assert abs(theirs[150] / mine[150] - 1) < 0.1


def test_one_spike_hides_the_next_from_the_original():
    norms = updates(5)
    norms[200], norms[210] = 1000.0, 50.0
    assert published.levanter_update_clip(norms)[210] == 1
    assert ours(norms)[210] * 50 < 1.4


def test_one_nan_disables_the_original_for_a_window():
    norms = updates(6)
    norms[200], norms[250] = np.nan, 50.0
    assert published.levanter_update_clip(norms)[250] == 1
    mine = ours(norms)
    assert mine[200] == 1
    assert mine[250] * 50 < 1.4


def test_a_true_shift_of_the_level_ends_in_both():
    norms = updates(7, 600)
    norms[200:] *= 3
    assert (published.levanter_update_clip(norms)[400:] < 1).mean() < 0.02
    assert (ours(norms)[400:] < 1).mean() < 0.02
