"""ArcticTraining's own trainer on a CPU. Only `__init__` is replaced, which needs hub and GPU."""
# pyright: reportMissingImports=false

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from arctic_training.checkpoint.ds_engine import DSCheckpointEngine
from arctic_training.config.checkpoint import CheckpointConfig
from arctic_training.metrics import Metrics
from arctic_training.trainer.sft_trainer import SFTTrainer
from torch import Tensor, nn

from healcore import Checkpoints
from healcore.torch import arctic_callbacks
from tests.torch import policies
from tests.torch.optimizer_cases import NAN

BATCHES = 9


class Loader:
    """The same batches in the same order in every pass, as ArcticTraining's loader."""

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return ({"input_ids": torch.full((1, 1), i)} for i in range(BATCHES))


class Unhealed(SFTTrainer):
    """Two epochs of nine batches, two batches per step: the fifth step is in both epochs.

    The loss of the batch `bad` of the first epoch is NaN when it is first read. `at` has a function
    that is called before the loss of the batch that is read as this one, from 0.
    """

    name = "unhealed"

    def __init__(
        self,
        folder: Path,
        bad: int = -1,
        save_every: int = 0,
        at: tuple[int, Callable[[], object]] = (-1, bool),
        **config: Any,
    ) -> None:
        import deepspeed

        zeros = ("train_iters", "train_log_iter_interval", "loss_log_interval", "local_rank")
        stops = ("eval_interval", "exit_iteration", "exit_iteration_this_run")
        values = {
            **dict.fromkeys((*zeros, *stops), 0),
            "epochs": 2,
            "gradient_accumulation_steps": 2,
            "sequence_parallel_size": 1,
            "mem_profiler": None,
            "kill_switch_path": folder / "stop",
            "model": SimpleNamespace(attn_implementation="sdpa"),
        }
        self.config: Any = SimpleNamespace(**{**values, **config})
        self.epoch_idx = self.train_batch_idx = self.global_step = 0
        self.global_step_this_run = self.global_step_at_start_this_run = 0
        self.early_stop, self.early_stop_reason = False, ""
        self.epoch_finished = self.training_finished = self.is_resume = False
        self.wandb_experiment = self.wandb_run_id = None
        self.world_size = torch.distributed.get_world_size()
        self.global_rank = torch.distributed.get_rank()
        self.train_dataloader: Any = Loader()
        self.bad, self.at = bad, at
        self.read: list[int] = []
        self.after: dict[int, list[Tensor]] = {}
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.model: Any
        self.model, *_ = deepspeed.initialize(
            model=net,
            optimizer=torch.optim.AdamW(net.parameters(), lr=1e-2),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 2,
                "steps_per_print": 10**9,
                "gradient_clipping": 0.0,  # 1.0 by default
            },
        )
        saves = {"output_dir": folder, "save_every_n_steps": save_every}
        checkpoint = CheckpointConfig(type="deepspeed", **saves)
        self.config.checkpoint = [checkpoint]
        self.checkpoint_engines = [DSCheckpointEngine(self, checkpoint)]
        self.ds_wall_clock_available = False
        self.metrics = Metrics(self)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Also notes the batch."""
        i = int(batch["input_ids"])
        if len(self.read) == self.at[0]:
            self.at[1]()
        self.read.append(i)
        x = 1 + 0.1 * torch.rand(4, 3, generator=torch.Generator().manual_seed(i))
        bad = i == self.bad and self.read.count(i) == 1
        factor = NAN if bad else 1.0
        return (self.model(x) - x.sum(1, keepdim=True)).square().mean() * factor

    def checkpoint(self) -> None:
        """Also notes the weights after each step."""
        self.after[self.model.global_steps] = self.weights
        super().checkpoint()

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.module.parameters()]


class TinyTrainer(Unhealed):
    """Skips what is bad."""

    name = "tiny"
    callbacks = arctic_callbacks(policies.SKIPS)  # pyright: ignore


class RollingBack(Unhealed):
    """Rolls back after a NaN."""

    name = "rolling-back"
    callbacks = arctic_callbacks(  # pyright: ignore
        policies.ROLLS_BACK, checkpoints=Checkpoints(every=2)
    )
