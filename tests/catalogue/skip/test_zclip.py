"""zclip-paper and zclip-1.0.0 against their authors' package, factor by factor.

Equal to 1e-3 up to the first norm of ten times the mean within the warm-up, and until a level
shift is over; the package with `max_grad_norm=None` is the paper's algorithm.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from zclip import ZClip

from tests.catalogue.skip import traces

LIMITS = {"zclip-paper": None, "zclip-1.0.0": 1.0}


def original(norms: np.ndarray, limit: float | None) -> np.ndarray:
    """Factors that the package puts on a gradient of each norm."""
    settings: Any = {"max_grad_norm": limit}  # its annotation has no None, its docstring has
    rule, module, factors = ZClip(**settings), torch.nn.Linear(1, 1, bias=False), []
    for norm in norms:
        module.weight.grad = torch.full((1, 1), float(norm))
        rule.step(module)
        factors.append(float(module.weight.grad) / float(norm))
    return np.array(factors)


def comparable(run: traces.Trace) -> int:
    """Steps before the two can differ: a level shift, or norms with less than 1 % of noise."""
    return 300 if "shift" in run.name else len(run.norm)


@pytest.mark.parametrize("recipe", LIMITS)
def test_the_same_factors(recipe):
    runs, clipped = traces.synthetic(), 0
    for run, ours in zip(runs, traces.port(recipe, runs), strict=True):
        theirs, steps = original(run.norm, LIMITS[recipe]), comparable(run)
        np.testing.assert_allclose(
            ours.grad_scale[:steps], theirs[:steps], rtol=1e-3, err_msg=run.name
        )
        clipped += int((theirs < 0.999).sum())
    assert clipped > 100
