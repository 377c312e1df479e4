"""The names that trainers and trackers use for the signals.

Names in an earlier tier are preferred. Names are compared in lower case, with every sequence of
other characters as one "_": "train/loss" equals "train_loss".
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Mapping, Sequence

from healcore.console import first_of
from healcore.tools.traces.columns import EPOCH, JUDGED_SIGNALS, SIGNALS, STEP, TraceError

KNOWN_COLUMNS = (STEP, EPOCH, *SIGNALS)
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
        "xent cost trl",  # OpenNMT, Marian, llm.c
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
        "gnorm grdn "  # fairseq, LeRobot
        "grad_2_0_norm_total "  # Lightning's grad_norm()
        "optim_grad_norm",
        "train_gnorm",  # fairseq's mean of an epoch
    ),
    "eval_loss": (
        "eval_loss",
        "val_loss valid_loss validation_loss evaluation_loss dev_loss lm_loss_validation loss_eval "
        "loss_val loss_validation eval_avg_loss evaluation_avg_loss eval_ce_loss val_avg_loss "
        "validation_metrics_global_avg_loss",
        "val_loss_epoch val_loss_step tel",
    ),
}
"""Tiers of names by signal."""


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


def _tiers() -> dict[tuple[str, str], int]:
    """The tier of each name in `_NAMES`, by signal and name."""
    found: dict[tuple[str, str], int] = {}
    for signal, tiers in _NAMES.items():
        for tier, names in enumerate(tiers):
            for name in names.split():
                found[signal, name] = tier
    return found


_TIER = _tiers()


@functools.lru_cache(maxsize=4096)
def is_step(name: str) -> bool:
    """Whether a column name is a name of the step, or says so in its words, as "n_updates".

    Args:
        name: name of a column, tag or key, in any spelling. The same holds for the functions below.
    """
    key = normalize(name)
    return (STEP, key) in _TIER or _says_step(key)


_STEP_WORD = re.compile(r"(?:^|_)(?:step|iter|iteration|update)s?(?:_|$)")
_OTHER_WORD = re.compile(
    r"(?:^|_)(?:total|max|min|num|of|per|times?|secs?|seconds|ms|s|speed|size|skip|skipped|nan|inf|"
    r"accumulation|warmup|log|logging|save|eval|evaluation|val|valid|validation|test|avg|mean|loss|"
    r"norm|lr|rate|remaining|interval|every|ratio|epoch|ema|this|last|first|best)(?:_|$)"
)
"""Words of numbers that are no step, as "elapsed time per iteration"."""


def _says_step(key: str) -> bool:
    """Whether the words of a normalized name say that it is a step: "n_updates"."""
    if any(map(str.isdigit, key)):
        return False  # "iter 40/47" is a name with a number
    return bool(_STEP_WORD.search(key)) and not _OTHER_WORD.search(key)


@functools.lru_cache(maxsize=4096)
def is_loss(name: str) -> bool:
    """Whether a column name is a name of the training loss.

    Args:
        name: as for `is_step`. A loss of an evaluation is another signal, "eval_loss".
    """
    return ("loss", normalize(name)) in _TIER


@functools.lru_cache(maxsize=4096)
def is_judged(name: str) -> bool:
    """Whether a column name is a name of the training loss or of the gradient norm.

    Args:
        name: as for `is_step`. A row without a loss and a norm cannot be judged.
    """
    return any((signal, normalize(name)) in _TIER for signal in JUDGED_SIGNALS)


@functools.lru_cache(maxsize=4096)
def is_signal(name: str) -> bool:
    """Whether a column name is a name of a signal: a loss, a gradient norm, an evaluation loss.

    Args:
        name: as for `is_step`.
    """
    return any((signal, normalize(name)) in _TIER for signal in SIGNALS)


@functools.lru_cache(maxsize=4096)
def is_known(name: str) -> bool:
    """Whether a name is a name of the step, of the epoch or of a signal.

    Args:
        name: as for `is_step`. Columns with other names are not read.
    """
    return is_step(name) or any((signal, normalize(name)) in _TIER for signal in _NAMES)


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
    chosen = set(columns.values())
    free = [(normalize(name), name) for name in names if name not in chosen]
    for signal in KNOWN_COLUMNS:
        if signal in columns:
            _check_chosen(signal, columns[signal], names)
            found[signal] = columns[signal]
            continue
        name, note = _choose(signal, free)
        if name is not None:
            found[signal] = name
        if note:
            notes.append(note)
    if "loss" not in found and "grad_norm" not in found:
        candidates = [name for name in names if "loss" in normalize(name)]
        example = "NAME"
        if candidates:
            example = candidates[0]
        quoted = shlex.quote(f"loss={example}")
        raise TraceError(
            "no column or key has the name of a loss or a gradient norm, only "
            f"{quote_names(candidates or names)}. Name one: --column {quoted}"
        )
    return found, notes


def _check_chosen(signal: str, name: str, names: Sequence[str]) -> None:
    """Raises TraceError unless exactly one column has the name that the user chose."""
    if name not in names:
        raise TraceError(
            f"--column {signal}={name}: the log has no '{name}'; it has {quote_names(names)}"
        )
    if list(names).count(name) > 1:
        raise TraceError(f"two columns have the name '{name}': rename one of them")


def _choose(signal: str, names: Sequence[tuple[str, str]]) -> tuple[str | None, str]:
    """Chooses the name of a signal among normalized and original names.

    Returns the name, or None if no name is the signal's, and a note about names that are not used,
    or an empty string. Raises TraceError if two names match equally well.
    """
    tiers = _matches(signal, names)
    if not tiers:
        return None, ""
    first = min(tier for tier, _ in tiers)
    best = [name for tier, name in tiers if tier == first]
    # "step" is preferred to "_step", because it equals the name of the signal.
    exact = [name for name in best if name == signal]
    if len(best) > 1 and len(exact) != 1:
        message = (
            f"{quote_names(best)} may each be the {signal}: choose one, --column {signal}=NAME"
        )
        if signal in (STEP, *JUDGED_SIGNALS):
            raise TraceError(message)
        return None, f"{message} ({signal} is not read)"
    chosen = best[0]
    if exact:
        chosen = exact[0]
    others = [name for _, name in sorted(tiers) if name != chosen]
    if not others:
        return chosen, ""
    return chosen, f"{signal} is read from '{chosen}', not from {quote_names(others)}"


def _matches(signal: str, names: Sequence[tuple[str, str]]) -> list[tuple[int, str]]:
    """Finds the names of a signal, each with its tier.

    `names` has normalized and original names. If no name is a known name of the step, the first
    name that says so in its words is the step.
    """
    matches: list[tuple[int, str]] = []
    for key, name in names:
        if (signal, key) in _TIER:
            matches.append((_TIER[signal, key], name))
    if matches or signal != STEP:
        return matches
    for key, name in names:
        if _says_step(key):
            return [(0, name)]
    return []


def quote_names(names: Sequence[str]) -> str:
    """Quotes the first dozen names for a message.

    Args:
        names: names of columns. A file may have thousands.

    Returns:
        A list such as "'loss', 'lr'", or "nothing" without names.
    """
    return first_of([f"'{name}'" for name in names], 12) or "nothing"
