"""A torch loop under the policy mine.toml: four batches are ruined, the run is not.

python examples/torch_loop.py
"""

from __future__ import annotations

from pathlib import Path

import torch

import healcore

POLICY = Path(__file__).with_name("mine.toml")
RUINED = {60: float("nan"), 120: 1e3, 123: 1e3, 126: 1e3}
"""Step: what its targets are multiplied by."""


def main() -> None:
    """Train a small regression and print what was done to it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    heal = healcore.torch.attach(optimizer, policy=POLICY)
    loss = torch.zeros(())
    for step in range(200):
        inputs = torch.randn(64, 8)
        targets = inputs.sum(dim=1, keepdim=True).sin()
        loss = (model(inputs) - targets * RUINED.get(step, 1)).square().mean()
        heal.observe(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seen = {name: float(value) for name, value in heal.metrics().items()}
    skips, cuts = int(seen["heal/skips"]), int(seen["heal/lr_cuts"])
    print(f"loss {loss.item():.3f}, skips {skips}, cuts {cuts}")


if __name__ == "__main__":
    main()
