"""One of two ranks that train together under `attach`: python -m tests.torch.ddp_rank RANK ROOT.

Prints a JSON line for each scenario: what this rank did. The faults are on rank 1 only.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import healcore
from healcore.core.engine import Engine
from healcore.torch import RanksDisagreeError, attach
from healcore.torch.driver import TorchDriver
from tests.torch import policies

STEPS, BAD = 20, 12
NAN = float("nan")
SECONDS = 600
"""After which a rank that waits for the other one shows where, and ends."""


class Scenario(NamedTuple):
    """The fault of rank 1 at step `BAD`, and the setup of both ranks."""

    observed: float = 1.0
    """Its loss is observed times this."""
    trained: float = 1.0
    """Its loss is trained on times this."""
    policy: Engine = policies.LOSSES
    where: str = "host"
    wrapped: bool = True
    """Wrapped by DDP; otherwise every rank steps with the gradients of its own data."""
    no_gradient: bool = False
    """Rank 1 has none at that step."""
    expects_change: bool = False
    looks: bool = False
    """Rank 1 asks for the state of its fresh optimizer, which torch makes with a step."""
    group: Any = "auto"
    healer: bool = False


SCENARIOS = {
    f"{name}, {where}": scenario._replace(where=where)
    for name, scenario in {
        "NaN loss": Scenario(observed=NAN),
        "loss spike": Scenario(observed=1e4),
        "NaN gradient": Scenario(trained=NAN),
        "per-tensor clipping": Scenario(trained=1e3, policy=policies.ADAGC),
        "local NaN gradient": Scenario(trained=NAN, wrapped=False),
        "local gradients clipped": Scenario(policy=policies.fixed(0.01), wrapped=False),
        "no gradient on one rank": Scenario(wrapped=False, no_gradient=True),
        "change expected on one rank": Scenario(
            observed=1e4, expects_change=True, policy=policies.LOSSES, wrapped=True
        ),
        "fresh state on one rank": Scenario(looks=True),
        "Healer": Scenario(observed=1e4, healer=True),
    }.items()
    for where in ("host", "device")
} | {
    "nothing is exchanged": Scenario(group=None),
    "nothing is exchanged, Healer": Scenario(observed=1e4, group=None, healer=True),
}


class CountCollectives(TorchDispatchMode):
    """Counts what goes through the process group."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func).startswith("c10d.")
        return func(*args, **(kwargs or {}))


def run(scenario: Scenario, root: Path) -> dict[str, Any]:
    """One run; with a Healer as in the README."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model = DistributedDataParallel(net) if scenario.wrapped else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    options = {"engine": scenario.where, "process_group": scenario.group}
    random = torch.Generator().manual_seed(100 + rank)

    def loss_at(i: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(16, 4, generator=random)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        odd = i == BAD and rank == 1
        trained = loss * (scenario.trained if odd else 1.0)
        return trained, loss.detach() * (scenario.observed if odd else 1.0)

    outcome: dict[str, Any] = {"raised": None, "collectives": 0}
    taken = 0
    try:
        if scenario.healer:
            state = {"model": net, "optimizer": optimizer}
            with healcore.Healer(
                scenario.policy, state=state, attach=options, save_every=5
            ) as healer:
                for i in healer.batches(range(STEPS)):
                    trained, observed = loss_at(i)
                    healer.observe(observed)
                    trained.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                assert isinstance(healer.driver, TorchDriver)
                outcome["skips"] = int(healer.driver.healings["optimizer"].metrics()["heal/skips"])
        else:
            heal = attach(optimizer, scenario.policy, **options)
            if scenario.looks and rank == 1:
                get_optimizer_state_dict(net, optimizer)
            for taken in range(STEPS):
                trained, observed = loss_at(taken)
                if scenario.expects_change and rank == 1 and taken == BAD:
                    heal.expect_change()
                heal.observe(observed)
                trained.backward()
                if scenario.no_gradient and rank == 1 and taken == BAD:
                    optimizer.zero_grad()
                with CountCollectives() as counting:
                    optimizer.step()
                outcome["collectives"] += counting.count
                optimizer.zero_grad()
            outcome["skips"] = int(heal.metrics()["heal/skips"])
            outcome["grad_scale"] = float(heal.metrics()["heal/grad_scale"])
            outcome["report"] = str(heal.report())
    except RanksDisagreeError as error:
        outcome["raised"] = f"{taken}: {error}"
    weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    moments = b"".join(s["exp_avg"].numpy().tobytes() for s in optimizer.state.values())
    outcome["weights"] = hashlib.sha256(weights + moments).hexdigest()
    outcome["finite"] = all(bool(p.isfinite().all()) for p in net.parameters())
    return outcome


def main(rank: int, root: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2
    )
    for scenario in SCENARIOS.values():
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        print(json.dumps(run(scenario, root)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
