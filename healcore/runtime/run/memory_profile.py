"""Says what holds the memory, and writes memory profiles: out of memory, or on request."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from healcore.events.log import process_path
from healcore.runtime.driver import Driver
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.store import files

MAX_PROFILE_BYTES = 16 << 20
"""A larger profile is not written: a snapshot grows with the recorded history."""


def memory_text(driver: Driver, log: RunLog) -> str:
    """Writes the memory profiles next to the events, and describes them.

    Args:
        driver: measures the memory.
        log: the log of the run. Its events have a path on rank 0 only, which writes the files.

    Returns:
        A sentence about what holds most of the memory, and the names of the files. A failure to
        measure is a sentence too: the device may have failed.
    """
    try:
        sizes = driver.memory()
    except Exception as error:  # the device may fail again
        return f"The memory could not be measured: {type(error).__name__}: {error:.100}"
    text = "The owners of the memory are not known"  # as in JAX
    if sizes:
        owner = max(sizes, key=sizes.__getitem__)
        total = sum(sizes.values())
        text = f"Largest owner of memory: {owner} ({sizes[owner]:,} of {total:,} bytes)"
    events = log.events.path
    if events is None:  # only rank 0 has an events file
        return text
    try:
        names = _write_profiles(driver, events, log.events.process_id, sizes)
    except Exception as error:  # for example, the disk is full
        return f"{text}; no memory profile: {type(error).__name__}: {error:.100}"
    if not names:
        return text
    return f"{text}; memory profile: {', '.join(names)}"


def _write_profiles(
    driver: Driver, events: Path, process_id: str, sizes: Mapping[str, int]
) -> list[str]:
    """Writes the profiles next to the events. Returns the names of the files.

    The files of a later failure of the same process replace these.
    """
    profiles = driver.memory_profiles()
    lines = [f"{size:>20,} bytes  {name}\n" for name, size in sizes.items()]
    owners = "".join(lines).encode()
    if owners:
        profiles[".txt"] = owners + b"\n" + profiles.get(".txt", b"")
    written = []
    for suffix, content in sorted(profiles.items()):
        if len(content) <= MAX_PROFILE_BYTES:
            path = process_path(events, process_id, "memory", suffix)
            files.replace(path, content)
            written.append(path.name)
    return written
