"""Every optimizer of pytorch-optimizer and schedulefree, over one small problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

from healcore.torch import Healing
from tests.torch.bit_comparison import bits, parameters
from tests.torch.optimizer_cases import bowl

LEFT_OUT = {
    "lomo": "updates in the backward pass and has no step()",
    "adalomo": "updates in the backward pass and has no step()",
    "demo": "needs einops",
    "distributedmuon": "needs a process group",
}
"""Names of pytorch-optimizer that are not built here, and why."""


def names() -> list[str]:
    """The names of all cases; the test skips those that cannot be imported."""
    try:
        import pytorch_optimizer
    except ImportError:
        theirs = ["adan"]
    else:
        theirs = pytorch_optimizer.get_supported_optimizers()
    return [name for name in theirs if name not in LEFT_OUT] + [*WRAPPERS, *SCHEDULE_FREE]


class Run:
    """One optimizer, and the loop that it needs.

    Args:
        name: from `names`.
        closure: hand the loss over as a closure even where that is not asked for.
    """

    def __init__(self, name: str, *, closure: bool = False) -> None:
        self.name = name
        self.params = parameters_for(name)
        torch.manual_seed(0)  # some draw their projections at random
        self.optimizer = _build(name, self.params)
        self.closure = closure or name in _CLOSURES
        self.second_order = name in ("adahessian", "sophiah")
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()  # type: ignore[operator]

    def step(self, i: int, heal: Healing | None = None, factor: float = 1.0) -> None:
        """One training step on batch `i`; `factor` multiplies the loss."""
        torch.manual_seed(i)
        np.random.seed(i)  # noqa: NPY002 - what Kron draws from

        @torch.enable_grad()  # AliG evaluates without
        def evaluate() -> Tensor:
            self.optimizer.zero_grad()
            loss = bowl(self.params, i) * factor
            loss.backward(create_graph=self.second_order)
            return loss

        if self.name in _SAM:
            evaluate()  # its first gradients, before step()
        if self.closure:
            self.optimizer.step(evaluate)  # type: ignore[arg-type]
            return
        loss = evaluate()
        if heal is not None:
            heal.observe(loss)
        self.optimizer.step()

    def view(self) -> dict[str, Any]:
        """Parameters, state, groups and attributes, of inner optimizers too, comparable."""
        seen: dict[str, Any] = {"params": bits(self.params)}
        for where, optimizer in _with_inner(self.optimizer):
            params = parameters(optimizer)
            seen[f"{where}state"] = [_plain(dict(optimizer.state.get(p, {}))) for p in params]
            seen[f"{where}groups"] = [
                {k: _plain(v) for k, v in group.items() if k != "params"}
                for group in optimizer.param_groups
            ]
            seen[f"{where}attributes"] = {
                k: _plain(v) for k, v in vars(optimizer).items() if _is_its_own(k, v)
            }
        return seen


def parameters_for(name: str) -> list[Parameter]:
    """Parameters, always equal; only matrices for the optimizers of matrices."""
    random = torch.Generator().manual_seed(7)
    shapes: list[tuple[int, ...]] = [(6, 4), (4, 3), (5,)]
    if name == "lorarite":
        shapes = [(2, 6), (4, 2)]
    elif name in _MATRICES:
        shapes = shapes[:2]
    return [Parameter(torch.randn(shape, generator=random)) for shape in shapes]


def _build(name: str, params: list[Parameter]) -> Optimizer:
    if name in SCHEDULE_FREE:
        schedulefree = pytest.importorskip("schedulefree")
        return getattr(schedulefree, name)(params, lr=0.01)
    theirs = pytest.importorskip("pytorch_optimizer")
    if name in WRAPPERS:
        return WRAPPERS[name](getattr(theirs, name), params)
    kind = theirs.load_optimizer(name)
    if name == "alig":
        return kind(params, max_lr=0.01)
    if name == "bsam":
        return kind(params, num_data=100, lr=0.01)
    if name == "ranger21":
        return kind(params, num_iterations=100, lr=0.01)
    if name == "adammini":
        return kind(_model(params), lr=0.01)
    if name in _MUONS:
        groups = [
            {"params": [p for p in params if (p.ndim == 2) == muon], "use_muon": muon}
            for muon in (True, False)
        ]
        return kind(groups, lr=0.01)
    return kind(params, lr=0.01)


def _model(params: list[Parameter]) -> nn.Module:
    model = nn.Module()
    for i, p in enumerate(params):
        model.register_parameter(f"layer{i}", p)
    return model


WRAPPERS: dict[str, Callable[[Any, list[Parameter]], Optimizer]] = {
    "Lookahead": lambda kind, params: kind(AdamW(params, lr=0.01), k=2),
    "TRAC": lambda kind, params: kind(AdamW(params, lr=0.01)),
    "OrthoGrad": lambda kind, params: kind(AdamW(params, lr=0.01)),
    "PCGrad": lambda kind, params: kind(AdamW(params, lr=0.01)),
    "ScheduleFreeWrapper": lambda kind, params: kind(AdamW(params, lr=0.01)),
    "SAM": lambda kind, params: kind(params, SGD, lr=0.01, momentum=0.9),
    "LookSAM": lambda kind, params: kind(params, SGD, lr=0.01, momentum=0.9, k=2),
    "FriendlySAM": lambda kind, params: kind(params, SGD, lr=0.01, momentum=0.9),
    "WSAM": lambda kind, params: kind(_model(params), params, SGD, lr=0.01, momentum=0.9),
}
"""Those around another optimizer. (GSAM takes a loss function instead of a closure.)"""

SCHEDULE_FREE = [
    "AdamWScheduleFree",
    "AdamWScheduleFreeClosure",
    "AdamWScheduleFreePaper",
    "AdamWScheduleFreeReference",
    "RAdamScheduleFree",
    "RAdamScheduleFreeClosure",
    "SGDScheduleFree",
    "SGDScheduleFreeClosure",
    "SGDScheduleFreeReference",
]

_SAM = ("SAM", "LookSAM", "FriendlySAM", "WSAM", "bsam")
_CLOSURES = (*_SAM, "alig", "lbfgs", *(n for n in SCHEDULE_FREE if n.endswith("Closure")))
_MUONS = ("adago", "adamuon", "muon", "muonclip", "normuon")
_MATRICES = ("scion", "scionlight", "spectralsphere", "galore")


def _with_inner(optimizer: Optimizer) -> list[tuple[str, Optimizer]]:
    found = [("", optimizer)]
    for name in ("optimizer", "base_optimizer"):
        inner = vars(optimizer).get(name)
        if isinstance(inner, Optimizer):
            found += [(f"{name}.{where}", each) for where, each in _with_inner(inner)]
    return found


def _is_its_own(name: str, value: Any) -> bool:
    """Whether an attribute is neither torch's nor a function."""
    if name in ("param_groups", "state") or "hook" in name:
        return False
    return not callable(value) and not isinstance(value, Optimizer)


def _plain(value: Any) -> Any:
    """`bits`, also of values within objects: projectors, preconditioners, generators."""
    if isinstance(value, torch.Generator):
        return bits(value.get_state())
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _plain(each) for key, each in value.items()}
        return [_plain(each) for each in value.values()]  # keys are parameters, or their ids
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, Tensor):
        return bits(value)
    return _plain(vars(value)) if hasattr(value, "__dict__") else bits(value)
