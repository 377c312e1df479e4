"""The names that trainers give to the signals."""

from __future__ import annotations

import pytest

from healcore.tools.traces import TraceError
from healcore.tools.traces.names import resolve

# trainer or tracker, its names, and what is read from which of them
TRAINERS = {
    "Hugging Face on TensorBoard": (
        ["train/loss", "train/grad_norm", "train/learning_rate", "train/epoch", "eval/loss"],
        {"loss": 0, "grad_norm": 1, "eval_loss": 4},
    ),
    "Megatron": (
        ["lm loss", "lm loss vs samples", "grad-norm", "grad-norm vs samples", "learning-rate"],
        {"loss": 0, "grad_norm": 2},
    ),
    "NeMo": (
        ["reduced_train_loss", "grad_norm", "lr", "global_step", "val_loss", "consumed_samples"],
        {"loss": 0, "grad_norm": 1, "step": 3, "eval_loss": 4},
    ),
    "torchtitan": (
        ["loss_metrics/global_avg_loss", "loss_metrics/global_max_loss", "grad_norm", "lr"],
        {"loss": 0, "grad_norm": 2},
    ),
    "Levanter": (
        ["train/loss", "grad/norm/total", "optim/learning_rate", "eval/loss", "global_step"],
        {"loss": 0, "grad_norm": 1, "eval_loss": 3, "step": 4},
    ),
    "MaxText": (
        ["learning/loss", "learning/grad_norm", "learning/raw_grad_norm", "evaluation/avg_loss"],
        {"loss": 0, "grad_norm": 2, "eval_loss": 3},
    ),
    "OLMo": (
        ["_step", "train/CE loss", "train/PPL", "optim/total grad norm", "optim/LR (group 0)"],
        {"step": 0, "loss": 1, "grad_norm": 3},
    ),
    "LLM Foundry": (
        ["loss/train/total", "l2_norm/grad/global", "lr-DecoupledAdamW/group0", "time/batch"],
        {"loss": 0, "grad_norm": 1, "step": 3},
    ),
    "fairseq": (["num_updates", "loss", "gnorm", "lr"], {"step": 0, "loss": 1, "grad_norm": 2}),
    "Lightning": (
        ["epoch", "step", "train_loss_step", "train_loss_epoch", "val_loss"],
        {"step": 1, "loss": 2, "eval_loss": 4},
    ),
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_names_of_trainers(trainer):
    names, places = TRAINERS[trainer]
    found, _ = resolve(names, {})
    assert found == {signal: names[place] for signal, place in places.items()}


def test_an_earlier_tier_wins_and_is_reported():
    found, notes = resolve(["step", "loss", "train_loss"], {})
    assert found["loss"] == "loss"
    assert notes == ["loss is read from 'loss', not from 'train_loss'"]


@pytest.mark.parametrize(
    ("names", "columns", "message"),
    [
        (["step", "a"], {}, "only 'step', 'a'. Name one: --column loss=NAME"),
        (["epoch", "train/box_loss", "train/cls_loss"], {}, "--column loss=train/box_loss"),
        (["train_loss", "train/loss"], {}, "may each be the loss"),
        (["loss", "iter", "iteration"], {}, "may each be the step"),
        (["loss"], {"loss": "x"}, "--column loss=x: the log has no 'x'; it has 'loss'"),
        (["a", "a"], {"loss": "a"}, "two columns have the name 'a': rename one"),
    ],
)
def test_refusals(names, columns, message):
    with pytest.raises(TraceError) as error:
        resolve(names, columns)
    assert message in str(error.value)
