"""A project of its own for each test."""

from __future__ import annotations

import pytest


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The working directory; its name is the project in each tracker."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
