"""How often the host waits because of the callback or `heal`, under HF's default arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from transformers import TrainerCallback

from healcore.torch import HealingCallback, heal
from tests.torch.sync_counter import CountSyncs
from tests.torch.trainers.huggingface import tiny_trainers as tiny
from tests.torch.trainers.huggingface.small_runs import trainer


def counted(folder: Path, steps: int, callbacks: list[Any], **arguments: Any) -> int:
    run = trainer(folder, steps=steps, callbacks=callbacks, logging_steps=500, **arguments)
    with CountSyncs() as syncs:
        run.train()
    assert run.optimizer.optimizer.param_groups[0]["fused"]  # HF's default
    return syncs.count


@pytest.mark.parametrize(("engine", "accumulated"), [("host", 2), ("device", 1)])
def test_no_sync_is_added_to_a_step(
    tmp_path: Path, engine: Literal["host", "device"], accumulated: int
):
    arguments = {"gradient_accumulation_steps": accumulated}
    short, long = 4, 8
    plain = [counted(tmp_path, steps, [], **arguments) for steps in (short, long)]
    assert plain[1] > plain[0]  # HF's own: its filter for NaN reads the loss of each micro-batch
    healed = [
        counted(tmp_path, steps, [HealingCallback(engine=engine)], **arguments)
        for steps in (short, long)
    ]
    assert healed[1] - healed[0] == plain[1] - plain[0]
    # And hardly any at the beginning and the end.
    assert healed[0] - plain[0] <= 2


class CountSteps(TrainerCallback):
    """Counts from the end of step 10 to the end of step 30."""

    def __init__(self) -> None:
        self.counter = CountSyncs()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 10:
            self.counter.__enter__()
        if state.global_step == 30:
            self.counter.__exit__(None, None, None)


def test_heal_adds_no_sync_to_a_step(tmp_path: Path):
    """With fused AdamW, Trainer's default, and the decision made on the device."""
    counts = []
    for healed in (False, True):
        trainer = tiny.plain(tmp_path, optim="adamw_torch_fused", logging_steps=3)
        steps = CountSteps()
        trainer.add_callback(steps)
        if healed:
            own: Any = heal(
                trainer, "fixed-clip", store=None, save_every=1000, attach={"engine": "device"}
            )
            own.train()
            (healing,) = own.healer.driver.healings.values()
            assert healing.report().engine == "device"
        else:
            trainer.train()
        counts.append(steps.counter.count)
    assert counts[0] > 0, "Trainer's own: its filter of NaN"
    assert counts[1] == counts[0]
