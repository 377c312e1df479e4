"""Golden files: what programs have printed, with placeholders for what depends on the machine.

A change of the text is intended? Then write the files again, and read the difference:

    UPDATE_PINS=1 python -m pytest tests/pins
    git diff tests/pins
"""

import os
import re
from pathlib import Path

PLACEHOLDERS = (
    (r"\d{8}T\d{6}Z-[0-9a-f]{8}", "RUN"),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S*", "TIME"),
    (r"copied in [\d.e-]+ m?s", "copied in T"),
    (r"[\d.]+ (kB|MB|GB) (on disk|in host memory|of disk)", r"N \2"),
    (r"adds [\d.]+ (kB|MB|GB)", "adds N"),
    (r"process \d+", "process P"),
    (r"line \d+, in", "line L, in"),
)
"""Patterns of what depends on the machine or the moment, and what stands in their place."""


def normalized(text: str, folder: Path) -> str:
    """Replaces what depends on the machine, and the path of the test's folder."""
    text = text.replace(str(folder), "FOLDER")
    for pattern, placeholder in PLACEHOLDERS:
        text = re.sub(pattern, placeholder, text)
    return text


def check(path: Path, text: str) -> None:
    """Asserts that a golden file has this text, or writes it if the environment says so."""
    if os.environ.get("UPDATE_PINS"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"UPDATE_PINS=1 writes {path}"
    assert text == path.read_text()
