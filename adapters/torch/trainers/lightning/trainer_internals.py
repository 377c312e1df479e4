"""Every private name of Lightning that healcore uses, and nothing else.

The rest of this folder uses public names only, except that Lightning sets the profiler's functions
on `Feed`. A new version of Lightning that renames one of these is repaired here. All names were
tried with lightning and pytorch-lightning 2.6.6. The lowest version, lightning 2.5.0, has all of
them except `_resuming_from_checkpoint`, which is set there without effect.

name | owner | used for
---|---|---
`_select_data_fetcher` | module of the fit loop | the fit reads its batches through a `Feed`
`_data_fetcher` | fit loop | the fetcher of a fit that a search has begun
`_start_profiler`, `_stop_profiler` | data fetcher | set by Lightning, called around a batch
`_DataLoaderIterDataFetcher` | class | a `training_step` that reads the data itself, by its name
`_combined_loader` | fit loop | the train dataloaders, and their batch sizes
`_SUPPORTED_MODES`, `_mode`, `_iterator` | combined loader | its length, without reading a batch
`_should_reload_train_dl` | fit loop | whether dataloaders are made again in this epoch
`_resuming_from_checkpoint` | fit loop | no second `iter` of the dataloader after a resume
`_batches_that_stepped` | epoch loop | the step number of loggers, restored by a rollback
`_build_kwargs` | epoch loop | the arguments of `training_step`
`_on_before_batch_transfer` | module | the batch hooks before `training_step`
`_current_fx_name` | module | whether LearningRateFinder or BatchSizeFinder trains now
`_hparams` | module | an attribute that Lightning owns, and `training_step` does not change
`_loggers` | Trainer | silent loggers while a loss is computed again
`_checkpoint_connector`, `_restore_modules_and_callbacks` | Trainer | loads Lightning's checkpoint
`_logger_connector` | Trainer | `should_update_logs`: whether this step is logged
`_signal_connector` | Trainer | `received_sigterm`, put off to the end of an accumulation
`_initialized`, `_swa_scheduler` | StochasticWeightAveraging | its schedule, restored by a rollback
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from healcore.torch.trainers.hook import patched

LightningTrainer: TypeAlias = Any
"""A Lightning `Trainer`, from `lightning` or from `pytorch_lightning`."""
FitLoop: TypeAlias = Any
"""`trainer.fit_loop`, with the loop of an epoch as `epoch_loop`."""
CombinedLoader: TypeAlias = Any
"""Lightning's loader of all train dataloaders, which are `flattened` in it."""
Fetcher: TypeAlias = Any
"""Iterates over the batches of a fit, as (batch, index of the batch, index of the dataloader)."""
Batch: TypeAlias = Any
"""A batch as a dataloader yields it."""


HPARAMS = "_hparams"
"""Attribute of a module after `save_hyperparameters()`."""


# -- the data -------------------------------------------------------------------------------------


def replaced_fetcher_choice(
    trainer: LightningTrainer, choose: Callable[[Any, Fetcher], Fetcher]
) -> AbstractContextManager[None]:
    """Replaces the function that makes the data fetcher of a fit, until the block ends.

    Lightning calls the function when a fit begins, and whenever it makes its dataloaders again. It
    is a function of a module, so that other Trainers of the process call the replacement too.

    Args:
        trainer: the Trainer, whose fit loop is in that module.
        choose: takes the Trainer that asks and the fetcher that Lightning would use, and returns
            the fetcher to use.
    """
    module = sys.modules[trainer.fit_loop.setup_data.__module__]
    select = module._select_data_fetcher

    def selected(owner: Any, *args: Any) -> Fetcher:
        return choose(owner, select(owner, *args))

    return patched(module, "_select_data_fetcher", selected)


def fetcher_of(fit: FitLoop) -> Fetcher:
    """The data fetcher of a fit, or None before Lightning has made it."""
    return fit._data_fetcher


def set_fetcher(fit: FitLoop, fetcher: Fetcher) -> None:
    """Sets the data fetcher of a fit that has begun, after a search has made another fetcher.

    Args:
        fit: the fit loop, which asks the fetcher for its batches from now on.
        fetcher: the fetcher, which has to be set up with `combined_loader_of(fit)`.
    """
    fit._data_fetcher = fetcher


def reads_data_itself(fetcher: Fetcher) -> bool:
    """Whether `training_step` receives an iterator over the data instead of a batch.

    Such a step reads as many batches as it likes. The Healer cannot know which batches belong to a
    step.
    """
    return any(kind.__name__ == "_DataLoaderIterDataFetcher" for kind in type(fetcher).__mro__)


def is_searching(trainer: LightningTrainer) -> bool:
    """Whether LearningRateFinder or BatchSizeFinder trains, which they do in `on_fit_start`.

    Such a search restores the weights at its end by itself, and is not healed.
    """
    return trainer.lightning_module._current_fx_name == "on_fit_start"


