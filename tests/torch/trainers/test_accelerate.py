"""A loop that Accelerate has prepared: attach, accumulation, scaler, clipping."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from healcore.torch import attach
from tests.torch import policies
from tests.torch.optimizer_cases import NAN

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Loop:
    """A small regression, prepared, with `accumulate` micro-batches per step."""

    def __init__(self, accumulate: int = 1) -> None:
        self.accelerator: Any = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=accumulate
        )
        torch.manual_seed(0)
        net = nn.Linear(3, 1)
        optimizer = AdamW(net.parameters(), lr=0.01)
        scheduler = LinearLR(optimizer, start_factor=0.5, total_iters=20)
        rows = TensorDataset(torch.arange(24), 1 + 0.1 * torch.rand(24, 3))
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            net, optimizer, scheduler, DataLoader(rows, batch_size=1)
        )

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def step(self, batch: Any, observe: Any, *, bad: int = -1, clip: float | None = None) -> None:
        """One micro-batch; the loss of batch `bad` is NaN."""
        x = batch[1]
        factor = NAN if int(batch[0]) == bad else 1.0
        with self.accelerator.accumulate(self.model):
            loss = (self.model(x) - x.sum()).square().mean() * factor
            observe(loss)
            self.accelerator.backward(loss)
            if clip is not None and self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_nan_batch_costs_its_step_and_nothing_else(accumulate: int):
    loop = Loop(accumulate)
    heal = attach(loop.optimizer, policies.SKIPS)
    for at, batch in enumerate(loop.loader):
        before = loop.weights
        loop.step(batch, heal.observe, bad=7)
        stepped = (at + 1) % accumulate == 0 and at // accumulate != 7 // accumulate
        assert all(map(torch.equal, before, loop.weights)) == (not stepped)
    assert int(heal.metrics()["heal/skips"]) == 1
    assert all(bool(p.isfinite().all()) for p in loop.model.parameters())


def test_a_wrapper_with_a_scaler_is_healed_and_released(caplog: pytest.LogCaptureFixture):
    """With fp16 it stores `step` before `attach`, and restores it after each step."""
    Loop()
    p = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    inner = AdamW([p], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    wrapped: Any = accelerate.optimizer.AcceleratedOptimizer(inner, scaler=scaler)

    def step(factor: float = 1.0) -> bool:
        before = p.detach().clone()
        wrapped.zero_grad()
        scaler.scale(0.5 * (p**2).sum() * factor).backward()
        wrapped.step()
        return torch.equal(before, p)

    heal = attach(wrapped, policies.SKIPS)
    assert [step(factor) for factor in (*[1.0] * 6, 1e4, 1.0)] == [*[False] * 6, True, False]
    assert not wrapped.step_was_skipped, "a schedule goes on"
    assert int(heal.metrics()["heal/steps"]) == 8
    heal.detach()
    assert not step(1e4)
    assert int(heal.metrics()["heal/steps"]) == 8
    heal = attach(inner, policies.SKIPS)
    assert not step()
    assert not step(1e4)
    assert int(heal.metrics()["heal/steps"]) == 0
    assert sum("pass accelerate's optimizer" in each.message for each in caplog.records) == 1
