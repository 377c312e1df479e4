"""Tensors made of other tensors, such as moments of 8 bits, are saved by their parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor  # torch's own example of one

from healcore.runtime.store import UnsavableState
from healcore.torch.store import apply
from tests.runtime.store.store_cases import DCP, TORCH_MEMORY, TORCH_TIERS, over

CASES = (DCP, TORCH_MEMORY, TORCH_TIERS)


def two(seed: int = 0) -> Any:
    return TwoTensor(torch.arange(6.0).reshape(2, 3) + seed, -torch.arange(6.0).reshape(2, 3))


def saved_and_restored(store: Any, state: dict[str, Any], into: dict[str, Any]) -> None:
    store.save(1, state)
    store.wait()
    apply(into, store.restore(1, into).state)


@over(*CASES)
def test_a_subclass_is_restored_in_place(case, tmp_path):
    saved, live = two(), two(seed=9)
    saved_and_restored(case.make(tmp_path), {"x": {"y": saved}}, {"x": {"y": live}})
    assert torch.equal(live.a, saved.a)
    assert torch.equal(live.b, saved.b)


@over(*CASES)
def test_moments_of_an_optimizer(case, tmp_path):
    def built() -> torch.optim.Optimizer:
        p = nn.Parameter(torch.ones(2, 3))
        p.grad = torch.ones(2, 3)
        optimizer = torch.optim.AdamW([p], foreach=False)
        optimizer.step()
        return optimizer

    saved, live = built(), built()
    (state,) = saved.state.values()
    state["exp_avg"] = two()
    saved_and_restored(case.make(tmp_path), {"optimizer": saved}, {"optimizer": live})
    (found,) = live.state.values()
    assert type(found["exp_avg"]) is TwoTensor
    assert torch.equal(found["exp_avg"].b, state["exp_avg"].b)


def test_a_subclass_that_cannot_be_imported_again(tmp_path):
    class Local(TwoTensor):
        pass

    store = DCP.make(tmp_path)
    with pytest.raises(UnsavableState, match=r"state\['x'\]\['y'\] .* cannot find again"):
        store.save(1, {"x": {"y": Local(torch.ones(2), torch.ones(2))}})
