"""Runs of a few steps are faster than any disk: those here wait for it as long as it takes."""

from __future__ import annotations

import pytest

from healcore.runtime.recovery import keeping


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(keeping, "PATIENCE_S", float("inf"))
