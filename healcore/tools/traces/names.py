"""The names that trainers and trackers use for the columns of a log.

Names in an earlier tier are preferred. Names are compared in lower case, with every sequence of
other characters as one "_": "train/loss" equals "train_loss".
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from healcore.console import first_of
from healcore.core.errors import HealcoreError

SIGNALS = ("loss", "grad_norm", "eval_loss")
"""Columns that are read from a log: signals of `healcore.core.signals`."""

STEP, EPOCH = "step", "epoch"

EPOCH_LENGTH = "epoch_length"
"""Number of batches in an epoch, where a log counts its steps within each epoch."""

JUDGED_SIGNALS = ("loss", "grad_norm")
"""A row can be judged if it has one of these signals. Only these signals show where a run was
resumed."""

KNOWN_COLUMNS = (STEP, EPOCH, *SIGNALS)


class TraceError(HealcoreError, ValueError):
    """A trace cannot be read. The message has the file, the rule and the remedy.

    For example, two columns may each be the loss, or no column has a known name. One unreadable
    file does not end a command: `open_traces` returns the reason together with the other traces.
    """


_NAMES = {
    STEP: (
        "step",
        "global_step train_global_step trainer_global_step",
        "iteration iter iteration_num iterations steps num_updates optimizer_step "
        "train_step training_step completed_step train_iter time_batch heal_step "
        "current_step current_steps cur_step global_steps train_steps training_steps "
        "global_step_max_steps",  # ms-swift, with the text "10/1000"
        "update up",  # Marian
        "wandb_step",  # the number of W&B's log calls
        "train_num_updates valid_num_updates",  # fairseq's means of an epoch
        "batch_idx batch_index",
    ),
    EPOCH: ("epoch",),
    "loss": (
        "loss",
        "train_loss training_loss loss_train loss_training "
        "lm_loss train_lm_loss lm_loss_training "  # Megatron, GPT-NeoX
        "reduced_train_loss train_reduced_train_loss "  # NeMo
        "loss_metrics_global_avg_loss "  # torchtitan
        "train_ce_loss train_crossentropyloss "  # OLMo
        "loss_train_total "  # Composer, LLM Foundry
        "learning_loss "  # MaxText
        "train_samples_train_loss "  # DeepSpeed
        "train_inner_loss "  # fairseq
        "train_total_loss total_loss train_loss_total ce_loss cross_entropy_loss "
        "train_cross_entropy_loss nll_loss avg_loss train_avg_loss mean_loss batch_loss",
        "train_loss_step loss_step",  # Lightning also writes the mean of the epoch
        "xent cost",  # OpenNMT, Marian
        "heal_loss",  # written by healcore, see docs/reports.md
    ),
    "grad_norm": (
        # Preferred, because these are norms before clipping.
        "raw_grad_norm learning_raw_grad_norm grad_norm_before_clip unclipped_grad_norm "
        "heal_grad_norm",
        "grad_norm",
        "train_grad_norm training_grad_norm global_grad_norm total_grad_norm gradient_norm "
        "train_gradient_norm global_gradient_norm gradnorm grad_global_norm gradient_global_norm "
        "train_global_grad_norm grad_norm_total grad_norm_global grad_l2_norm l2_grad_norm "
        "optim_total_grad_norm "  # OLMo
        "norm_grad grad_total_norm train_grad_total_norm train_grad_norm_total "
        "learning_grad_norm "  # MaxText
        "l2_norm_grad_global "  # Composer
        "gnorm "  # fairseq
        "grad_2_0_norm_total "  # Lightning's grad_norm()
        "optim_grad_norm",
        "train_gnorm",  # fairseq's mean of an epoch
    ),
    "eval_loss": (
        "eval_loss",
        "val_loss valid_loss validation_loss evaluation_loss dev_loss lm_loss_validation loss_eval "
        "loss_val loss_validation eval_avg_loss evaluation_avg_loss eval_ce_loss val_avg_loss "
        "validation_metrics_global_avg_loss",
        "val_loss_epoch val_loss_step",
    ),
}
"""Tiers of names by signal."""

_ROLES = {
    name: (signal, tier)
    for signal, tiers in _NAMES.items()
    for tier, names in enumerate(tiers)
    for name in names.split()
}
_STEP_WORD = re.compile(r"(?:^|_)(?:step|iter|iteration|update)s?(?:_|$)")
_OTHER_WORD = re.compile(
    r"(?:^|_)(?:total|max|min|num|of|per|times?|secs?|seconds|ms|s|speed|size|skip|skipped|nan|inf|"
    r"accumulation|warmup|log|logging|save|eval|evaluation|val|valid|validation|test|avg|mean|loss|"
    r"norm|lr|rate|remaining|interval|every|ratio|epoch|ema|this|last|first|best)(?:_|$)|\d"
)
"""Words of numbers that are no step, as "elapsed time per iteration"."""


@functools.lru_cache(maxsize=4096)
def normalize(name: str) -> str:
    """Converts a name to the form in the tiers.

    Args:
        name: name of a column, tag or key, such as "train/Loss".

    Returns:
        Lower-case words joined by "_", such as "train_loss". W&B's "_step" becomes "wandb_step",
        because it counts calls of `log` and is no step of the training.
    """
    if name == "_step":
        name = "wandb_step"
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_").removeprefix("metrics_")


@functools.lru_cache(maxsize=4096)
def role(name: str) -> tuple[str | None, int]:
    """Finds what a column is.

    Args:
        name: name of a column, tag or key, in any spelling.

    Returns:
        The signal, "step" or "epoch", and the tier of the name; the first is None for a column that
        is not read. A name that says in its words that it is a step, as "n_updates", has the last
        tier.
    """
    key = normalize(name)
    if key not in _ROLES and _STEP_WORD.search(key) and not _OTHER_WORD.search(key):
        return STEP, len(_NAMES[STEP])
    return _ROLES.get(key, (None, 0))


def has_role(names: Iterable[str], roles: Sequence[str]) -> bool:
    """Whether one of some names is the name of one of some roles.

    Args:
        names: names of columns, tags or keys.
        roles: signals, "step" or "epoch".
    """
    return any(role(name)[0] in roles for name in names)


def find_columns(
    names: Sequence[str], columns: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Finds the step and the signals among the names of columns, tags or keys in a file.

    Args:
        names: the names in the file, in its order.
        columns: the names that the user chose, by signal or "step". They are used even if healcore
            would prefer another name.

    Returns:
        The names by signal or "step", and notes about names that could be the signal and are not
        used.

    Raises:
        TraceError: a name in `columns` is absent, two names match equally well, or no name is the
            name of a loss or a gradient norm.
    """
    found: dict[str, str] = {}
    notes: list[str] = []
    free = [name for name in names if name not in columns.values()]
    for signal in KNOWN_COLUMNS:
        if signal in columns:
            chosen = columns[signal]
            if chosen not in names:
                raise TraceError(
                    f"--column {signal}={chosen}: the log has no '{chosen}'; it has "
                    f"{quote_names(names)}"
                )
            found[signal] = chosen
            continue
        ranked: dict[tuple[int, bool], list[str]] = {}
        for name in free:
            if role(name)[0] == signal:
                # Of one tier, the name that equals the signal is preferred.
                ranked.setdefault((role(name)[1], name != signal), []).append(name)
        if not ranked:
            continue
        first = min(ranked)
        best = ranked.pop(first)
        if len(best) > 1 and first[0] < len(_NAMES[signal]):
            message = (
                f"{quote_names(best)} may each be the {signal}: choose one, --column {signal}=NAME"
            )
            if signal in (STEP, *JUDGED_SIGNALS):
                raise TraceError(message)
            notes.append(f"{message} ({signal} is not read)")
            continue
        found[signal] = best[0]
        others = [name for _, tier in sorted(ranked.items()) for name in tier]
        if others:
            notes.append(f"{signal} is read from '{best[0]}', not from {quote_names(others)}")
    if found.keys().isdisjoint(JUDGED_SIGNALS):
        candidates = [name for name in names if "loss" in normalize(name)]
        quoted = shlex.quote(f"loss={[*candidates, 'NAME'][0]}")
        raise TraceError(
            "no column or key has the name of a loss or a gradient norm, only "
            f"{quote_names(candidates or names)}. Name one: --column {quoted}"
        )
    return found, notes


def quote_names(names: Sequence[str]) -> str:
    """Quotes the first dozen names for a message.

    Args:
        names: names of columns. A file may have thousands.

    Returns:
        A list such as "'loss', 'lr'", or "nothing" without names.
    """
    return first_of([f"'{name[:60]}'" for name in names], 12) or "nothing"
