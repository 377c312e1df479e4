"""The clipping recipes against their authors' packages.

zclip-paper (the package without `max_grad_norm`) and zclip-1.0.0 are equal to 1e-3 until a level
shift. AdaGC ends its warm-up one step before ours, with the numbers of the paper's first version.
The limit of autoclip comes from a histogram, rounded up to its bin: up to 4.4 % more.
"""

import numpy as np
import pytest
import torch
from pytorch_optimizer import AdaGC

from healcore.core.signals import Signals
from healcore.policy import load
from tests.catalogue import curves
from tests.core.test_clipping import published

pytestmark = pytest.mark.slow  # each policy is replayed beside its original

LIMITS = {"zclip-paper": None, "zclip-1.0.0": 1.0}
WARM = 100
BIN = 2 ** (1 / 16)
FEW = 20
"""Norms from which on a percentile does not hang on how it is interpolated between two of them."""


@pytest.mark.parametrize("recipe", LIMITS)
def test_zclip_has_the_same_factors(recipe):
    clipped = 0
    for run, ours in curves.on(curves.synthetic(), recipe):
        theirs, *_ = published(run.norm, max_grad_norm=LIMITS[recipe])
        # The two can differ after a level shift, or where norms have less than 1 % of noise.
        steps = 300 if "shift" in run.name else len(run.norm)
        np.testing.assert_allclose(
            ours.grad_scale[:steps], theirs[:steps], rtol=1e-3, err_msg=run.name
        )
        clipped += int((theirs < 0.999).sum())
    assert clipped > 100


def adagc_factors(norms: np.ndarray) -> np.ndarray:
    """The package's factors, (steps, tensors). With b1 = b2 = 0 a moment is a clipped gradient."""
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


@pytest.mark.parametrize(("scale", "seed"), [(1.0, 0), (5.0, 1)])
def test_adagc_has_the_same_factors_tensor_by_tensor(seed, scale):
    """Two tensors: noise about a slow drift, and spikes; global norms of about 0.4."""
    rng = np.random.default_rng(seed)
    level = np.array([0.1, 0.4]) * (1 + 0.2 * np.sin(np.arange(400) / 60))[:, None]
    spikes = np.where(rng.random((400, 2)) < 0.02, rng.uniform(2, 30, (400, 2)), 1.0)
    norms = scale * level * np.exp(0.1 * rng.normal(size=(400, 2))) * spikes
    change = {"ratio": 1.05, "ema_decay": 0.98, "warmup_steps": WARM - 1}  # as the package has them
    engine = load("adagc", clip={**change, "shift": {"patience": 1_000_000}}).engine()
    state = engine.init(groups=2)
    ours = []
    for row in norms.astype(np.float32):
        norm = np.sqrt((row * row).sum()).astype(np.float32)
        state, decision = engine.step(state, Signals(grad_norm=norm, group_norms=row))
        ours.append(decision.group_scale)
    theirs = adagc_factors(norms)
    np.testing.assert_allclose(np.array(ours), theirs, rtol=2e-5)
    assert (theirs[WARM:] < 1).mean() > 0.1


def test_the_limit_of_autoclip_is_the_published_one_up_to_a_bin():
    for run, ours in curves.on(curves.synthetic(), "autoclip"):
        for i in range(0, len(run.norm), 7):
            held = run.norm[: i + 1]
            # np.percentile interpolates between two norms; the histogram knows the next above.
            low = np.percentile(held, 10.0, method="lower")
            high = np.percentile(held, 10.0, method="higher")
            assert low * (1 - 1e-5) <= ours.threshold[i] <= high * BIN * (1 + 1e-5), run.name


def test_the_package_autoclip_clips_the_same_steps():
    """The limit comes from the norms before this one."""
    autoclip = pytest.importorskip("autoclip.torch", exc_type=ImportError)
    for run, ours in curves.on(curves.synthetic()[:4], "autoclip"):
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
