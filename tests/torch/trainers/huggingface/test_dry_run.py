"""The dry run of `heal_trainer`: what it says, and that it changes nothing."""

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer

from healcore.torch import heal_trainer
from healcore.torch.trainers.huggingface.steps import loss_fn_of
from tests.healer.run_options import grouped
from tests.torch.trainers.huggingface import small_runs
from tests.torch.trainers.huggingface import tiny_trainers as tiny
from tests.torch.trainers.huggingface.small_runs import calling


def test_a_dry_run_says_what_the_policy_would_do(tmp_path: Path):
    trainer = tiny.plain(tmp_path, max_steps=3)
    with torch.no_grad():
        trainer.model.lm_head.weight[0, 0] = float("nan")
    found = heal_trainer(trainer).dry_run(steps=2)
    assert not found.finite
    assert all("NONFINITE_LOSS" in each for each in found.would)


def out_of_memory(*_: Any) -> Any:
    return torch.empty(1 << 50)


def no_labels(*_: Any) -> Any:
    return {}["labels"]


@pytest.mark.parametrize(
    ("failure", "error", "note"),
    [
        (out_of_memory, RuntimeError, "Memory ran out. "),
        (no_labels, KeyError, "columns"),
    ],
)
def test_an_error_in_a_dry_run_has_a_note_about_what_to_look_at(
    failure: Any, error: type[Exception], note: str, tmp_path: Path
):
    trainer = tiny.plain(tmp_path, max_steps=3)
    trainer.model.lm_head.register_forward_hook(failure)
    with pytest.raises(error) as raised:
        heal_trainer(trainer).dry_run(steps=1)
    assert note in raised.value.__notes__[-1]
    assert "policy only observes" not in "".join(raised.value.__notes__), "the policy heals"


OFTEN = {"save_every": 5, "rollback": {"probation": 10}}


def without_own_entries(trainer: Trainer) -> list[dict[str, Any]]:
    """The log of a trainer, without times and without the entries of healcore."""
    own = ("runtime", "per_second", "step_time", "heal/")
    log = []
    for row in trainer.state.log_history:
        log.append({key: value for key, value in row.items() if not any(x in key for x in own)})
    return log


def random_states() -> Any:
    """The states of the generators of Python, NumPy and torch."""
    numpy = pickle.dumps(np.random.get_state())  # noqa: NPY002
    return random.getstate(), numpy, torch.get_rng_state().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["summed", "sft", "dpo", "cpo", "grpo"])
def test_a_healthy_run_after_a_dry_run_is_bit_identical(kind: str, tmp_path: Path):
    arguments: dict[str, Any] = {"max_steps": 20}
    if kind in ("summed", "sft"):
        arguments |= {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 3}
    alone = getattr(tiny, kind)(tmp_path, **arguments)
    alone.train()

    # The healed run, before its first step.
    folder = tmp_path / "out"
    called: list[Any] = []
    trainer = getattr(tiny, kind)(folder, **arguments, save_strategy="steps", save_steps=1)
    for event in ("on_step_end", "on_train_begin"):
        trainer.add_callback(calling(event, lambda state, **_: called.append(state)))
    healed: Any = heal_trainer(trainer, store=tmp_path / "store", clip=None, **grouped(OFTEN))

    def facts() -> Any:
        return random_states(), repr(trainer.state), trainer.args.to_json_string()

    # The dry run changes nothing.
    weights = small_runs.weights(trainer)
    before = facts()
    found = healed.dry_run(steps=2)
    assert torch.equal(weights, small_runs.weights(trainer))
    assert facts() == before
    assert trainer.optimizer is None
    assert not called
    assert not folder.exists() or not list(folder.rglob("*"))
    assert len(found.losses) == len(found.grad_norms) == 2
    assert found.finite

    # The training after it has the bits and the log of the run without healcore.
    trainer.args.save_strategy = "no"
    healed.train()
    if kind not in ("summed", "cpo", "grpo"):
        assert found.losses[0] == pytest.approx(small_runs.logged(trainer, "loss")[0], rel=1e-4)
    assert torch.equal(small_runs.weights(trainer), small_runs.weights(alone))
    assert trainer.state.epoch == alone.state.epoch
    assert trainer.state.global_step == alone.state.global_step == healed.healer.step
    assert without_own_entries(trainer) == without_own_entries(alone)
    if kind == "summed":
        loss_fn_of(trainer)(next(iter(trainer.get_train_dataloader())))  # type: ignore[misc]
        assert trainer.calls == alone.calls
