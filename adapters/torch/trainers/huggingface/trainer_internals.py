"""Every private name of transformers, TRL and accelerate that healcore uses, and nothing else.

The rest of this folder uses public names only. A new version of transformers that renames one of
these is repaired here. All names were tried with transformers 5.23, TRL 1.16 and accelerate 1.15;
for a name that the lowest version, transformers 5.3, lacks, the table says what happens there.

name | owner | used for
---|---|---
`_run_epoch` | Trainer | a rollback leaves the epoch, and runs the rest of the restored epoch
`_prepare_inputs` | Trainer | moves a batch to the device; overridden where batches are generated
`_get_num_items_in_batch` | Trainer | what a loss is divided by (tokens of all micro-batches)
`_train_batch_size` | Trainer | the batch size that `auto_find_batch_size` has found
`_tr_loss`, `_total_loss_scalar`, `_globalstep_last_logged` | Trainer | sums for the log
`_initial_num_input_tokens_seen` | Trainer | number of tokens before this `train()`
`_initial_global_step` | Trainer | first step of this `train()`; set without effect in 5.3
`_mixed_mesh_grad_norm` | Trainer | clips on several device meshes; not replaced in 5.3
`_loss_shifts_labels` | Trainer | whether the loss shifts labels; taken as True in 5.3
`_created_lr_scheduler`, `_memory_tracker` | Trainer | reset in the copy of a dry run
`_step`, `_total_train_tokens` | TRL's GRPO and RLOO, SFT and DPO | counts, restored by a rollback
`_metrics`, `_stored_metrics` | TRL | metrics since the last log, by mode and name
`_buffered_inputs` | TRL's GRPO and RLOO | completions that earlier weights have generated
`_models`, `_optimizers`, `_schedulers`, `_dataloaders`, `_custom_objects` | Accelerator | what was
prepared; emptied in the copy of a dry run
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from torch import Tensor
from transformers import Trainer

from healcore.torch.trainers.patching import patched

HfTrainer: TypeAlias = Any
"""A `transformers.Trainer`, or a trainer of TRL with attributes of its own."""
Batch: TypeAlias = Any
"""A batch as the Trainer's dataloader yields it, usually a dictionary of tensors."""
Metrics: TypeAlias = dict[str, dict[str, list[Any]]]
"""Mode ("train" or "eval") -> name of a metric -> an entry for each micro-batch since the log."""

_LOGGING = ("_total_loss_scalar", "_globalstep_last_logged")
_COUNTERS = ("current_flos", "_step", "_total_train_tokens")
_METRICS = ("_metrics", "_stored_metrics")
_PREPARED = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects")


# -- the epoch and the batches --------------------------------------------------------------------


def replaced_epoch(
    trainer: HfTrainer, run_epoch: Callable[..., None]
) -> AbstractContextManager[None]:
    """Replaces the method that runs one epoch, until the block ends.

    Args:
        trainer: the Trainer.
        run_epoch: called with the Trainer's own method, then with the keyword arguments of the
            call (`epoch`, `train_dataloader`, `steps_in_epoch`, ...).
    """
    return patched(trainer, "_run_epoch", functools.partial(run_epoch, trainer._run_epoch))


def train_batch_size(trainer: HfTrainer) -> int:
    """Number of samples in a batch of this process, for all its GPUs together.

    `auto_find_batch_size` lowers it after memory ran out, and the arguments then still have the
    first value.
    """
    return trainer._train_batch_size


def set_train_batch_size(trainer: HfTrainer, size: int) -> None:
    """Sets the batch size with which the Trainer makes its dataloader.

    Without this call, a restart would begin the search of `auto_find_batch_size` again. Another
    size has other batches, in which the saved position has no meaning.

    Args:
        trainer: the Trainer, before `train()`.
        size: samples of a batch, for all GPUs of this process.
    """
    trainer._train_batch_size = size


def generates_batches(trainer: HfTrainer) -> bool:
    """Whether the trainer makes its training data with the model that it trains (GRPO, RLOO).

    The losses of such batches do not measure the model, and a batch is not split by slicing.
    """
    return type(trainer)._prepare_inputs is not Trainer._prepare_inputs


def prepared_inputs(trainer: HfTrainer, batch: Batch) -> Batch:
    """A batch on the device of the model, as `compute_loss` receives it."""
    return trainer._prepare_inputs(batch)


