"""The device of the checks, and how to see whether the host waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
NEEDS_CUDA = {"outcome": "skipped", "why": "needs CUDA"}


def name_of_device() -> str:
    """The accelerator, or the processor if there is none, with torch's version."""
    if CUDA:
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"CPU (there is no CUDA device), torch {torch.__version__}"


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Raises where an operation of torch would wait for the device."""
    if not CUDA:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def finish() -> None:
    """Waits until the device has done everything."""
    if CUDA:
        torch.cuda.synchronize()


def regression(seed: int = 0) -> tuple[torch.nn.Module, Any, Any]:
    """A small net on the device, the batch of a number, and the loss of a batch."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Tanh(), torch.nn.Linear(32, 4)
    ).to(DEVICE)
    teacher = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)
    ).requires_grad_(False)

    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(number))
        return x.to(DEVICE), teacher(x).to(DEVICE)

    def loss_fn(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch[0]).float(), batch[1])

    return model, batch, loss_fn
