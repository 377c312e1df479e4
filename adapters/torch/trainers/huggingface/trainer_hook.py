"""Replaces `Trainer.add_callback`, so that a `HealingCallback` knows its Trainer before `train()`.

The Trainer has no event for this moment, nor for an exception of `train()`. `callback` calls
`wrap_train_when_added` once, when it is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

from transformers import Trainer, TrainerCallback

from healcore.console import counted, info, warning
from healcore.torch.trainers.huggingface import checkpoints
from healcore.torch.trainers.huggingface import trainer_internals as internals
from healcore.torch.trainers.huggingface.counters import found_batch_size
from healcore.torch.trainers.huggingface.trainer_internals import HfTrainer
from healcore.torch.trainers.patching import patched
from healcore.torch.trainers.stored_run import newest_settings, newest_step

HealingCallback: TypeAlias = Any
"""A callback of `callback.py`, which imports this module."""


def wrap_train_when_added(kind: type[TrainerCallback]) -> None:
    """Makes `Trainer.add_callback` pass the Trainer to healing callbacks, and wrap `train()`.

    `Trainer.__init__` calls `add_callback` too, for its printer or progress bar, when it already
    has the callbacks of its argument `callbacks`. So this replaced method sees the callbacks of
    both ways. A callback otherwise learns that it was added only in `train()`, when the Trainer has
    loaded its own checkpoint. Or it has raised because it has no checkpoint, although the store has
    the run. Trainers without a `HealingCallback` behave as before.

    Args:
        kind: the class `HealingCallback`.
    """
    original = Trainer.add_callback

    @functools.wraps(original)
    def add_callback(trainer: Trainer, callback: Any) -> None:
        original(trainer, callback)
        if _healing_callbacks(trainer, kind):
            _pass_trainer(trainer, kind)
            _wrap_train(trainer, kind)

    Trainer.add_callback = add_callback  # pyright: ignore[reportAttributeAccessIssue]


def _wrap_train(trainer: HfTrainer, kind: type[TrainerCallback]) -> None:
    """Makes `train()` resume from the right checkpoint, and end the Healer if it raises.

    The Trainer has no event for these moments. `restore_callback_states_from_checkpoint` replaces
    the callback's object within `train()`, and two Trainers may share a callback. So the callbacks
    receive their Trainer again just before `on_train_begin`.
    """
    original = trainer.train
    if getattr(original, "_is_healed", False):
        return

    @functools.wraps(original)
    def train(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        own = _healing_callbacks(trainer, kind)
        resume = _checkpoint_to_resume_from(trainer, own, resume_from_checkpoint)
        if resume is not None or args:
            args = resume, *args  # an override of `train` may take no argument
        _set_found_batch_size(trainer, own)
        handler = trainer.callback_handler
        begin = functools.partial(_begin_training, trainer, kind, handler.on_train_begin)
        try:
            with patched(handler, "on_train_begin", begin):
                return original(*args, **kwargs)
        except BaseException as error:
            for callback in own:
                callback.close(error)
            raise

    train._is_healed = True  # type: ignore[attr-defined]
    trainer.train = train


def _checkpoint_to_resume_from(
    trainer: HfTrainer, callbacks: list[HealingCallback], requested: Any
) -> Any:
    """The Trainer's own checkpoint for `train()`, or None if a store continues the run.

    A store that holds the run has precedence, because scripts pass the Trainer's newest checkpoint.

    Args:
        trainer: the Trainer.
        callbacks: its healing callbacks.
        requested: argument `resume_from_checkpoint` of `train()`.
    """
    if not requested:
        return requested
    for callback in callbacks:
        step = newest_step(callback.resolved_store(trainer))
        if step is not None:
            line = (
                f"resume_from_checkpoint={requested!r} is ignored, because the store continues the "
                f"run, from its checkpoint of step {step}"
            )
            folder = checkpoints.output_folder(trainer)
            of_trainer = checkpoints.step_of(requested, folder) or 0
            if of_trainer > step:
                steps = counted(of_trainer - step, "step")
                warning(
                    f"{line}: {steps} up to the Trainer's checkpoint of step {of_trainer} are "
                    "trained again. checkpoints=healcore.Checkpoints(every=...) saves more often"
                )
            else:
                info(line)
            return None
    return checkpoints.to_resume_from(requested, checkpoints.output_folder(trainer))


def _set_found_batch_size(trainer: HfTrainer, callbacks: list[HealingCallback]) -> None:
    """Sets the batch size that `auto_find_batch_size` has found before a restart.

    Another size has other batches, so the position in the data would not fit.
    """
    for callback in callbacks:
        settings = newest_settings(callback.resolved_store(trainer))
        found = found_batch_size(settings, trainer.args)
        if found is not None:
            internals.set_train_batch_size(trainer, found)


def _begin_training(
    trainer: HfTrainer,
    kind: type[TrainerCallback],
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces `CallbackHandler.on_train_begin` during `train()`."""
    _pass_trainer(trainer, kind)
    return original(*args, **kwargs)


def _pass_trainer(trainer: HfTrainer, kind: type[TrainerCallback]) -> None:
    """Gives each healing callback its Trainer.

    The events of transformers pass the arguments, the state and the model, but not the Trainer.
    """
    for callback in _healing_callbacks(trainer, kind):
        callback.added_to = trainer


def _healing_callbacks(trainer: HfTrainer, kind: type[TrainerCallback]) -> list[HealingCallback]:
    """The callbacks of a Trainer that heal it."""
    callbacks = trainer.callback_handler.callbacks
    return [each for each in callbacks if isinstance(each, kind)]
