"""Small trained networks and their checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from healcore.tools.probe.checks import OptimizerInputs, Report, run_probe
from healcore.tools.probe.optimizer import probe_optimizer

torch.set_num_threads(1)  # more of them only wait for each other in nets of this size


class Net(nn.Module):
    def __init__(self, blocks: int = 6, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 20)

    def linear(self, block: int) -> nn.Linear:
        found = self.get_submodule(f"blocks.{block}.1")
        assert isinstance(found, nn.Linear)
        return found

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def train(net: nn.Module, optimizer: Any, steps: int, seed: int = 0) -> None:
    """Trains the net to predict the successor of a number."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(0, 20, (32,), generator=generator)
        loss = nn.functional.cross_entropy(net(tokens), (tokens + 1) % 20)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def trained(
    make: Callable[[Any], Any] = torch.optim.AdamW, steps: int = 60, blocks: int = 6
) -> tuple[Net, Any]:
    torch.manual_seed(0)
    net = Net(blocks)
    optimizer = make(net.parameters())
    train(net, optimizer, steps)
    return net, optimizer


def saved(folder: Path, net: nn.Module, optimizer: Any, name: str = "checkpoint.pt") -> Path:
    path = folder / name
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path


def probe(path: Path, **inputs: Any) -> Report:
    return run_probe("optimizer", str(path), probe_optimizer, path, OptimizerInputs(**inputs))


def unjudged(path: Path, verdict: str, reason: str, **inputs: Any) -> None:
    result = probe(path, **inputs)
    assert result.verdict.value == verdict, result.checks
    assert any(reason in check.message for check in result.checks)


def verdicts(result: Report) -> dict[str, str]:
    return {check.name: check.verdict.value for check in result.checks}