def combined_loader_of(fit: FitLoop) -> CombinedLoader:
    """Lightning's loader of all train dataloaders, or None before the dataloaders are set up."""
    return fit._combined_loader


def make_length_known(combined_loader: CombinedLoader) -> None:
    """Gives a combined loader its iterator, without which it raises when asked for its length.

    Lightning asks for the length after the fetcher is set up. The new iterator does not begin, so
    that no dataloader starts its workers or draws random numbers.
    """
    modes = sys.modules[type(combined_loader).__module__]._SUPPORTED_MODES
    iterator = modes[combined_loader._mode]["iterator"]
    combined_loader._iterator = iterator(combined_loader.flattened, combined_loader.limits)


def reloads_dataloaders_now(fit: FitLoop) -> bool:
    """Whether `reload_dataloaders_every_n_epochs` asks for new dataloaders in this epoch."""
    return fit._should_reload_train_dl


def mark_resumed(fit: FitLoop) -> None:
    """Says that the fit resumes within an epoch, so that Lightning begins no iterator of its own.

    Lightning would call `iter` on the dataloader once more, which draws a random seed.
    """
    fit._resuming_from_checkpoint = True


# -- steps, logs and signals ----------------------------------------------------------------------


def logged_step(fit: FitLoop) -> int:
    """The step number of Lightning's loggers: number of batches after which an optimizer stepped.

    With several optimizers it differs from `trainer.global_step`, which counts each optimizer.
    """
    return fit.epoch_loop._batches_that_stepped


def set_logged_step(fit: FitLoop, step: int) -> None:
    """Sets the step number of Lightning's loggers, which a rollback lowers.

    Args:
        fit: the fit loop.
        step: an earlier value of `logged_step`.
    """
    fit.epoch_loop._batches_that_stepped = step


def logs_this_step(trainer: LightningTrainer) -> bool:
    """Whether `log_every_n_steps` asks for a row of the loggers at this step."""
    return trainer._logger_connector.should_update_logs


def put_off_sigterm(trainer: LightningTrainer) -> None:
    """Makes Lightning forget a SIGTERM, which the Healer remembers and obeys after the step.

    Lightning would end the training after this micro-batch, where the state cannot be saved.
    """
    trainer._signal_connector.received_sigterm = False


def replaced_restore(
    trainer: LightningTrainer, restore: Callable[..., None]
) -> AbstractContextManager[None]:
    """Replaces the method that restores Lightning's own checkpoint, until the block ends.

    Lightning's searches of a rate or a batch size do not call this method.

    Args:
        trainer: the Trainer.
        restore: called with Lightning's own method, then with the arguments of the call: the path
            of a checkpoint, or None for no checkpoint.
    """
    connector = trainer._checkpoint_connector
    original = connector._restore_modules_and_callbacks

    def replaced(checkpoint_path: Any = None, *args: Any, **options: Any) -> None:
        restore(original, checkpoint_path, *args, **options)

    return patched(connector, "_restore_modules_and_callbacks", replaced)


# -- a loss by `training_step` --------------------------------------------------------------------


def replaced_loggers(trainer: LightningTrainer, loggers: list[Any]) -> AbstractContextManager[None]:
    """Replaces the loggers of a Trainer until the block ends.

    The public setter would set up the new loggers.

    Args:
        trainer: the Trainer.
        loggers: the loggers that `self.logger` and `self.log` see within the block.
    """
    return patched(trainer, "_loggers", loggers)


def training_step(trainer: LightningTrainer, batch: Batch) -> Any:
    """Calls `training_step` as Lightning does: precision, batch hooks, device, strategy.

    Args:
        trainer: the Trainer, within a fit.
        batch: the batch as Lightning's data fetcher passes it.

    Returns:
        The result of `training_step`: a loss, a dictionary with the key "loss", or None.
    """
    module = trainer.lightning_module
    loop = trainer.fit_loop.epoch_loop
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
    arguments = loop._build_kwargs(OrderedDict(), batch, max(loop.batch_idx, 0))
    return trainer.strategy.training_step(*arguments.values())


# -- StochasticWeightAveraging --------------------------------------------------------------------


def restore_averaging_schedule(callback: Any, state: Mapping[str, Any]) -> bool:
    """Restores the schedule of StochasticWeightAveraging within a fit.

    The callback's own `load_state_dict` is for a new fit, and keeps the state for later.

    Args:
        callback: any callback, after its `load_state_dict`.
        state: the state that was loaded.

    Returns:
        True if the callback has replaced the schedulers of the fit since this state was saved: the
        earlier schedulers have to be restored.
    """
    if "scheduler_state" not in state or not callback._initialized:
        return False
    if state["scheduler_state"] is not None:
        callback.n_averaged.fill_(state["n_averaged"])
        callback._swa_scheduler.load_state_dict(state["scheduler_state"])
        return False
    callback._initialized = False
    callback._swa_scheduler = None
    callback.n_averaged = None
    return True
