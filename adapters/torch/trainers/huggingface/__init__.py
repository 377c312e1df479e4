"""Heals transformers.Trainer, and the trainers of TRL, which are Trainers."""

from __future__ import annotations

from healcore.extras import require

require("huggingface", "transformers", "accelerate")
