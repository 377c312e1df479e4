"""Heals `transformers.Trainer` and its subclasses in TRL.

callback  the entry points `HealingCallback` and `heal_trainer`, and the dry run
loop      passes the Healer's batches to the epochs, and restores what the Trainer counts
steps     one step, in smaller parts if memory runs out; the loss with which weights are compared

The private names of transformers and TRL that healcore uses. A new version that renames one of them
is repaired in these files. All names were tried with transformers 5.23, TRL 1.16 and accelerate
1.15. The lowest version, transformers 5.3, has all of them except `_loss_shifts_labels`, which is
taken as True there, and `_initial_global_step`, which is set without effect.

name | owner | used for
---|---|---
`_run_epoch` | Trainer | a rollback leaves the epoch, and runs the rest of the restored epoch
`_prepare_inputs` | Trainer | moves a batch to the device; overridden where batches are generated
`_get_num_items_in_batch` | Trainer | what a loss is divided by (tokens of all micro-batches)
`_clip_grad_norm`, `_get_grad_norm` | Trainer | the norm is measured without clipping
`_tr_loss`, `_total_loss_scalar`, `_globalstep_last_logged` | Trainer | sums for the log
`_initial_num_input_tokens_seen` | Trainer | number of tokens before this `train()`
`_initial_global_step` | Trainer | first step of this `train()`
`_loss_shifts_labels` | Trainer | whether the loss shifts labels
`_step`, `_total_train_tokens` | TRL's GRPO and RLOO, SFT and DPO | counts, restored by a rollback
`_metrics`, `_stored_metrics` | TRL | metrics since the last log, by mode and name
`_buffered_inputs` | TRL's GRPO and RLOO | completions that earlier weights have generated
"""

from __future__ import annotations

from healcore.adapter_registry import require

require("huggingface", "transformers", "accelerate")
