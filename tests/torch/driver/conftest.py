"""Runs of the driver that compare their weights with earlier ones."""

from types import SimpleNamespace

import pytest

from healcore.runtime.run import evidence


@pytest.fixture(autouse=True)
def free_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons take no time, so their distance does not depend on the load of the machine."""
    monkeypatch.setattr(evidence, "time", SimpleNamespace(monotonic=lambda: 5.0))
