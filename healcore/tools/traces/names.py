"""Which column is the loss: the names that trainers and trackers give to what we read.

The lists are tiers: a name of an earlier tier is taken before one of a later. Names are compared in
lower case, with every run of other characters as one "_": "train/loss" is "train_loss".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from healcore.tools.traces.trace import SIGNALS, TraceError

STEP = "step"

TIERS: dict[str, tuple[tuple[str, ...], ...]] = {
    STEP: (
        ("step",),
        ("global_step", "train_global_step", "trainer_global_step"),
        (
            *("iteration", "iter", "iteration_num", "iterations", "steps", "num_updates", "update"),
            *("optimizer_step", "train_step", "training_step", "train_iter", "time_batch"),
        ),
    ),
    "loss": (
        ("loss",),
        (
            *("train_loss", "training_loss", "loss_train", "loss_training"),
            *("lm_loss", "train_lm_loss", "lm_loss_training"),  # Megatron, GPT-NeoX
            *("reduced_train_loss", "train_reduced_train_loss"),  # NeMo
            "loss_metrics_global_avg_loss",  # torchtitan
            "train_ce_loss",  # OLMo
            "loss_train_total",  # Composer, LLM Foundry
            "learning_loss",  # MaxText
            "train_samples_train_loss",  # DeepSpeed
            "train_inner_loss",  # fairseq
            *("train_total_loss", "total_loss", "train_loss_total"),
            *("ce_loss", "cross_entropy_loss", "train_cross_entropy_loss", "nll_loss"),
            *("avg_loss", "train_avg_loss", "mean_loss", "batch_loss"),
        ),
        ("train_loss_step", "loss_step"),  # Lightning writes them beside the epoch's mean
    ),
    "grad_norm": (
        # Before clipping, where the log tells it from after.
        ("raw_grad_norm", "learning_raw_grad_norm", "grad_norm_before_clip", "unclipped_grad_norm"),
        ("grad_norm",),
        (
            *("train_grad_norm", "training_grad_norm", "global_grad_norm", "total_grad_norm"),
            *("gradient_norm", "train_gradient_norm", "global_gradient_norm", "gradnorm"),
            *("grad_global_norm", "gradient_global_norm", "train_global_grad_norm"),
            *("grad_norm_total", "grad_norm_global", "grad_l2_norm", "l2_grad_norm"),
            "optim_total_grad_norm",  # OLMo
            *("norm_grad", "grad_total_norm", "train_grad_total_norm"),
            "train_grad_norm_total",
            "learning_grad_norm",  # MaxText
            "l2_norm_grad_global",  # Composer
            *("gnorm", "train_gnorm"),  # fairseq
            "grad_2_0_norm_total",  # Lightning's grad_norm()
            "optim_grad_norm",
        ),
    ),
    "update_norm": (
        ("update_norm",),
        ("updates_norm", "train_update_norm", "global_update_norm", "optim_update_norm"),
    ),
    "eval_loss": (
        ("eval_loss",),
        (
            *("val_loss", "valid_loss", "validation_loss", "evaluation_loss", "dev_loss"),
            *("lm_loss_validation", "loss_eval", "loss_val", "loss_validation"),
            *("eval_avg_loss", "evaluation_avg_loss", "eval_ce_loss", "val_avg_loss"),
            "validation_metrics_global_avg_loss",
        ),
        ("val_loss_epoch", "val_loss_step"),
    ),
    "lr": (
        ("lr", "learning_rate"),
        ("train_lr", "train_learning_rate", "optim_lr", "optim_learning_rate"),
        ("learning_current_learning_rate", "lr_group_0", "optim_lr_group_0", "lr_group0"),
    ),
}

MUST_BE_CLEAR = (STEP, "loss", "grad_norm")


def plain(name: str) -> str:
    """A name as the tiers have it."""
    flat = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return flat.removeprefix("metrics_")


_PLACE = {
    (signal, name): tier
    for signal, tiers in TIERS.items()
    for tier, names in enumerate(tiers)
    for name in names
}


def resolve(
    names: Sequence[str], columns: Mapping[str, str], extras: Sequence[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """Which of a file's names are the step and the signals.

    Args:
        names: of the columns, tags or keys.
        columns: what the user said: signal (or "step") -> name.
        extras: names that are read as they are called, besides the signals.

    Returns:
        Signal (or "step") -> name, and remarks about names that were left aside.

    Raises:
        TraceError: a name of `columns` is absent, two names fit alike, or nothing fits.
    """
    found: dict[str, str] = {}
    notes: list[str] = []
    for signal in (STEP, *SIGNALS):
        if signal in columns:
            found[signal] = _asked(signal, columns[signal], names)
            continue
        taken = set(columns.values())
        fits = [(_PLACE.get((signal, plain(name))), name) for name in names if name not in taken]
        ranked = sorted((tier, at) for at, (tier, _) in enumerate(fits) if tier is not None)
        if not ranked:
            continue
        best = [fits[at][1] for tier, at in ranked if tier == ranked[0][0]]
        rest = [fits[at][1] for tier, at in ranked if tier != ranked[0][0]]
        # "step" beside "_step", written just like the name that we use, is meant.
        exact = [name for name in best if name == signal]
        if len(best) > 1 and len(exact) != 1:
            both = f"{listed(best)} may each be the {signal}: say which, --column {signal}=NAME"
            if signal in MUST_BE_CLEAR:
                raise TraceError(both)
            notes.append(f"{both} (it is not read)")
            continue
        found[signal] = exact[0] if exact else best[0]
        others = rest + [name for name in best if name != found[signal]]
        if others:
            notes.append(f"{signal} is read from '{found[signal]}', not from {listed(others)}")
    for name in extras:
        if name in names:
            found.setdefault(name, name)
    if "loss" not in found and "grad_norm" not in found:
        raise TraceError(
            f"nothing in it is called like a loss or a gradient norm. It has {listed(names)}. "
            "Say which one it is: --column loss=NAME"
        )
    return found, notes


def check_columns(columns: Mapping[str, str]) -> None:
    """Refuses what no file could satisfy.

    Raises:
        TraceError: a key that is not a signal.
    """
    for signal in columns:
        if signal not in (STEP, *SIGNALS):
            raise TraceError(
                f"--column {signal}=...: there is no signal '{signal}'. It is one of "
                f"{', '.join((STEP, *SIGNALS))}"
            )


def listed(names: Sequence[str]) -> str:
    """Names for a message, the first dozen."""
    if not names:
        return "nothing"
    told = ", ".join(f"'{name}'" for name in names[:12])
    return told if len(names) <= 12 else f"{told} and {len(names) - 12} more"


def _asked(signal: str, name: str, names: Sequence[str]) -> str:
    if name not in names:
        raise TraceError(
            f"there is no '{name}' for --column {signal}={name}: it has {listed(names)}"
        )
    if list(names).count(name) > 1:
        raise TraceError(f"two columns are called '{name}': rename one of them")
    return name
