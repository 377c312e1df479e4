"""Models, optimizers, schedulers, random generators: saved and restored, without aliasing."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import default_per_channel_weight_fake_quant
from torch.optim import lr_scheduler
from torch.testing._internal.two_tensor import TwoTensor  # torch's own wrapper subclass

from healcore.runtime.store.checkpoints import StateMismatch, UnsavableState
from healcore.torch.store import DCPStore, MemoryStore, apply
from tests.runtime.store.store_cases import DCP, TORCH_MEMORY, TORCH_TIERS, over, same
from tests.torch.forked_ranks import Worlds, worlds_of
from tests.torch.store import store_ranks

CASES = (DCP, TORCH_MEMORY, TORCH_TIERS)
worlds = worlds_of("tests.torch.store.store_ranks", 200)


class SavedRun:
    """A small run: everything that has a state."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=10)
        trained = {"model": self.model, "optimizer": self.optimizer}
        self.state = {**trained, "scheduler": self.scheduler}
        self.model(torch.randn(16, 4)).square().mean().backward()
        self.optimizer.step()

    def everything(self):
        return copy.deepcopy([each.state_dict() for each in self.state.values()])


@over(*CASES)
def test_trees_are_overwritten_in_place(case, tmp_path):
    tensor = torch.arange(4.0)
    inner = [torch.ones(2), 1.5]
    live = {"ema": {"weight": tensor, "inner": inner, "count": 3}, "alone": torch.zeros(3)}
    store = case.make(tmp_path)
    observer = live["observer"] = default_per_channel_weight_fake_quant()
    store.save(1, live)
    observer(torch.ones(4, 2))  # resizes buffers
    tensor.zero_()
    inner[0].zero_()
    inner[1:] = [None, "later"]
    live["ema"]["new"] = 1
    live["alone"].fill_(7)
    apply(live, store.restore(1, {**live, "ema": {**live["ema"], "inner": inner}}).state)
    assert live["ema"]["weight"] is tensor
    assert tensor.tolist() == [0, 1, 2, 3]
    assert live["ema"]["inner"] is inner
    assert [inner[0].tolist(), *inner[1:]] == [[1, 1], 1.5]
    assert list(live["ema"]) == ["weight", "inner", "count"]
    assert live["alone"].tolist() == [0, 0, 0]
    assert not observer.activation_post_process.min_val.numel()


def test_apply_touches_nothing_if_a_module_does_not_fit():
    run = SavedRun()
    before = run.everything()
    wrong = {"1.running_mean": torch.zeros(4), "more": torch.zeros(1)}
    restored = {"model": {**run.model.state_dict(), **wrong}, "optimizer": before[1]}
    message = r"model\.1\.running_mean has .*model\.more is not in both"
    with pytest.raises(StateMismatch, match=message):
        apply(run.state, restored)
    with pytest.raises(StateMismatch, match='"alone" is a Tensor'):
        apply({"alone": torch.zeros(5)}, {"alone": torch.ones(1)})
    assert same(before, run.everything())


def swapped(model: nn.Sequential) -> list[nn.Parameter]:
    """The parameters with the two biases of one shape in the other order."""
    params = list(model.parameters())
    params[1], params[3] = params[3], params[1]
    return params


CHANGES = {
    "optimizer is AdamW": lambda run: torch.optim.SGD(run.model.parameters(), lr=0.1),
    r"optimizer\[0.bias\] is parameter 1": lambda run: torch.optim.AdamW(swapped(run.model)),
    r"optimizer\[0.bias\] is .* missing": lambda run: torch.optim.AdamW(run.model[2].parameters()),
    "scheduler is CosineAnnealingLR": lambda run: lr_scheduler.StepLR(run.optimizer, 3),
}


@over(*CASES)
@pytest.mark.parametrize("message", CHANGES)
def test_another_optimizer_is_named_and_gets_nothing(case, tmp_path, message):
    run = SavedRun()
    store = case.make(tmp_path)
    store.save(1, run.state)
    store.wait()
    if case is not TORCH_MEMORY:  # as a new process
        store = case.make(tmp_path)
    other = SavedRun(seed=1)
    live = {**other.state, message.split()[0].split("\\")[0]: CHANGES[message](other)}
    before = other.everything()
    with pytest.raises(StateMismatch, match=message):
        apply(other.state, store.restore(1, live).state)
    assert same(other.everything(), before)


class Image(torch.Tensor):
    """A subclass without values of its own."""


@over(*CASES)
def test_layouts_views_and_tied_weights(case, tmp_path):
    base = torch.arange(24.0).reshape(2, 3, 2, 2)
    model: Any = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    model[1].weight = model[0].weight
    tree = {
        "channels last": base.to(memory_format=torch.channels_last),
        "transposed": base[0, 0].t(),
        "expanded": torch.ones(1).expand(5),
        "slice": base[:, ::2],
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "parameter": nn.Parameter(torch.ones(2)),
        "subclass": torch.ones(2).as_subclass(Image),
        "payload": torch.tensor([0x7FC0DEAD], dtype=torch.int32).view(torch.float32),
    }
    store = case.make(tmp_path)
    store.nonfinite_ok = ("tree.payload",)
    store.save(1, {"tree": tree, "model": model})
    store.wait()
    assert store.checkpoints()[0].bytes < 1.5 * 256 * 256 * 4
    state = store.restore(1, {"tree": tree, "model": model}).state
    assert all(torch.equal(state["model"][f"{i}.weight"], model[0].weight) for i in (0, 1))
    for (name, tensor), found in zip(tree.items(), state["tree"].values(), strict=True):
        plain = tensor.detach().resolve_conj().as_subclass(torch.Tensor)
        assert same(plain, found), name
        assert found.stride() == torch.empty_like(tensor).stride(), "products round otherwise"


@over(*CASES)
def test_an_entry_that_cannot_be_saved_is_named(case, tmp_path):
    store = case.make(tmp_path)
    for value, message in (
        (lambda: 0, r"state\['x'\]\[0\] is a function"),
        (torch.eye(3).to_sparse(), r"state\['x'\]\[0\] is a Tensor of layout torch.sparse"),
        (TwoTensor(torch.ones(2), torch.ones(2)), "is a TwoTensor"),
        (torch.empty(2, device="meta"), "on meta"),
    ):
        with pytest.raises(UnsavableState, match=message):
            store.save(1, {"x": [value]})
    assert store.checkpoints() == []


def test_a_snapshot_with_nan_is_reported_and_not_kept_in_a_small_ring():
    store = MemoryStore()
    store.save(1, {"x": torch.ones(2)})
    store.save(2, {"x": torch.tensor([1, float("inf")])})
    assert [saved.step for saved in store.checkpoints()] == [1]
    assert (store.take_nonfinite(), store.take_nonfinite()) == ([(2, ("x",))], [])


@pytest.mark.slow
@pytest.mark.parametrize("what", store_ranks.CASES)
def test_two_ranks_save_one_checkpoint(what: str, worlds: Worlds):
    first, second = worlds.of(2, [], what)
    assert first == second


def test_one_process_reads_what_two_ranks_have_saved(worlds: Worlds):
    like = {"model": {name: torch.zeros(6, 4) for name in ("sharded", "replicated", "plain")}}
    store = DCPStore(worlds.of(2, [], "kept")[0])
    for name, tensor in store.restore(3, like).state["model"].items():
        assert torch.equal(tensor, store_ranks.whole(3)), name
