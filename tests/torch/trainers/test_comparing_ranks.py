"""A healed Trainer and a healed fit decide with two ranks as with one, by their own losses."""

import os
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from healcore.runtime.store.checkpoints import Keep
from healcore.torch.store import MemoryStore
from tests.forked_programs import TRANSFORMERS
from tests.torch import compared_ranks
from tests.torch.forked_ranks import Worlds, folder, serve, worlds_of

pytestmark = pytest.mark.slow  # processes that import transformers or lightning

SECONDS = 150
STEPS, FAULT, ROWS = 90, 45, 8
"""Steps of a run, the step whose weights are damaged, and rows of a global batch."""
worlds = worlds_of("tests.torch.trainers.test_comparing_ranks", SECONDS, imports=TRANSFORMERS)


def options(rollbacks: list[Any]) -> dict[str, Any]:
    store = MemoryStore(keep=Keep(good=5, candidates=5))
    return {"store": store, **compared_ranks.options(rollbacks)}


def damage(step: int, layer: Any, done: list[int]) -> None:
    """Multiplies a layer's weights by 50 once, before step `FAULT`."""
    if step == FAULT and not done:
        done.append(step)
        with torch.no_grad():
            layer.weight.mul_(50.0)


def result(rollbacks: list[Any], steps: int, module: torch.nn.Module) -> dict[str, Any]:
    norm = float(torch.cat([p.detach().reshape(-1) for p in module.parameters()]).norm())
    return {"rollbacks": rollbacks, "steps": steps, "norm": norm}


def transformers_run(world: int) -> dict[str, Any]:
    """Under `heal(trainer)`, with the trainer's own `compute_loss`."""
    from healcore.torch import heal_trainer
    from tests.torch.trainers.huggingface import small_runs

    done: list[int] = []
    rollbacks: list[Any] = []

    def before_step(state: Any, *, model: Any, **_: Any) -> None:
        damage(state.global_step, model.layers[2], done)

    more: dict[str, Any] = {"ddp_backend": "gloo"} if world > 1 else {}
    trainer = small_runs.trainer(
        folder(),
        steps=STEPS * ROWS // small_runs.BATCH,
        callbacks=[small_runs.calling("on_step_begin", before_step)],
        per_device_train_batch_size=ROWS // world,
        lr_scheduler_type="constant",
        **more,
    )
    heal_trainer(trainer, **options(rollbacks)).train()
    assert trainer.args.world_size == world
    return result(rollbacks, trainer.state.global_step, trainer.model)


def lightning_run(world: int) -> dict[str, Any]:
    """Under the callback, with the module's own loss."""
    import lightning

    from healcore.torch import LightningHealingCallback
    from tests.torch.trainers.lightning import fits

    done: list[int] = []
    rollbacks: list[Any] = []

    damages: Any = lightning.Callback()
    damages.on_train_batch_start = lambda run, own, *_: damage(run.global_step, own.net[2], done)
    torch.manual_seed(0)
    module = fits.Regression()
    callback = LightningHealingCallback(loss_fn=module.loss, **options(rollbacks))
    running = fits.trainer(
        callback,
        damages,
        max_epochs=1,
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        use_distributed_sampler=False,
    )
    rank = int(os.environ.get("RANK", "0"))
    rows = fits.data(STEPS, ROWS)
    sampler = DistributedSampler(rows, num_replicas=world, rank=rank, shuffle=False)
    running.fit(module, DataLoader(rows, batch_size=ROWS // world, sampler=sampler))
    return result(rollbacks, running.global_step, module)


def outcome(which: str) -> dict[str, Any]:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return transformers_run(world) if which == "transformers" else lightning_run(world)


@pytest.mark.parametrize("which", ["transformers", "lightning"])
def test_two_ranks_go_back_as_one_does(which: str, worlds: Worlds):
    [alone] = worlds.of(1, [which], which)
    [rollback] = alone["rollbacks"]
    assert rollback["checkpoint"] in (20, 40), "before the damage"
    assert rollback["onset"] == FAULT
    for each in worlds.of(2, [which], which):
        assert each == {**alone, "norm": pytest.approx(alone["norm"], rel=1e-4)}


if __name__ == "__main__":
    serve(outcome, seconds=SECONDS)
