"""The folder of the recorded runs, ../shared/traces."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "shared" / "traces"

needed = pytest.mark.skipif(
    not (FOLDER / "labels.json").is_file(), reason=f"no recorded runs: {FOLDER} is not there"
)
