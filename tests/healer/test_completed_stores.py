"""A store that holds a completed run does not give its weights to another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from healcore.errors import AlreadyCompleted, StoreNotEmpty
from tests.healer.run_directory import new_process
from tests.healer.training_loops import Faults, loop_of, rules, train

RULES = rules()


def healer(framework: str) -> Any:
    def run(folder: Path, seed: int) -> Any:
        loop = loop_of(framework, Faults(), RULES)
        if framework == "torch":
            torch.manual_seed(seed)
            for each in loop.model.parameters():
                torch.nn.init.normal_(each)
        else:
            params = {name: each + seed for name, each in loop.state["params"].items()}
            loop.state = {**loop.state, "params": params}
        train(loop, RULES, range(12), store=folder)

    return run


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_completed_store_is_of_one_run(framework: str, tmp_path: Path):
    run = healer(framework)
    run(tmp_path, 0)
    for seed in (1, 0):  # a fold, and the same run again
        with pytest.raises(StoreNotEmpty, match=r"this process has completed.*runs/{fold}"):
            run(tmp_path, seed)
    new_process()
    with pytest.raises(StoreNotEmpty, match="began with other weights than this program"):
        run(tmp_path, 1)
    with pytest.raises(AlreadyCompleted):
        run(tmp_path, 0)
