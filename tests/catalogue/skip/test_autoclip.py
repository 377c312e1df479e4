"""autoclip against the authors' rule and against the package autoclip 0.2.1.

The limit is that of a histogram, rounded up to its bin: between the published one and 4.4 % more.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.catalogue.skip import traces

RECIPE = "autoclip"
BIN = 2 ** (1 / 16)
FEW = 20
"""Norms from which on a percentile does not hang on how it is interpolated between two of them."""


def test_the_limit_is_the_published_one_up_to_a_bin():
    runs = traces.everything()
    for run, ours in zip(runs, traces.port(RECIPE, runs), strict=True):
        for i in range(0, len(run.norm), 7):
            held = run.norm[: i + 1]
            # np.percentile interpolates between two norms; the histogram knows the next above.
            low = np.percentile(held, 10.0, method="lower")
            high = np.percentile(held, 10.0, method="higher")
            assert low * (1 - 1e-5) <= ours.threshold[i] <= high * BIN * (1 + 1e-5), run.name


def test_the_package_clips_the_same_steps():
    """The limit comes from the norms before this one."""
    autoclip = pytest.importorskip("autoclip.torch", exc_type=ImportError)
    runs = traces.synthetic()[:6]
    for run, ours in zip(runs, traces.port(RECIPE, runs), strict=True):
        weight = torch.nn.Parameter(torch.ones(1))
        clipper = autoclip.QuantileClip([weight], quantile=0.1, global_threshold=True)
        compared = 0
        for i, norm in enumerate(run.norm):
            held = clipper.state["global_history"]
            limit = float(torch.quantile(held, 0.1)) if len(held) else np.inf
            weight.grad = torch.full((1,), float(norm))
            clipper.step()
            assert weight.grad is not None
            clipped = float(weight.grad) < 0.99999 * norm
            if i >= FEW and not 0.97 * limit < norm < 1.03 * BIN * limit:
                assert (ours.grad_scale[i] < 1) == clipped, f"{run.name}: step {i}"
                compared += 1
        assert compared > 0.5 * len(run.norm)
