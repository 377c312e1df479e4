"""Fabric: `attach` and the Healer take what `fabric.setup` returns; its own tools work beside."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn

from healcore.torch import attach
from tests.torch.trainers.lightning.fits import NAN, data


def setup() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1)
    net = nn.Linear(8, 1)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    return fabric, model, optimizer


def step(parts: tuple[Any, Any, Any], heal: Any, i: int, *, limit: float | None = None) -> None:
    fabric, model, optimizer = parts
    x, y = data().tensors[0][8 * i : 8 * i + 8], data().tensors[1][8 * i : 8 * i + 8]
    loss = (model(x) - y).square().mean() * (NAN if i == 3 else 1.0)
    if heal is not None:
        heal.observe(loss)
    fabric.backward(loss)
    if limit is not None:
        fabric.clip_gradients(model, optimizer, max_norm=limit, error_if_nonfinite=False)
    optimizer.step()
    optimizer.zero_grad()


def test_a_healthy_loop_is_the_same_bits():
    plain, healed = setup(), setup()
    heal = attach(healed[2], clip=None)
    for i in (0, 1, 2, 4):
        step(plain, None, i)
        step(healed, heal, i)
    assert all(map(torch.equal, plain[1].parameters(), healed[1].parameters()))


def test_fabric_saves_and_loads_the_handle(tmp_path: Any):
    whole, first, second = setup(), setup(), setup()
    heals = [attach(parts[2]) for parts in (whole, first, second)]
    for i in range(6):
        step(whole, heals[0], i)
    for i in range(4):
        step(first, heals[1], i)
    fabric, model, optimizer = first
    state = {"model": model, "optimizer": optimizer, "heal": heals[1]}
    fabric.save(tmp_path / "state.ckpt", state)
    fabric, model, optimizer = second
    fabric.load(tmp_path / "state.ckpt", {"model": model, "optimizer": optimizer, "heal": heals[2]})
    for i in (4, 5):
        step(second, heals[2], i)
    assert heals[2].state_dict() == heals[0].state_dict()
    assert all(map(torch.equal, whole[1].parameters(), model.parameters()))
