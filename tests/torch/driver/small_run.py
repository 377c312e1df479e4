"""A small run with everything that a checkpoint of a torch run has in it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from healcore.core.clipping import FixedConfig
from healcore.core.decision import Action, Cause
from healcore.core.detectors import GradSpikeConfig, NonFiniteConfig
from healcore.core.engine import Engine, EngineConfig, IncidentConfig, LrConfig, RuleConfig
from healcore.core.step_record import StepRecord
from healcore.torch.driver import TorchDriver

NAN = float("nan")
NONFINITE = int(Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD)
HOLD, RAMP = 3, 4

_ROLLS_BACK = EngineConfig(
    detectors=(("nonfinite", NonFiniteConfig()), ("grad_spike", GradSpikeConfig(window=4))),
    rules=(
        RuleConfig(NONFINITE, skip=True, action=int(Action.ROLLBACK | Action.CUT_LR)),
        RuleConfig(int(Cause.GRAD_SPIKE), skip=True, action=int(Action.ALERT)),
    ),
    incident=IncidentConfig(quiet_steps=2),
    lr=LrConfig(factor=0.5, floor=0.1, hold_steps=HOLD, ramp_steps=RAMP),
)

ROLLS_BACK = Engine(_ROLLS_BACK)
"""A NaN costs a rollback and half of the learning rate; a spike costs its step. Never clips."""
CLIPS = Engine(_ROLLS_BACK._replace(clip=FixedConfig(1e-3)))


class SmallTorchRun:
    """A linear model whose gradient depends on the batch only. float64 makes it exact to 1e-12."""

    def __init__(
        self,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[[Any], Any] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        random = torch.Generator().manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype)
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.randn(p.shape, generator=random))
        self.optimizer = optimizer(self.model.parameters())
        self.scheduler = None if scheduler is None else scheduler(self.optimizer)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        if self.scheduler is not None:
            self.state["scheduler"] = self.scheduler

    def backward(self, i: int, factor: float = 1.0) -> Tensor:
        """Gradients of batch `i`."""
        random = torch.Generator().manual_seed(100 + i)
        loss: Tensor = torch.zeros(())
        for p in self.model.parameters():
            direction = torch.randn(p.shape, generator=random).to(p)
            loss = loss + (p * direction).sum() * factor
        loss.backward()
        return loss

    def step(self, i: int, factor: float = 1.0) -> list[Tensor]:
        """One step of the loop; how far each parameter moved."""
        before = [p.detach().clone() for p in self.model.parameters()]
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(lambda: self.evaluate(i, factor))
        else:
            self.evaluate(i, factor)
            self.optimizer.step()
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(float(i))  # never better: the rate falls when patience is over
        elif self.scheduler is not None:
            self.scheduler.step()
        after = self.model.parameters()
        return [p.detach() - old for p, old in zip(after, before, strict=True)]

    def evaluate(self, i: int, factor: float) -> Tensor:
        self.optimizer.zero_grad()
        return self.backward(i, factor)


def roll_back(driver: TorchDriver, saved: Any) -> None:
    """The Healer's part of a rollback: state and detectors of then, the current budget and cut."""
    live = driver.engines()
    engine = ROLLS_BACK
    merged = {
        name: engine.to_dict(
            engine.on_rollback(engine.from_dict(live[name]), engine.from_dict(saved.record[name]))
        )
        for name in live
    }
    driver.load(saved.state, merged)


def single_record(driver: TorchDriver) -> StepRecord:
    """The one record of the one step since the last call."""
    handle: Any = driver.take_dispatch()
    ((record,),) = handle.read()
    return record
