"""One reader process for the whole session."""

from __future__ import annotations

import pytest

from tests.hostile.reader_process import Reader


@pytest.fixture(scope="session")
def reader():
    """Runs commands and functions in child processes, within seconds and MiB."""
    reader = Reader()
    yield reader
    reader.close()
