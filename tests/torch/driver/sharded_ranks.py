"""One of two ranks of a sharded run: restarts with each of `OPTIMIZERS`, and a rollback."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from healcore import Checkpoints
from healcore.runtime.healer import Healer
from healcore.torch.driver import TorchDriver
from tests.torch.driver.small_run import NAN, ROLLS_BACK, roll_back, single_record
from tests.torch.forked_ranks import folder, serve
from tests.torch.layouts import digest, held, spread

STEPS, FIRST = 12, 7
ROLLBACK = "rollback"


class WideMoment(SGD):
    """Keeps a sum of its gradients in float32, for parameters of any dtype."""

    def step(self, closure: Any = None) -> None:
        """Plain descent."""
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if "sum" not in state:
                state["sum"] = torch.zeros_like(p, dtype=torch.float32)
            state["sum"].add_(p.grad)
            p.data.sub_((0.01 * state["sum"]).to(p.dtype))

    @torch.no_grad()
    def load_state_dict(self, state_dict: Any) -> None:
        """Without SGD's conversion of moments to the parameter's dtype."""
        for p, i in zip(self.param_groups[0]["params"], state_dict["state"], strict=True):
            self.state[p] = {"sum": state_dict["state"][i]["sum"]}


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params: AdamW(params, lr=0.01),
    "fused AdamW": lambda params: AdamW(params, lr=0.01, fused=True),
    "momentum": lambda params: SGD(params, lr=0.01, momentum=0.9),
    "Muon": lambda params: Muon(params, lr=0.01),
    "bfloat16": lambda params: WideMoment(params),
    "tensor parallel": lambda params: AdamW(params, lr=0.01, foreach=False),
}


def built(name: str) -> tuple[nn.Module, Optimizer, int]:
    """A fresh sharded model, its optimizer, and which data this rank has."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
    if name == "tensor parallel":
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.LayerNorm(4))
    elif name == "bfloat16":
        net.bfloat16()
    _, data = spread(name if name == "tensor parallel" else "FSDP2", net)
    return net, OPTIMIZERS[name](net.parameters()), data


def digests(name: str, store: Path, steps: int) -> str:
    """One process's part of a run; returns a digest of its final state."""
    net, optimizer, data = built(name)
    state = {"model": net, "optimizer": optimizer}
    with Healer(
        "default", state=state, store=store, checkpoints=Checkpoints(every=3), resume=True
    ) as healer:
        for i in healer.batches(list(range(STEPS))):
            random = torch.Generator().manual_seed(10 * i + data)
            x = torch.randn(8, 4, generator=random).to(next(net.parameters()).dtype)
            loss = (net(x) - x).float().square().mean()
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if i + 1 == steps:
                break
    return digest(held(net, optimizer))


def rolled_back() -> list[list[str]]:
    """The tensors that this rank names after a NaN in the second rank's rows, before and after."""
    net, optimizer, rank = built("AdamW")
    state = {"model": net, "optimizer": optimizer}
    driver = TorchDriver(state, ROLLS_BACK)
    store = driver.store(folder() / "rollback")
    named = []
    weights = []
    usual = torch.tensor([1.0, 0.5, -1.0, 2.0])
    for bad in (False, True, True):
        target = usual.clone()
        target[3] = NAN if bad and rank == 0 else target[3]  # the first rank's data
        (net(torch.ones(1, 4)) * target).sum().backward()
        assert not driver.may_save()
        optimizer.step()
        optimizer.zero_grad()
        assert driver.may_save()
        if not bad:
            store.save(1, driver.state(), record=driver.engines())
        record = single_record(driver)
        assert record.taken != bad
        named.append(sorted(each.name for each in record.evidence))
        roll_back(driver, store.restore(1, driver.state()))
        weights.append(digest(net.parameters()))
    assert len({*weights}) == 1
    store.wait()
    return named


def outcome(case: str) -> Any:
    """Digests of a run without a restart, and with one; or what `rolled_back` returns."""
    if case == ROLLBACK:
        return rolled_back()
    root = folder() / case
    whole = digests(case, root / "whole", STEPS)
    digests(case, root / "parts", FIRST)
    return [whole, digests(case, root / "parts", STEPS)]


if __name__ == "__main__":
    serve(outcome, seconds=600, cases=(*OPTIMIZERS, ROLLBACK))
