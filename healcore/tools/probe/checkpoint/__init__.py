"""The checkpoint probe."""

from __future__ import annotations

from pathlib import Path

from healcore.tools.probe.checkpoint.thresholds import CheckpointInputs
from healcore.tools.probe.verdict import ProbeError, Result

__all__ = ["CheckpointInputs", "probe_checkpoint"]


def probe_checkpoint(path: Path, inputs: CheckpointInputs | None = None) -> Result:
    """Probes a store, one checkpoint of it, or a checkpoint that anybody else wrote.

    Raises:
        NothingToProbe: there is nothing in it.
        ProbeError: it cannot be read.
    """
    from healcore.tools.probe.checkpoint import plain, stored

    if not path.exists():
        raise ProbeError(f"{path}: there is no such file or directory")
    inputs = inputs or CheckpointInputs()
    if stored.is_store(path):
        return stored.probe_store(path, inputs)
    return plain.probe_plain(path, inputs)
