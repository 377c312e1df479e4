"""adagc against pytorch_optimizer's AdaGC, tensor by tensor.

Two tensors with a gradient in one place each, so that their norms are those of the trace. With
b1 = b2 = 0 the first moment *is* the clipped gradient: what the rule made of it can be read.
pytorch_optimizer ends its warm-up one step before ours (it counts from 1), and has the numbers of
the paper's first version: so the comparison runs with its 1.05 and 0.98, from step 100 on.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pytorch_optimizer import AdaGC

from healcore.core.signals import Signals
from healcore.policy import Policy, load

RECIPE = "adagc"
WARM = 100


def original(norms: np.ndarray) -> np.ndarray:
    """Factors that the package puts on gradients of these norms, (steps, tensors)."""
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(norms.shape[1])]
    rule = AdaGC(weights, betas=(0.0, 0.0), weight_decay=0.0, foreach=False)
    factors = []
    for row in norms:
        for weight, norm in zip(weights, row, strict=True):
            weight.grad = torch.full((1,), float(norm))
        rule.step()
        made = [float(rule.state[weight]["exp_avg"]) for weight in weights]
        factors.append(np.array(made) / row)
    return np.array(factors)


def with_the_package_s_numbers() -> Policy:
    """The recipe at 1.05 and 0.98, its warm-up as long as the package's is, without the escape."""
    change = {"ratio": 1.05, "ema_decay": 0.98, "warmup_steps": WARM - 1}
    return load(RECIPE, clip={**change, "shift": {"patience": 1_000_000}})


def port(policy: Policy, norms: np.ndarray) -> np.ndarray:
    """Factors of the port, (steps, tensors)."""
    engine = policy.engine()
    state, factors = engine.init(groups=norms.shape[1]), []
    for row in norms.astype(np.float32):
        norm = np.sqrt((row * row).sum()).astype(np.float32)
        state, decision = engine.step(state, Signals(grad_norm=norm, group_norms=row), xp=np)
        factors.append(decision.group_scale)
    return np.array(factors)


def norms(seed: int, steps: int = 400) -> np.ndarray:
    """Two tensors: noise about a slow drift, and spikes; global norms of about 0.4."""
    rng = np.random.default_rng(seed)
    level = np.array([0.1, 0.4]) * (1 + 0.2 * np.sin(np.arange(steps) / 60))[:, None]
    spikes = np.where(rng.random((steps, 2)) < 0.02, rng.uniform(2, 30, (steps, 2)), 1.0)
    return level * np.exp(0.1 * rng.normal(size=(steps, 2))) * spikes


@pytest.mark.parametrize("scale", [1.0, 5.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_same_factors(seed, scale):
    """Step by step."""
    values = scale * norms(seed)
    ours, theirs = port(with_the_package_s_numbers(), values), original(values)
    np.testing.assert_allclose(ours, theirs, rtol=2e-5)
    assert (theirs[WARM:] < 1).mean() > 0.1
