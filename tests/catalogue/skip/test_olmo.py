"""olmo2-skip-step against OLMo-core's own optimizer, step by step."""

import numpy as np
import pytest
import torch

from tests.catalogue import curves
from tests.catalogue.skip.test_formulas import equal_wherever_the_windows_are

optim = pytest.importorskip("olmo_core.optim", exc_type=ImportError)

pytestmark = pytest.mark.slow  # the policy is replayed beside its original


def original(losses: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """The steps that SkipStepAdamW over one weight skips."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = optim.SkipStepAdamW([weight], lr=1e-3)
    skips = []
    for loss, norm in zip(losses.tolist(), norms.tolist(), strict=True):
        optimizer.latest_loss = torch.tensor(loss)
        optimizer.latest_grad_norm = torch.tensor(norm)
        weight.grad = torch.full((1,), norm)
        optimizer.step()
        skips.append(bool(optimizer.step_skipped))
    return np.array(skips)


def test_equal_wherever_the_windows_are_and_elsewhere_the_port_finds_more():
    """It skips all that it finds but for the rest of a row of more than ten (`max_skips`)."""
    equal_wherever_the_windows_are("olmo2-skip-step", original)
    for _, ours in curves.on(curves.synthetic(), "olmo2-skip-step"):
        passed = np.flatnonzero((ours.cause != 0) & ~ours.skip)
        assert all((ours.cause[i - 10 : i] != 0).all() for i in passed), "only after ten in a row"
