"""Nothing goes to a network, and all clients write to folders of this session.

They read the environment when they are imported or first used, once per process.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

_session = tempfile.TemporaryDirectory(prefix="trackers-")
_root = Path(_session.name)
os.environ |= {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_DIR": _session.name,
    "TRACKIO_DIR": str(_root / "trackio"),
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_TRACKING_URI": (_root / "mlruns").as_uri(),
}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The working directory; its name is the project in each tracker."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
