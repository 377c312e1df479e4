"""Heals `transformers.Trainer` and its subclasses in TRL.

callback           the entry points `HealingCallback` and `heal_trainer`
epochs             runs epochs that a rollback can leave, and keeps the Trainer's counters
steps              one step: smaller parts, losses, clipping, log
checkpoints        finds the Trainer's own checkpoint to resume from
dry_run            trains a copy for a few steps
trainer_internals  every private name of transformers, TRL and accelerate that healcore uses
"""

from __future__ import annotations

from healcore.adapter_registry import require

require("huggingface", "transformers", "accelerate")
