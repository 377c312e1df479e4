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

from healcore.policy import fingerprint, load
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


@pytest.mark.parametrize("recipe", LIMITS)
def test_on_recorded_runs_the_same_steps_are_clipped_until_one_escapes(recipe):
    """A run whose norm shifts is where the published rule locks in: few, and listed separately."""
    runs = traces.from_the_records()
    if not runs:
        pytest.skip("no recorded runs here")
    agreed = 0
    for run, ours in zip(runs, traces.port(recipe, runs), strict=True):
        theirs = original(run.norm, LIMITS[recipe])
        differs = np.flatnonzero(~np.isclose(ours.grad_scale, theirs, rtol=2e-3))
        agreed += len(run.norm) if not len(differs) else int(differs[0])
        if len(differs):
            _explained(run, int(differs[0]), theirs)
    assert agreed > 0.5 * sum(len(run.norm) for run in runs)


def _explained(run: traces.Trace, step: int, theirs: np.ndarray) -> None:
    """The first difference follows a robust warm-up, a row of clips (an escape), or quiet norms."""
    early = run.norm[:25]
    robust = (early[1:] > 10 * np.cumsum(early)[:-1] / np.arange(1, 25)).any()
    robust |= bool((10 * early[1:] < np.cumsum(early)[:-1] / np.arange(1, 25)).any())
    row = int((theirs[max(0, step - 80) : step] < 0.999).sum()) >= 20
    recent = run.norm[max(0, step - 60) : step]
    quiet = recent.std() < 0.02 * recent.mean()
    assert robust or row or quiet, f"{run.name}: step {step}"


def test_the_preset_is_the_package():
    assert fingerprint(load("zclip")) == fingerprint(load("zclip-1.0.0"))