def items_in_batch(trainer: HfTrainer, inputs: Batch) -> Any:
    """Number of items (tokens with a label) that the loss of a batch is divided by.

    Args:
        trainer: the Trainer.
        inputs: a result of `prepared_inputs`.

    Returns:
        A number or a tensor of one element on the device, or None if the loss is a mean.
    """
    return trainer._get_num_items_in_batch([inputs], trainer.args.device)


def shifts_labels(trainer: HfTrainer) -> bool:
    """Whether the loss compares the output at a token with the label of the next token.

    The first token of each sequence has no prediction then, and does not count in the loss. True
    for a Trainer that does not say.
    """
    return getattr(trainer, "_loss_shifts_labels", True)


def clipping_functions(trainer: HfTrainer) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yields the functions by which the Trainer clips gradients.

    The Trainer clips parameters on several device meshes by a function of its own.

    Yields:
        The owner of the function, its name, and the function, which takes the parameters and the
        max norm and returns the norm.
    """
    for owner, name in (trainer.accelerator, "clip_grad_norm_"), (trainer, "_mixed_mesh_grad_norm"):
        function = getattr(owner, name, None)
        if function is not None:
            yield owner, name, function


# -- counts and sums ------------------------------------------------------------------------------


def loss_sum(trainer: HfTrainer) -> Tensor:
    """The sum of the losses since the last log: a float32 scalar on the device, changed in place.

    The Trainer adds to this tensor after each micro-batch, so that no step waits for the device.
    """
    return trainer._tr_loss


def reset_sums(trainer: HfTrainer) -> None:
    """Begins the Trainer's sums again, without the steps before a restart.

    The Trainer logs means over the steps of this `train()`. It counts from its own checkpoint, and
    would divide by steps that another process has taken.
    """
    state = trainer.state
    trainer._tr_loss.zero_()
    trainer._total_loss_scalar = 0.0
    trainer._initial_global_step = state.global_step
    trainer._globalstep_last_logged = state.global_step
    trainer._initial_num_input_tokens_seen = state.num_input_tokens_seen


def logging_sums(trainer: HfTrainer) -> dict[str, Any]:
    """The sums and counts from which the Trainer makes its log, by attribute."""
    return {name: getattr(trainer, name) for name in _LOGGING}


def counters(trainer: HfTrainer) -> dict[str, Any]:
    """The counts that a step changes, by attribute.

    A trainer has only some of them. A rollback sets them back with `setattr`.
    """
    return {name: getattr(trainer, name) for name in _COUNTERS if hasattr(trainer, name)}


def metrics(trainer: HfTrainer) -> list[Metrics]:
    """TRL's metrics since the last log, one dictionary for each attribute that the trainer has.

    Those dictionaries are live: `compute_loss` appends an entry for each micro-batch, so a repeated
    micro-batch would count twice if the entries were not removed.
    """
    found = []
    for attribute in _METRICS:
        by_mode = getattr(trainer, attribute, None)
        if isinstance(by_mode, dict):
            found.append(by_mode)
    return found


def drop_generated_batches(trainer: HfTrainer) -> None:
    """Makes a trainer generate its next batch again, with the weights that were restored.

    Trainers such as GRPO generate batches for several steps at once. After a rollback, the rest
    would be from weights that are undone. Does nothing for other trainers.
    """
    if hasattr(trainer, "_buffered_inputs"):
        trainer._buffered_inputs = None


# -- the copy of a dry run ------------------------------------------------------------------------


def isolate_copy(copied: HfTrainer, trainer: HfTrainer) -> None:
    """Gives a copied Trainer, and its copied Accelerator, private state of their own.

    `copy.copy` shares every attribute. Without this call a dry run would leave its models and its
    metrics in the Trainer of the user.

    Args:
        copied: the copy, whose `accelerator` is a copy too.
        trainer: the original, which does not change.
    """
    for name in _PREPARED:
        setattr(copied.accelerator, name, [])
    copied._created_lr_scheduler = False
    copied._memory_tracker = copy.copy(trainer._memory_tracker)
    # TRL's trainers collect metrics between two logs in attributes of these types.
    for name, value in vars(trainer).items():
        if name.startswith("_") and isinstance(value, (dict, deque)):
            setattr(copied, name, copy.deepcopy(value))
