"""ArcticTraining: heals its trainers by callbacks, and saves checkpoints that can be resumed."""

from __future__ import annotations
