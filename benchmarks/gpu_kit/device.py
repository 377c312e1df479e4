"""The device of the checks, and how to see whether the host waits for it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
ASLEEP_CYCLES = 200_000_000
"""Clock cycles for which the device is busy while the host takes a step: 0.1 s at 2 GHz."""
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpy", "cudaMemset")
"""How the names of the host's calls begin that put work into a stream."""


def name_of_device() -> str:
    """The accelerator, or the processor if there is none, with torch's version."""
    if CUDA:
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"CPU (there is no CUDA device), torch {torch.__version__}"


@contextlib.contextmanager
def no_waits(*, asleep: bool = False) -> Iterator[None]:
    """Raises where an operation of torch waits for the device.

    With `asleep` the device is busy first, and it must still be busy when the block ends. This also
    finds waits for events and streams, which torch does not report. The block may have at most
    about 1,000 launches, because the host waits when the queue of the device is full.
    """
    if not CUDA:
        yield
        return
    awake = torch.cuda.Event()
    if asleep:
        torch.cuda._sleep(ASLEEP_CYCLES)  # pyright: ignore[reportPrivateUsage]
        awake.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if asleep:
        assert not awake.query(), "the host has waited for the device"
        finish()


def finish() -> None:
    """Waits until the device has done everything."""
    if CUDA:
        torch.cuda.synchronize()


class CountDispatches(TorchDispatchMode):
    """Counts the operations that torch dispatches: in an eager step about one launch each."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def work_of(events: Iterable[Any]) -> dict[str, int]:
    """Counts the work in the events of a `torch.profiler`.

    Returns:
        `launches`: calls of the host that put work into a stream. `kernels`: kernels that the
        device has run.
    """
    found = Counter({"launches": 0, "kernels": 0})
    for each in events:
        if each.device_type == DeviceType.CPU:
            found["launches"] += each.name.startswith(LAUNCHES)
        elif not getattr(each, "is_user_annotation", False):
            found["kernels"] += not each.name.startswith(("Memcpy", "Memset"))
    return dict(found)


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
