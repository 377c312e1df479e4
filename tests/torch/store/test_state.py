"""Models, optimizers, schedulers, random generators: saved and restored, without aliasing."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.testing._internal.two_tensor import TwoTensor  # torch's own wrapper subclass

from healcore.runtime.store import StateMismatch, UnsavableState
from healcore.torch.store import MemoryStore, apply
from tests.runtime.store.programs import finish, start
from tests.runtime.store.store_cases import DCP, TORCH_MEMORY, TORCH_TIERS, over, same

CASES = (DCP, TORCH_MEMORY, TORCH_TIERS)
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd": partial(torch.optim.SGD, lr=1e-2),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.9, centered=True),
    "lbfgs": partial(torch.optim.LBFGS, lr=1e-2),
    "tensor lr": partial(torch.optim.AdamW, lr=torch.tensor(1e-2)),
}
SCHEDULERS = {
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=10),
    "multi step": partial(lr_scheduler.MultiStepLR, milestones=[2, 4, 4]),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=30),
    "warm up": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt), lr_scheduler.ExponentialLR(opt, 0.9)], milestones=[3]
    ),
    "plateau": partial(lr_scheduler.ReduceLROnPlateau, patience=1),
}
PAIRS = [*((name, "cosine") for name in OPTIMIZERS), *(("adamw", name) for name in SCHEDULERS)]


class Generator:
    """torch's global generator; every rank has its own."""

    per_rank = True

    def state_dict(self):
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state):
        torch.set_rng_state(state["torch"])


class Run:
    """A small run with dropout and batch norm: everything that has a state."""

    def __init__(self, optimizer="adamw", scheduler="cosine", seed=0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 1)
        )
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        trained = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.state = {**trained, "rng": Generator()}

    def step(self) -> float:
        batch = torch.randn(16, 4)

        def closure():
            self.optimizer.zero_grad()
            loss = self.model(batch).square().mean()
            loss.backward()
            return loss

        loss = float(self.optimizer.step(closure).detach())
        plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
        self.scheduler.step(loss) if plateau else self.scheduler.step()
        return loss

    def everything(self):
        return copy.deepcopy(
            [self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()]
        )


@pytest.mark.parametrize(
    ("case", "optimizer", "scheduler"),
    [(CASES[number % len(CASES)], *pair) for number, pair in enumerate(PAIRS)],
)
def test_a_run_replays_bit_for_bit(case, tmp_path, optimizer, scheduler):
    run, store = Run(optimizer, scheduler), case.make(tmp_path)
    for _ in range(3):
        run.step()
    store.save(3, run.state)
    first = [run.step() for _ in range(4)], run.everything()
    apply(run.state, store.restore(3, run.state).state)
    again = [run.step() for _ in range(4)], run.everything()
    assert first[0] == again[0]
    assert same(first[1], again[1])


@over(*CASES)
def test_trees_are_overwritten_in_place(case, tmp_path):
    tensor, inner = torch.arange(4.0), [torch.ones(2), 1.5]
    live = {"ema": {"weight": tensor, "inner": inner, "count": 3}, "alone": torch.zeros(3)}
    store = case.make(tmp_path)
    store.save(1, live)
    tensor.zero_()
    inner[0].zero_()
    inner[1] = None
    inner.append("later")
    live["ema"]["new"] = 1
    live["alone"].fill_(7)
    apply(live, store.restore(1, {**live, "ema": {**live["ema"], "inner": inner}}).state)
    assert live["ema"]["weight"] is tensor
    assert tensor.tolist() == [0, 1, 2, 3]
    assert live["ema"]["inner"] is inner
    assert inner == [inner[0], 1.5]
    assert inner[0].tolist() == [1, 1]
    assert list(live["ema"]) == ["weight", "inner", "count"]
    assert live["alone"].tolist() == [0, 0, 0]


