"""Clipping by other code is noticed, once."""

from __future__ import annotations

import numpy as np
import pytest

from healcore.torch.loop_mistakes import HITS, NormCeiling


def warnings_of(norms: np.ndarray) -> int:
    ceiling = NormCeiling()
    return sum(ceiling.add(float(norm)) is not None for norm in norms)


@pytest.mark.parametrize("share", [1.0, 0.2])
def test_a_limit_is_noticed_once(share: float):
    """Also where it is reached at some steps only, and by gradients of few digits."""
    random = np.random.default_rng(0)
    limit = 0.3 * (1 + 5e-5 * random.standard_normal(1000)).astype(np.float32)
    norms = np.where(random.random(1000) < share, limit, 0.3 * random.random(1000))
    assert warnings_of(norms) == 1
    assert warnings_of(norms[: HITS - 1]) == 0


@pytest.mark.parametrize("spread", [0.003, 0.02, 0.3])
def test_norms_without_a_limit(spread: float):
    random = np.random.default_rng(1)
    norms = np.exp(spread * random.standard_normal(10_000)).astype(np.float32)
    for drift in (0.0, 1e-5, -1e-5):
        assert warnings_of(norms * np.exp(drift * np.arange(10_000))) == 0
