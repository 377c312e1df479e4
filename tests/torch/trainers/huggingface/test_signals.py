"""The loss and the gradient norm that a policy sees of a Trainer are those before HF's changes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from healcore.policy import load
from healcore.policy.trainer_limit import can_apply_limit, with_limit
from healcore.torch.trainers.huggingface import signals
from tests.torch.trainers.huggingface import small_runs


class Judged(TrainerCallback):
    """Records the norm that the optimizer's hooks see."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        grads = [p.grad.reshape(-1) for p in kwargs["model"].parameters()]
        self.norms.append(float(torch.linalg.vector_norm(torch.cat(grads))))


def test_hooks_see_the_norm_before_clipping_and_the_log_keeps_it(tmp_path: Path):
    spikes = {10: 100.0}
    clipped, plain = Judged(), Judged()
    usual = small_runs.trainer(tmp_path, scaled=spikes, callbacks=[clipped])
    usual.train()
    other = small_runs.trainer(tmp_path, scaled=spikes, callbacks=[plain])
    with signals.unclipped(other):
        other.train()
    assert max(clipped.norms) <= 1.001
    assert max(plain.norms) > 50
    assert plain.norms == pytest.approx(small_runs.logged(other, "grad_norm"), rel=1e-5)
    assert other.args.max_grad_norm == 1.0
    assert "clip_grad_norm_" not in vars(other.accelerator)


def test_a_limit_that_is_kept_after_the_hooks_gives_the_same_bits(tmp_path: Path):
    spikes = {10: 100.0, 20: 3.0}
    usual = small_runs.trainer(tmp_path, scaled=spikes)
    usual.train()
    other = small_runs.trainer(tmp_path, scaled=spikes)
    other.create_optimizer()
    with signals.unclipped(other), signals.clipped_after(other, other.optimizer, 1.0):
        other.train()
    assert torch.equal(small_runs.weights(usual), small_runs.weights(other))


@pytest.mark.parametrize("accumulated", [1, 4])
def test_the_loss_of_a_step_is_that_of_its_whole_batch(tmp_path: Path, accumulated: int):
    seen: list[float] = []
    usual = small_runs.trainer(tmp_path, steps=6, gradient_accumulation_steps=accumulated)
    with signals.observed_losses(usual, lambda loss: seen.append(float(loss))):
        usual.train()
    steps = [sum(seen[i : i + accumulated]) / accumulated for i in range(0, 24, accumulated)]
    # At one log per step HF's own loss is the true one, rounded.
    assert steps[:6] == pytest.approx(small_runs.logged(usual, "loss"), rel=1e-3)
    assert "training_step" not in vars(usual)


def test_a_token_mean_over_uneven_micro_batches_is_seen_as_such(tmp_path: Path):
    """With num_items_in_batch each micro-batch's loss is divided by the tokens of all of them."""

    class TokenMean(small_runs.Net):
        accepts_loss_kwargs = True

        def forward(self, x: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
            out = self.layers(x).squeeze(-1)
            kept = labels != -100
            total = ((out - labels)[kept] ** 2).sum()
            return {
                "loss": total / (kept.sum() if num_items_in_batch is None else num_items_in_batch)
            }

    run = small_runs.trainer(tmp_path, steps=1, gradient_accumulation_steps=4)
    run.model = run.model_wrapped = TokenMean()
    run.model_accepts_loss_kwargs = True
    run.train_dataset.y[2:9] = -100  # most of two micro-batches
    data = run.train_dataset
    kept = data.y != -100
    with torch.no_grad():
        true = nn.functional.mse_loss(run.model.layers(data.x).squeeze(-1)[kept], data.y[kept])
    seen: list[float] = []
    with signals.observed_losses(run, lambda loss: seen.append(float(loss))):
        run.train()
    assert sum(seen) / len(seen) == pytest.approx(float(true), rel=1e-5)
    assert len(seen) == 4


def test_a_loss_that_is_nan_is_seen_although_the_log_hides_it(tmp_path: Path):
    seen: list[float] = []
    run = small_runs.trainer(tmp_path, steps=6, scaled={3: math.nan})
    with signals.observed_losses(run, lambda loss: seen.append(float(loss))):
        run.train()
    assert math.isnan(seen[3])
    assert not any(math.isnan(loss) for loss in small_runs.logged(run, "loss"))


@pytest.mark.parametrize(
    ("policy", "overrides", "limit", "kept"),
    [
        ("default", {}, 1.0, 1.0),
        ("default", {"clip": {"max_norm": 0.3}}, 1.0, 0.3),  # never loosened
        ("zclip", {}, 0.3, 0.3),
        ("autoclip", {}, 0.5, 0.5),
        ("fixed-clip", {}, 0.3, 0.3),
    ],
)
def test_the_lower_limit_holds(policy: str, overrides: Any, limit: Any, kept: Any):
    found: Any = with_limit(load(policy, **overrides), limit)
    assert found.clip.max_norm == kept
    kind, config = found.config().clip
    assert (kind == "fixed") == (kept is not None and policy in ("default", "fixed-clip"))
    assert config.max_norm == (None if kept is None else np.float32(kept))


@pytest.mark.parametrize("policy", ["adagc", "observe"])
def test_a_policy_that_cannot_keep_a_limit_is_left_alone(policy: str):
    before = load(policy)
    assert not can_apply_limit(before)
    assert with_limit(before, 0.3) is before


def test_everything_is_put_back_when_training_raises(tmp_path: Path):
    stops = small_runs.calling("on_step_end", small_runs.raising(RuntimeError("stop")))
    run = small_runs.trainer(tmp_path, callbacks=[stops])
    with (
        pytest.raises(RuntimeError, match="stop"),
        signals.unclipped(run),
        signals.observed_losses(run, lambda loss: None),
    ):
        run.train()
    assert not {"training_step", "_mixed_mesh_grad_norm"} & set(vars(run))
    assert "clip_grad_norm_" not in vars(run.accelerator)


def test_a_wrapper_that_other_code_keeps_clips_again_afterwards(tmp_path: Path):
    """Another callback wraps the Trainer's clipping during the run, and never unwraps it."""
    made = small_runs.trainer(tmp_path)
    parameter = torch.nn.Parameter(torch.zeros(4))
    accelerator = made.accelerator

    def norm_left() -> float:
        parameter.grad = torch.full((4,), 5.0)
        accelerator.clip_grad_norm_([parameter], 1.0)
        return float(parameter.grad.norm())

    with signals.unclipped(made):
        ours = accelerator.clip_grad_norm_
        accelerator.clip_grad_norm_ = lambda *args: ours(*args)
        assert norm_left() == 10.0
    assert abs(norm_left() - 1.0) < 1e-4
