"""The tasks, in three groups. None of them is a task of healbench, and no seed is shared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from benchmarks.clip_ablation import problems
from benchmarks.clip_ablation.problems import Batch, Data


@dataclasses.dataclass(frozen=True)
class Fault:
    """Garbage among the batches."""

    kind: str
    """inputs (multiplied), targets (multiplied), labels (of other rows, multiplied)."""
    size: float
    """Factor."""
    steps: tuple[int, ...] = ()
    """Where; or else with the probability `share` at each step."""
    share: float = 0.0

    def apply(self, g: torch.Generator, step: int, batch: Batch) -> Batch:
        """The batch, which is garbage for some seeds."""
        x, y, weight = batch
        hit = torch.rand(len(x), generator=g) < self.share
        if step in self.steps:
            hit = torch.ones_like(hit)
        hit = hit[:, None, None]
        if self.kind == "inputs":
            return torch.where(hit, self.size * x, x), y, weight
        if self.kind == "labels":
            return x, torch.where(hit, self.size * y.roll(1, 1), y), weight
        noise = torch.randn(y.shape, generator=g)
        return x, torch.where(hit, self.size * noise, y), weight


@dataclasses.dataclass(frozen=True)
class Task:
    """One training run."""

    name: str
    group: str
    """a: adaptive optimizers, b: rare classes and sources, c: bursts and garbage."""
    optimizer: str
    lr: float
    model: str = "tanh"
    data: Data = dataclasses.field(default_factory=Data)
    error: Callable = problems.squared
    steps: int = 500
    fault: Fault | None = None


FULL = Data(rows=64, fixed=True, noise=0.0)
NOISY = Data(rows=64, fixed=True, noise=0.5)
CLASSES = Data(kind="classes", noise=0.0)


def _rare(share: float, weight: float, *, scale: float = 1.0, balanced: bool = False) -> Data:
    return Data(
        shares=(1 - share, share), weights=(1.0, weight), scales=(1.0, scale), balanced=balanced
    )


def _blocks(block: int, scale: float = 1.0) -> Data:
    return Data(
        shares=(0.5, 0.5), weights=(1.0, 1.0), scales=(1.0, scale), balanced=True, block=block
    )


BURSTS = tuple(start + i for start in (120, 250, 380) for i in range(5))
SINGLES = (100, 170, 260, 330, 430)

TASKS = (
    # Adaptive optimizers.
    Task("adam_full", "a", "adam", 1e-2, data=FULL, steps=1500),
    Task("adam_full_fast", "a", "adam", 3e-2, data=FULL, steps=1500),
    Task("adam_full_relu", "a", "adam", 1e-2, "relu", FULL, steps=1500),
    Task("adam_b2_95_full", "a", "adam_b2_95", 1e-2, data=FULL, steps=1000),
    Task("adam_full_noise", "a", "adam", 1e-2, data=NOISY, steps=1000),
    Task("adam_full_linear", "a", "adam", 1e-2, "linear", FULL, steps=1000),
    Task(
        "adamw_full_classes",
        "a",
        "adamw",
        1e-2,
        data=Data(kind="classes", rows=64, fixed=True, noise=0.0),
        error=problems.cross_entropy,
        steps=1000,
    ),
    Task("adam_full_attention", "a", "adam", 1e-2, "attention", FULL, steps=600),
    Task("adam_batches", "a", "adam", 3e-3),
    Task("adam_summed", "a", "adam", 3e-3, error=problems.summed),
    Task("adamw_attention", "a", "adamw", 3e-3, "attention", CLASSES, problems.cross_entropy),
    Task("lion_batches", "a", "lion", 1e-3),
    Task("lion_full", "a", "lion", 1e-3, data=FULL, steps=800),
    Task(
        "adafactor_attention", "a", "adafactor", 1e-2, "attention", CLASSES, problems.cross_entropy
    ),
    Task("adafactor_full", "a", "adafactor", 1e-2, data=FULL, steps=800),
    Task("rmsprop_full", "a", "rmsprop", 3e-3, data=FULL, steps=800),
    Task("momentum_full", "a", "momentum", 0.15, data=FULL, steps=1000),
    Task("sgd_full_edge", "a", "sgd", 1.0, data=FULL, steps=1000),
    Task(
        "linear_small_init",
        "a",
        "momentum",
        0.05,
        "linear",
        dataclasses.replace(FULL, init=0.3),
        steps=1000,
    ),
    Task("adam_growing_targets", "a", "adam", 1e-2, data=Data(growth=100.0)),
    # Rare classes and sources.
    Task("rare_1_x30", "b", "adam", 3e-3, data=_rare(0.01, 30.0), steps=800),
    Task("rare_1_x10", "b", "momentum", 0.01, data=_rare(0.01, 10.0), steps=1000),
    Task("rare_2_x40", "b", "lion", 1e-3, data=_rare(0.02, 40.0), steps=800),
    Task("rare_0.3_x10", "b", "adam", 3e-3, data=_rare(0.003, 10.0), steps=1200),
    Task("rare_0.3_x30", "b", "adam", 3e-3, data=_rare(0.003, 30.0), steps=1200),
    Task("rare_3_x10", "b", "adam", 3e-3, data=_rare(0.03, 10.0), steps=800),
    Task("rare_3_x40", "b", "adam", 3e-3, data=_rare(0.03, 40.0), steps=800),
    Task("rare_7_x3", "b", "momentum", 0.02, data=_rare(0.07, 3.0), steps=800),
    Task("rare_7_x20", "b", "momentum", 0.003, data=_rare(0.07, 20.0), steps=800),
    Task("rare_15_x5", "b", "adamw", 3e-3, data=_rare(0.15, 5.0), steps=800),
    Task("rare_15_x20", "b", "lion", 1e-3, data=_rare(0.15, 20.0), steps=800),
    Task(
        "rare_class_2",
        "b",
        "adam",
        3e-3,
        error=problems.cross_entropy,
        steps=800,
        data=dataclasses.replace(_rare(0.02, 1.0, balanced=True), kind="classes", noise=0.0),
    ),
    Task(
        "rare_class_5",
        "b",
        "momentum",
        0.1,
        error=problems.cross_entropy,
        steps=800,
        data=dataclasses.replace(_rare(0.05, 1.0, balanced=True), kind="classes", noise=0.0),
    ),
    Task("rare_large_targets", "b", "adam", 3e-3, data=_rare(0.05, 1.0, scale=5.0), steps=800),
    Task("mix_1_20", "b", "adam", 3e-3, data=_rare(0.5, 1.0, scale=4.5), steps=600),
    Task("turns_1", "b", "adam", 3e-3, data=_blocks(2, 3.0), steps=600),
    Task("turns_20", "b", "momentum", 0.01, data=_blocks(20, 4.0), steps=600),
    Task("turns_100", "b", "adam", 3e-3, data=_blocks(100, 4.0), steps=800),
    Task(
        "rare_reward",
        "b",
        "adam",
        3e-3,
        steps=800,
        data=Data(shares=(0.97, 0.03), weights=(1e-4, 1.0), scales=(1.0, 1.0)),
    ),
    Task("zeros_92", "b", "adam", 3e-3, data=Data(zeros=0.92, noise=0.0), steps=600),
    # Bursts and garbage.
    Task("single_10_adam", "c", "adam", 3e-3, fault=Fault("targets", 10.0, SINGLES)),
    Task("single_100_adam", "c", "adam", 3e-3, fault=Fault("targets", 100.0, SINGLES)),
    Task("single_1000_momentum", "c", "momentum", 0.02, fault=Fault("targets", 1e3, SINGLES)),
    Task("single_inputs", "c", "momentum", 0.02, "relu", fault=Fault("inputs", 30.0, SINGLES)),
    Task("burst_10_adam", "c", "adam", 3e-3, fault=Fault("targets", 10.0, BURSTS)),
    Task("burst_100_adam", "c", "adam", 3e-3, fault=Fault("targets", 100.0, BURSTS)),
    Task("burst_10_momentum", "c", "momentum", 0.02, fault=Fault("targets", 10.0, BURSTS)),
    Task("burst_30_lion", "c", "lion", 1e-3, fault=Fault("targets", 30.0, BURSTS)),
    Task("corrupt_1", "c", "adam", 3e-3, fault=Fault("labels", 10.0, share=0.01)),
    Task("corrupt_5", "c", "adam", 3e-3, fault=Fault("labels", 10.0, share=0.05)),
    Task("corrupt_5_momentum", "c", "momentum", 0.02, fault=Fault("labels", 10.0, share=0.05)),
    Task("tails_1.5", "c", "momentum", 0.02, data=Data(noise=0.3, tails=1.5)),
    Task("tails_1.2_adam", "c", "adam", 3e-3, data=Data(noise=0.3, tails=1.2)),
    Task("recurrent_fast", "c", "momentum", 0.3, "recurrent", Data(init=1.5)),
    Task(
        "attention_garbage",
        "c",
        "adamw",
        3e-3,
        "attention",
        Data(noise=0.1),
        fault=Fault("targets", 30.0, SINGLES),
    ),
)
