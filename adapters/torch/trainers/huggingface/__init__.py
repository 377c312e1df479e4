"""Heals `transformers.Trainer` and its subclasses in TRL."""

from __future__ import annotations

from healcore.adapter_registry import require

require("huggingface", "transformers", "accelerate")
