"""`heal` adds no host sync to a healthy step of a Trainer under its default arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from healcore.torch import heal
from tests.torch.sync_counter import CountSyncs
from tests.torch.trainers.huggingface import tiny_trainers as tiny


class CountSteps(TrainerCallback):
    """Counts from the end of step 10 to the end of step 30."""

    def __init__(self) -> None:
        self.counter = CountSyncs()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 10:
            self.counter.__enter__()
        if state.global_step == 30:
            self.counter.__exit__(None, None, None)


def test_no_sync_is_added(tmp_path: Path):
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
