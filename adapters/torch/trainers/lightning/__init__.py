"""Heals Lightning's `trainer.fit` with a callback.

callback   the entry point `LightningHealingCallback`
fit        passes the Healer's batches to the loop, and restores the loop's counters
step_loss  the loss of a batch by `training_step`, to compare weights

The private names of Lightning that healcore uses. A new version that renames one of them is
repaired in these files. All names were tried with lightning and pytorch-lightning 2.6.6. The lowest
version, lightning 2.5.0, has all of them except `_resuming_from_checkpoint`, which is set there
without effect.

name | owner | used for
---|---|---
`_select_data_fetcher` | module of the fit loop | the fit reads its batches through a `Feed`
`_data_fetcher` | fit loop | the fetcher of a fit that a search has begun
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
