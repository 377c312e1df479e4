"""One of several ranks that evaluate earlier weights, in each layout of `LAYOUTS`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from healcore.torch.driver import TorchDriver
from tests.torch import policies
from tests.torch.worlds import serve

SECONDS = 200
STEPS, KEPT = 8, 3
"""Steps of a run, and the step whose weights are evaluated again after each later one."""
Model = tuple[nn.Module, Callable[[Tensor], Tensor], int]
"""The module of the state, how to call it, and which data this rank has."""


class Counting(nn.Module):
    """Normalizes by the mean of the batches so far, a buffer that the forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        """Training depends on the buffer."""
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean


def net() -> nn.Sequential:
    return nn.Sequential(Counting(), nn.Linear(7, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 7))


def data_parallel(**options: Any) -> Model:
    module = DistributedDataParallel(net(), **options)
    return module, module, dist.get_rank()


def sharded(**options: Any) -> Model:
    module = net()
    mesh = options.pop("mesh", None) or init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in module:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(module, mesh=mesh, **options)
    return module, module, dist.get_rank()


def sharded_flat() -> Model:
    module = FullyShardedDataParallel(
        net(),
        device_id=torch.device("cpu"),
        use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    )
    return module, module, dist.get_rank()


def tensor_parallel() -> Model:
    module = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 7))
    plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    parallelize_module(module, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    return module, module, 0


def loss_of_parts() -> Model:
    """The loss is a DTensor whose value is a sum over the ranks."""
    module = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 8))
    last = ColwiseParallel(
        input_layouts=Shard(-1), output_layouts=Shard(-1), use_local_output=False
    )
    plan: dict[str, ParallelStyle] = {"0": ColwiseParallel(), "2": last}
    parallelize_module(module, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    return module, module, 0


def both_parallel() -> Model:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 7))
    parallelize_module(module, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    fully_shard(module, mesh=mesh["dp"])
    return module, module, dist.get_rank() // 2


def hybrid() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
LAYOUTS: dict[int, dict[str, Callable[[], Model]]] = {
    2: {
        "DDP": data_parallel,
        "DDP, unused parameters": lambda: data_parallel(find_unused_parameters=True),
        "FSDP2": sharded,
        "FSDP2, bfloat16": lambda: sharded(mp_policy=HALF),
        "FSDP2, offloaded": lambda: sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "FSDP1": sharded_flat,
        "tensor parallel": tensor_parallel,
        "loss in parts": loss_of_parts,
    },
    4: {
        "DDP": data_parallel,
        "FSDP2": sharded,
        "FSDP2, resharded to two": lambda: sharded(reshard_after_forward=2),
        "HSDP": lambda: sharded(mesh=hybrid()),
        "FSDP2 and tensor parallel": both_parallel,
    },
}


def digest(tensors: list[Tensor]) -> str:
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    data = b"".join(t.detach().contiguous().numpy().tobytes() for t in parts)
    return hashlib.sha256(data).hexdigest()


def run(build: Callable[[], Model], *, compares: bool) -> dict[str, Any]:
    """A training run that evaluates the weights of step `KEPT` after each later step, or not."""
    torch.manual_seed(0)
    module, model, part = build()
    torch.manual_seed(part)
    optimizer = AdamW(module.parameters(), lr=1e-2)
    driver = TorchDriver({"model": module, "optimizer": optimizer}, policies.SKIPS)
    random: list[Tensor] = []

    def loss_fn(x: Tensor) -> Tensor:
        found = model(x)
        target = x if found.shape == x.shape else torch.ones(())
        if isinstance(found, DTensor) and not isinstance(target, DTensor):
            target = DTensor.from_local(target, found.device_mesh, [Replicate()])
        return (found - target).square().mean()

    batches = [
        torch.randn(6, 7, generator=torch.Generator().manual_seed(100 * part + i))
        for i in range(STEPS)
    ]
    losses: list[float] = []
    again: list[list[float]] = []
    kept: Any = None
    buffers: list[Tensor] = []
    for i, batch in enumerate(batches):
        if i == KEPT and compares:
            kept = driver.copy_weights()
            random.append(torch.get_rng_state())
            buffers = [each.clone() for each in module.buffers()]
        loss = loss_fn(batch)
        losses.append(float(loss.full_tensor() if isinstance(loss, DTensor) else loss))
        driver.observe(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        driver.steps()
        if i < KEPT or not compares:
            continue

        def as_then(x: Tensor, buffers: list[Tensor] = buffers) -> Tensor:
            torch.set_rng_state(random[0])
            for now, then in zip(module.buffers(), buffers, strict=True):
                now.copy_(then)
            return loss_fn(x)

        again += [driver.losses_of(as_then, [batches[KEPT]], kept) for _ in range(2)]
        driver.losses_of(loss_fn, [batch])
    held = [*module.parameters(), *module.buffers()]
    held += [each for state in optimizer.state.values() for each in state.values()]
    driver.close()
    return {"losses": losses, "again": again, "kept": KEPT, "digest": digest(held)}


def compared(name: str) -> dict[str, Any]:
    build = LAYOUTS[dist.get_world_size()][name]
    return {"without": run(build, compares=False), "with": run(build, compares=True)}


if __name__ == "__main__":
    serve(compared, seconds=SECONDS)
