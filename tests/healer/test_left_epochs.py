"""An epoch that a `break` has left, with several ranks and with a rollback after it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from healcore import Action, Checkpoints, Healer, Hooks
from tests.torch.forked_ranks import Worlds, folder, serve, worlds_of

SECONDS = 60
EPOCHS, STEPS = 3, 10
"""Epochs of a run, and steps of an epoch before the `break`."""
worlds = worlds_of("tests.healer.test_left_epochs", SECONDS)


def run(case: str) -> int:
    """One rank, which has one batch more than the rank before it. Returns its number of steps."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = [torch.randn(5, 4) for _ in range(STEPS + rank)]
    options: Any = {"store": folder() / case, "checkpoints": Checkpoints(every=STEPS)}
    with Healer(state={"model": model, "optimizer": optimizer}, **options) as healer:
        for _ in healer.epochs(EPOCHS):
            for number, batch in enumerate(healer.batches(data)):
                if number >= STEPS:
                    break
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
            if case == "saves":
                healer.save()
    return healer.step


@pytest.mark.slow
@pytest.mark.parametrize("case", ["saves", "does not save"])
def test_ranks_of_which_one_leaves_its_loop_by_break_do_not_wait_for_each_other(
    case: str, worlds: Worlds
):
    assert worlds.of(2, ["saves", "does not save"], case) == [EPOCHS * STEPS] * 2


def test_a_rollback_after_a_break_returns_to_its_epoch(tmp_path: Path):
    """The loop after the `break` begins with the rollback, and trains all epochs to their end."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = [torch.randn(5, 4) for _ in range(9)]
    damaged = False
    hooks = Hooks(on_incident=lambda incident: Action.ROLLBACK)
    options: Any = {"store": tmp_path, "checkpoints": Checkpoints(every=3), "hooks": hooks}
    epochs: list[int] = []
    with Healer("default", state={"m": model, "o": optimizer}, **options) as healer:
        for epoch in healer.epochs(8):
            epochs.append(epoch)
            for batch in healer.batches(data, epoch=epoch):
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                healer.observe(loss)
                loss.backward()
                if healer.step == 29 and not damaged:
                    damaged = True
                    for p in model.parameters():
                        assert p.grad is not None
                        p.grad.fill_(torch.nan)
                optimizer.step()
                if healer.batch_index == 4:
                    break
    assert healer.rollbacks == 1
    assert epochs[-1] == 7
    assert len(set(epochs)) == 8
    assert healer.step > 30, "each epoch after the rollback is trained"


if __name__ == "__main__":
    serve(run, seconds=SECONDS)
