"""How often the host waits because of the callback or `heal`, under HF's default arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from healcore.torch import HealingCallback
from tests.torch.sync_counter import CountSyncs
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
        counted(tmp_path, steps, [HealingCallback(attach={"engine": engine})], **arguments)
        for steps in (short, long)
    ]
    assert healed[1] - healed[0] == plain[1] - plain[0]
    # And hardly any at the beginning and the end.
    assert healed[0] - plain[0] <= 2
