"""Wrapped by Fabric and Accelerate: the optimizer inside is healed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from healcore.runtime.healer import Healer
from tests.torch import policies
from tests.torch.optimizer_cases import NAN


def fabric() -> tuple[Any, Any, Any]:
    """Model, optimizer and backward, set up by Fabric."""
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    net = nn.Linear(3, 1)
    model, optimizer = fabric.setup(net, AdamW(net.parameters(), lr=0.1))
    return model, optimizer, fabric.backward


def accelerated() -> tuple[Any, Any, Any]:
    """The same, prepared by Accelerate."""
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    net = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(net, AdamW(net.parameters(), lr=0.1))
    return model, optimizer, accelerator.backward


every_wrapper = pytest.mark.parametrize("made", [fabric, accelerated])


@every_wrapper
def test_the_optimizer_inside_a_wrapper_is_healed(made: Any, tmp_path: Any):
    model, optimizer, backward = made()
    state = {"model": model, "optimizer": optimizer}
    with Healer(policies.SKIPS, state=state, store=tmp_path / "store", save_every=4) as healer:
        for i in healer.batches(list(range(12))):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().mean() * (NAN if i == 6 else 1.0)
            healer.observe(loss, "optimizer")
            backward(loss)
            optimizer.step()
            if i == 1:  # Fabric's wrapper would be left with the lists from before
                driver: Any = healer.driver
                heal = driver.healings["optimizer"]
                optimizer.load_state_dict(heal.optimizer.state_dict())
    assert healer.step == 12
    assert type(heal.optimizer) is AdamW
    assert int(heal.metrics()["heal/skips"]) == 1
