"""Every optimizer that torch has, fused and not, and one small problem for all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from healcore.torch import Healing

HOST_AND_DEVICE = ("host", "device")
"""Where the engine runs."""
host_and_device = pytest.mark.parametrize("where", HOST_AND_DEVICE)

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """One optimizer and its requirements on the loop."""

    name: str
    kind: type[Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    closure: bool = False
    sparse: bool = False

    @property
    def fused(self) -> bool:
        return bool(self.options.get("fused"))

    def build(self, **options: Any) -> Optimizer:
        """The optimizer over fresh parameters that are always equal."""
        random = torch.Generator().manual_seed(7)
        shapes = [(6, 4), (4, 3)] if self.name == "Muon" else [(6, 4), (4, 3), (5,)]
        params = [Parameter(torch.randn(shape, generator=random)) for shape in shapes]
        return self.kind(params, **{"lr": 0.01, **self.options, **options})  # type: ignore[call-arg]

    def step(
        self,
        optimizer: Optimizer,
        i: int,
        *,
        heal: Healing | None = None,
        factor: float = 1.0,
        then: Callable[[], object] | None = None,
    ) -> None:
        """One training step on batch `i`; `factor` multiplies the loss and so the gradients."""

        def evaluate() -> Tensor:
            optimizer.zero_grad()
            loss = bowl([p for g in optimizer.param_groups for p in g["params"]], i) * factor
            loss.backward()
            if self.sparse:
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        p.grad = p.grad.to_sparse()
            if then is not None:
                then()
            return loss

        if self.closure:
            optimizer.step(evaluate)  # type: ignore[arg-type]
            return
        loss = evaluate()
        if heal is not None:
            heal.observe(loss)
        optimizer.step()


def bowl(params: Sequence[Tensor], i: int) -> Tensor:
    """A noisy quadratic; gradient norms between about 1 and 10."""
    random = torch.Generator().manual_seed(1000 + i)
    loss = torch.zeros(())
    for p in params:
        noise = 0.1 * torch.randn(p.shape, generator=random)
        loss = loss + 0.5 * ((p - noise) ** 2).sum()
    return loss


_OPTIM = torch.optim
_MOMENTUM = {"momentum": 0.9}

FUSED = [
    Case(name, kind, {"fused": True, **options})
    for name, kind, options in (
        ("Adam-fused", _OPTIM.Adam, {}),
        ("Adam-fused-amsgrad", _OPTIM.Adam, {"amsgrad": True}),
        ("AdamW-fused", _OPTIM.AdamW, {}),
        ("SGD-fused", _OPTIM.SGD, {}),
        ("SGD-fused-momentum", _OPTIM.SGD, _MOMENTUM),
        ("SGD-fused-nesterov", _OPTIM.SGD, {**_MOMENTUM, "nesterov": True, "weight_decay": 0.1}),
        ("SGD-fused-dampening", _OPTIM.SGD, {**_MOMENTUM, "dampening": 0.5}),
        ("Adagrad-fused", _OPTIM.Adagrad, {}),
    )
]

_USUAL = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "Muon", "NAdam", "RAdam",
    "Rprop", "SGD",
)  # fmt: skip
_SEARCH = {"max_iter": 3, "line_search_fn": "strong_wolfe"}
PLAIN = [
    *(Case(name, getattr(_OPTIM, name)) for name in _USUAL if hasattr(_OPTIM, name)),  # Muon: 2.9
    Case("Adam-foreach", _OPTIM.Adam, {"foreach": True}),
    Case("ASGD", _OPTIM.ASGD, {"t0": 2}),
    Case("LBFGS", _OPTIM.LBFGS, {"max_iter": 3}, closure=True),
    Case("LBFGS-wolfe", _OPTIM.LBFGS, _SEARCH, closure=True),
    Case("RMSprop", _OPTIM.RMSprop, {"momentum": 0.5, "centered": True}),
    Case("SGD-momentum", _OPTIM.SGD, {**_MOMENTUM, "dampening": 0.5}),
    Case("SGD-foreach", _OPTIM.SGD, {**_MOMENTUM, "foreach": True}),
    Case("SparseAdam", _OPTIM.SparseAdam, sparse=True),
    Case("Adam-closure", _OPTIM.Adam, closure=True),
]

CASES = FUSED + PLAIN
