"""Runs of a few steps are faster than any disk: the tests here wait for it without a limit."""

from __future__ import annotations

import pytest

from healcore.runtime.checkpoints import manager


@pytest.fixture(autouse=True)
def unlimited(monkeypatch):
    monkeypatch.setattr(manager, "MAX_WAIT", float("inf"))
