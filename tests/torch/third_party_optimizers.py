"""Every optimizer of pytorch-optimizer and schedulefree, over one small problem."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

from healcore.torch import Healing
from tests.torch.bit_comparison import bits
from tests.torch.optimizer_cases import bowl

LEFT_OUT = {
    "lomo": "updates in the backward pass and has no step()",
    "adalomo": "updates in the backward pass and has no step()",
    "demo": "needs einops",
    "distributedmuon": "needs a process group",
}
"""Names of pytorch-optimizer that are not built here, and why."""


def names() -> list[str]:
    """The names of all cases; of a package that cannot be imported one, which is skipped."""
    theirs, free = ["adan"], ["AdamWScheduleFree"]
    if find_spec("pytorch_optimizer"):
        theirs = import_module("pytorch_optimizer").get_supported_optimizers()
    if find_spec("schedulefree"):
        kinds = vars(import_module("schedulefree")).items()
        free = [n for n, each in kinds if isinstance(each, type) and issubclass(each, Optimizer)]
    return [name for name in theirs if name not in LEFT_OUT] + [*WRAPPERS, *free]


class OptimizerRun:
    """One optimizer of `names`, and the loop that it needs; with `closure` by a closure."""

    def __init__(self, name: str, *, closure: bool = False) -> None:
        self.name = name
        self.params = parameters_for(name)
        torch.manual_seed(0)  # some draw their projections at random
        self.optimizer = _build(name, self.params)
        self.closure = closure or name in _CLOSURES or name.endswith("Closure")
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
        """Parameters, and all values of the optimizer and of those in it, comparable."""
        return {"params": bits(self.params), "optimizer": _plain(self.optimizer)}


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
    if "ScheduleFree" in name and name not in WRAPPERS:
        return getattr(pytest.importorskip("schedulefree"), name)(params, lr=0.01)
    theirs = pytest.importorskip("pytorch_optimizer")
    if name in WRAPPERS:
        return WRAPPERS[name](getattr(theirs, name), params)
    given: Any = params
    if name == "adammini":
        given = _model(params)
    elif name in _MUONS:
        given = [
            {"params": [p for p in params if (p.ndim == 2) == muon], "use_muon": muon}
            for muon in (True, False)
        ]
    return theirs.load_optimizer(name)(given, **_OPTIONS.get(name, {"lr": 0.01}))


def _model(params: list[Parameter]) -> nn.Module:
    model = nn.Module()
    for i, p in enumerate(params):
        model.register_parameter(f"layer{i}", p)
    return model


_OPTIONS: dict[str, dict[str, Any]] = {
    "alig": {"max_lr": 0.01},
    "bsam": {"num_data": 100, "lr": 0.01},
    "ranger21": {"num_iterations": 100, "lr": 0.01},
}
_MOMENTUM = {"lr": 0.01, "momentum": 0.9}
WRAPPERS: dict[str, Callable[[Any, list[Parameter]], Optimizer]] = {
    **dict.fromkeys(
        ("TRAC", "OrthoGrad", "PCGrad", "ScheduleFreeWrapper"),
        lambda kind, params: kind(AdamW(params, lr=0.01)),
    ),
    "Lookahead": lambda kind, params: kind(AdamW(params, lr=0.01), k=2),
    "SAM": lambda kind, params: kind(params, SGD, **_MOMENTUM),
    "LookSAM": lambda kind, params: kind(params, SGD, k=2, **_MOMENTUM),
    "FriendlySAM": lambda kind, params: kind(params, SGD, **_MOMENTUM),
    "WSAM": lambda kind, params: kind(_model(params), params, SGD, **_MOMENTUM),
}
"""Those around another optimizer. (GSAM takes a loss function instead of a closure.)"""

_SAM = ("SAM", "LookSAM", "FriendlySAM", "WSAM", "bsam")
_CLOSURES = (*_SAM, "alig", "lbfgs")
_MUONS = ("adago", "adamuon", "muon", "muonclip", "normuon")
_MATRICES = ("scion", "scionlight", "spectralsphere", "galore")


def _plain(value: Any) -> Any:
    """`bits`, also of values within objects: projectors, preconditioners, inner optimizers."""
    if isinstance(value, torch.Generator):
        return bits(value.get_state())
    if isinstance(value, dict):
        own = {k: v for k, v in value.items() if "hook" not in str(k) and not callable(v)}
        if all(isinstance(key, str) for key in own):
            return {key: _plain(each) for key, each in own.items()}
        return [_plain(each) for each in own.values()]  # keys are parameters, or their ids
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    is_value = isinstance(value, (Tensor, type)) or not hasattr(value, "__dict__")
    return bits(value) if is_value else _plain(vars(value))
