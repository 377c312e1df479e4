"""One process to read in for the whole session."""

from __future__ import annotations

import pytest

from tests.hostile.reader_process import Reader


@pytest.fixture(scope="session")
def reader():
    """Commands and functions in processes of their own, held to seconds and MiB."""
    reader = Reader()
    yield reader
    reader.close()
