"""fixed-clip against torch's clip_grad_norm_ and optax's clip_by_global_norm."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import torch

from tests.catalogue.skip import traces

RECIPE = "fixed-clip"


def test_the_same_factors():
    runs = traces.everything()
    clip = optax.clip_by_global_norm(1.0)
    for run, ours in zip(runs, traces.port(RECIPE, runs), strict=True):
        factors = []
        for norm in run.norm:
            weight = torch.nn.Parameter(torch.ones(1))
            weight.grad = torch.full((1,), float(norm))
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
            factors.append(float(weight.grad) / float(norm))
        np.testing.assert_allclose(ours.grad_scale, factors, rtol=1e-6, err_msg=run.name)
        for i in range(0, len(run.norm), 100):
            gradient = {"w": jnp.asarray(run.norm[i : i + 1])}
            clipped: Any = clip.update(gradient, clip.init(gradient))[0]
            got = float(clipped["w"][0]) / float(run.norm[i])
            np.testing.assert_allclose(ours.grad_scale[i], got, rtol=2e-6)
