"""Models that are spread over the ranks of a program, in every way that gloo runs."""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

FSDP2: dict[str, dict[str, Any]] = {
    "FSDP2": {},
    "FSDP2, bfloat16": {"mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "FSDP2, offloaded": {"offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False)},
    "FSDP2, resharded to two": {"reshard_after_forward": 2},
}


def spread(kind: str, net: nn.Sequential) -> tuple[nn.Module, int]:
    """The module to call, and which part of the data this rank has.

    The parameters of `net` are those of the module, and its linear layers are spread.
    """
    if kind == "alone":
        return net, 0
    rank = dist.get_rank()
    world = dist.get_world_size()
    if kind.startswith("DDP"):
        return DistributedDataParallel(net, find_unused_parameters="unused" in kind), rank
    if kind == "FSDP1":
        wraps = ModuleWrapPolicy({nn.Linear})
        cpu = torch.device("cpu")
        options = {"use_orig_params": True, "auto_wrap_policy": wraps, "device_id": cpu}
        return fsdp.FullyShardedDataParallel(net, **options), rank  # type: ignore[arg-type]
    if kind == "HSDP":
        return shard(net, mesh("replicas", "shards")), rank
    if kind in FSDP2:
        return shard(net, init_device_mesh("cpu", (world,)), **FSDP2[kind]), rank
    if kind == "FSDP2 and tensor parallel":
        both = mesh("dp", "tp")
        parallelize_module(net, both["tp"], plan(net))
        return shard(net, both["dp"]), rank // 2
    parallelize_module(net, init_device_mesh("cpu", (world,)), plan(net, kind))
    if kind == "sequence parallel":
        net.register_forward_pre_hook(lambda _, given: (given[0].chunk(world)[rank],))
    return net, 0


def mesh(*names: str) -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def shard(net: nn.Module, over: Any, **options: Any) -> Any:
    """FSDP2 of each linear layer, and of the rest."""
    for layer in net:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fsdp.fully_shard(layer, mesh=over, **options)
    return fsdp.fully_shard(net, mesh=over, **options)


def plan(net: nn.Module, kind: str = "tensor parallel") -> dict[str, ParallelStyle]:
    """How the first two linear layers are spread; other layers stay plain."""
    first, second, *_ = (n for n, each in net.named_children() if isinstance(each, nn.Linear))
    if kind == "loss in parts":  # the loss is a DTensor whose value is a sum over the ranks
        kept: dict[str, Any] = {"input_layouts": Shard(-1), "output_layouts": Shard(-1)}
        return {first: ColwiseParallel(), second: ColwiseParallel(**kept, use_local_output=False)}
    if kind == "sequence parallel":  # gradients of the LayerNorm are partial sums
        whole = RowwiseParallel(output_layouts=Replicate())
        sequence = SequenceParallel(sequence_dim=0)
        return {"0": sequence, first: ColwiseParallel(input_layouts=Shard(0)), second: whole}
    return {first: ColwiseParallel(), second: RowwiseParallel()}


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor | None) -> Tensor:
    """What this rank has of a tensor."""
    assert tensor is not None
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # type: ignore[attr-defined]


def held(net: nn.Module, optimizer: Any) -> list[Tensor]:
    """Parameters, buffers, moments and step counts."""
    moments = (v for s in optimizer.state.values() for v in s.values())
    return [*net.parameters(), *net.buffers(), *(v for v in moments if isinstance(v, Tensor))]


def digest(tensors: Iterable[Tensor]) -> str:
    """Digest of the bits of this rank's tensors."""
    bits = (part(t).detach().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    return hashlib.sha256(b"".join(bits)).hexdigest()
