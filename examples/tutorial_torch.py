"""The loop of docs/tutorial.md in torch: it fails twice, and is healed step by step.

python examples/tutorial_torch.py --protection none|attach|healer [--kill-at STEP] [--no-faults]
"""

from __future__ import annotations

import argparse
import os
import signal
import time

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import healcore


def random_batch():
    inputs = torch.randn(64, 8)
    targets = inputs.sum(dim=1, keepdim=True).sin()
    return inputs, targets + 0.1 * torch.randn(64, 1)


def make_data(faults):
    torch.manual_seed(0)
    batches = [random_batch() for _ in range(600)]
    if faults:
        batches[120][1].fill_(torch.nan)  # fault 1: one batch has no targets
    return batches


def build(faults):
    model = nn.Sequential(
        nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # fault 2: for 50 steps the learning rate is 100 times too high
    wrong = range(350, 400) if faults else range(0)
    scheduler = LambdaLR(optimizer, lambda step: 100.0 if step in wrong else 1.0)
    return model, optimizer, scheduler


def loss_fn(model, batch):
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def train(batches, model, optimizer, scheduler, show):
    for step, batch in enumerate(batches):
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        show(step, loss)


def train_attached(batches, model, optimizer, scheduler, show):
    heal = healcore.torch.attach(optimizer)  # <- healcore
    for step, batch in enumerate(batches):
        loss = loss_fn(model, batch)
        heal.observe(loss)  # <- healcore
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        show(step, loss)


def train_healed(batches, model, optimizer, scheduler, show):
    # healcore: what training changes
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with healcore.Healer(  # <- healcore
        "default",
        state=state,
        store="tutorial-torch",
        loss_fn=lambda batch: loss_fn(model, batch),
    ) as healer:
        for batch in healer.batches(batches):  # <- healcore
            step = healer.step
            loss = healer.loss(batch)  # <- healcore
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            show(step, loss)


TRAIN = {"none": train, "attach": train_attached, "healer": train_healed}


def main(protection, kill_at=None, faults=True):
    """Trains, prints every 50th loss, and returns all losses with their steps."""
    losses = []

    def show(step, loss):
        losses.append((step, loss.item()))
        if step % 50 == 0:
            print(f"step {step:3}  loss {loss.item():.3f}", flush=True)
        if step == kill_at:
            time.sleep(1)  # the newest checkpoint is written in the background
            os.kill(os.getpid(), signal.SIGKILL)

    data = make_data(faults)
    model, optimizer, scheduler = build(faults)
    TRAIN[protection](data, model, optimizer, scheduler, show)
    print(f"loss on unseen data {loss_fn(model, random_batch()).item():.3f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--protection", choices=TRAIN, default="none")
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--no-faults", dest="faults", action="store_false")
    main(**vars(parser.parse_args()))