def test_apply_touches_nothing_if_one_part_does_not_fit():
    run, other = Run(), nn.Linear(3, 3)
    before = run.everything()
    restored = {"model": other.state_dict(), "optimizer": run.optimizer.state_dict()}
    with pytest.raises(StateMismatch, match=r"model\."):
        apply(run.state, restored)
    assert same(before, run.everything())


def swapped(model: nn.Sequential) -> list[nn.Parameter]:
    """The parameters with the two biases of one shape in the other order."""
    params = list(model.parameters())
    params[1], params[3] = params[3], params[1]
    return params


CHANGES = {
    "optimizer is AdamW": lambda run: torch.optim.SGD(run.model.parameters(), lr=0.1),
    r"optimizer\[0.bias\] is parameter 1": lambda run: torch.optim.AdamW(swapped(run.model)),
    r"optimizer\[0.bias\] is missing": lambda run: torch.optim.AdamW(run.model[4].parameters()),
    "scheduler is CosineAnnealingLR": lambda run: lr_scheduler.StepLR(run.optimizer, 3),
}


@over(*CASES)
@pytest.mark.parametrize("message", CHANGES)
def test_another_optimizer_is_named_and_gets_nothing(case, tmp_path, message):
    run = Run()
    run.step()
    store = case.make(tmp_path)
    store.save(1, run.state)
    store.wait()
    if case is not TORCH_MEMORY:  # as a new process
        store = case.make(tmp_path)
    other = Run(seed=1)
    live = {**other.state, message.split()[0].split("\\")[0]: CHANGES[message](other)}
    before = other.everything()
    with pytest.raises(StateMismatch, match=message):
        apply(other.state, store.restore(1, live).state)
    assert same(other.everything(), before)


@over(*CASES)
def test_tied_weights_are_saved_once(case, tmp_path):
    model: Any = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    store = case.make(tmp_path)
    store.save(1, {"model": model})
    store.wait()
    assert store.steps()[0].bytes < 1.5 * 64 * 64 * 4
    found = store.restore(1, {"model": model}).state["model"]
    assert torch.equal(found["0.weight"], model[0].weight)
    assert torch.equal(found["1.weight"], model[0].weight)


class Image(torch.Tensor):
    """A subclass without values of its own."""


@over(*CASES)
def test_layouts_and_views(case, tmp_path):
    base = torch.arange(24.0).reshape(2, 3, 2, 2)
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
    store.save(1, {"tree": tree})
    store.wait()
    found = store.restore(1, {"tree": tree}).state["tree"]
    for name, tensor in tree.items():
        expected = tensor.detach().resolve_conj()
        assert same(expected, found[name].detach()), name
    if case is TORCH_MEMORY:
        assert found["channels last"].stride() == tree["channels last"].stride()


@over(*CASES)
def test_an_entry_that_cannot_be_saved_is_named(case, tmp_path):
    store = case.make(tmp_path)
    for value, message in (
        (lambda: 0, r"state\['x'\]\[0\] is a function"),
        (torch.eye(3).to_sparse(), r"state\['x'\]\[0\] is a tensor of layout"),
        (TwoTensor(torch.ones(2), torch.ones(2)), "holds its values in other tensors"),
        (torch.empty(2, device="meta"), "meta"),
    ):
        with pytest.raises(UnsavableState, match=message):
            store.save(1, {"x": [value]})
    assert store.steps() == []


def test_a_snapshot_with_nan_is_reported_and_not_kept_in_a_small_ring():
    store = MemoryStore()
    store.save(1, {"x": torch.ones(2)})
    store.save(2, {"x": torch.tensor([1, float("inf")])})
    store.wait()
    assert [saved.step for saved in store.steps()] == [1]
    assert store.nonfinite_found() == [(2, ("x",))]


def test_two_ranks_save_one_checkpoint_and_one_process_reads_it(tmp_path):
    program = "tests.torch.store.ranks_program"
    finish(*(start(program, rank, tmp_path) for rank in (0, 1)))
    finish(start(program, -1, tmp_path))
