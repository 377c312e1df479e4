"""Small DeepSpeed engines on a CPU, of every kind that can be healed."""

import os
from typing import Any

import torch
from torch import Tensor, nn

from tests.torch.forked_ranks import free_port

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 8}}


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}}


SCALED = "ZeRO-2, float16"
"""DeepSpeed searches a loss scale for it: an overflow is nothing unusual there."""
KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": BF16,
    "ZeRO-1": zero(1),
    "ZeRO-1, float32 sums": {**zero(1), **BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    "ZeRO-2": zero(2),
    "ZeRO-2, bfloat16": {**zero(2), **BF16},
    SCALED: {**zero(2), **FP16},
}


def prepare(rank: int = 0, world: int = 1) -> Any:
    """Sets up DeepSpeed for this process; returns the module."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_SIZE": str(world)}
    if world == 1:  # the ranks of a program have one, which also names the memory that they share
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    import deepspeed  # pyright: ignore[reportMissingImports]
    from deepspeed.accelerator import get_accelerator  # pyright: ignore[reportMissingImports]

    # torch's CPU kernels for float16 are slow here, which is why DeepSpeed refuses; they are right.
    kind: Any = type(get_accelerator())
    kind.is_fp16_supported = lambda self: True
    if not torch.distributed.is_initialized():
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return deepspeed


class Loop:
    """A small regression under an engine, with two micro-batches per step."""

    def __init__(self, config: dict[str, Any], *, groups: int = 2) -> None:
        import deepspeed  # pyright: ignore[reportMissingImports]

        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        params = list(net.parameters())
        split = [{"params": params[:2]}, {"params": params[2:]}] if groups == 2 else params
        optimizer = torch.optim.AdamW(split, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=20)
        self.engine: Any
        self.engine, *_ = deepspeed.initialize(
            model=net,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            config={
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
                "steps_per_print": 10**9,
                "gradient_clipping": 0.0,  # 1.0 by default
                **config,
            },
        )
        self.dtype = next(net.parameters()).dtype

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.engine.module.parameters()]

    @property
    def moments(self) -> list[Tensor]:
        state = self.engine.basic_optimizer.state
        return [v.clone() for s in state.values() for v in s.values() if isinstance(v, Tensor)]

    def micro_step(self, i: int, factor: float = 1.0) -> None:
        """Micro-batch number `i`, its loss times `factor`."""
        random = torch.Generator().manual_seed(2 * i + torch.distributed.get_rank())
        x = (1 + 0.1 * torch.rand(4, 3, generator=random)).to(self.dtype)
        loss = (self.engine(x) - x.sum(1, keepdim=True)).float().square().mean() * factor
        self.engine.backward(loss)
        self.engine.step()

    def step(self, i: int, factor: float = 1.0) -> None:
        """A whole step; `factor` for its first micro-batch."""
        self.micro_step(2 * i, factor)
        self.micro_step(2 * i + 1)
