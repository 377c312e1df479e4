"""Heals `transformers.Trainer` and its subclasses in TRL.

callback           the entry points `HealingCallback` and `heal_trainer`
trainer_hook       replaces `Trainer.add_callback` when `callback` is imported
epochs             runs epochs, which a rollback can leave
counters           what the Trainer counts, which a rollback restores
steps              one step, in smaller parts if memory runs out
clipping           the Trainer measures the gradient norm, and the policy clips
log_rows           the policy's counts in the rows of the Trainer's log
batch_loss         the loss of one batch by `compute_loss`, to compare weights
checkpoints        finds the Trainer's own checkpoint to resume from
dry_run            trains a copy for a few steps
trainer_internals  every private name of transformers, TRL and accelerate that healcore uses
"""

from __future__ import annotations

from healcore.adapter_registry import require

require("huggingface", "transformers", "accelerate")
