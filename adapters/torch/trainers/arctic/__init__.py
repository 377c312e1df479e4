"""Heals the trainers of ArcticTraining by callbacks, and saves checkpoints to resume from."""

from __future__ import annotations
