"""What a training process sends to its guard at the start, as JSON. Standard library only."""

from __future__ import annotations

import json
from typing import NamedTuple


class Settings(NamedTuple):
    """One process, and the rule for it."""

    pid: int
    thread: int
    """Ident of the thread that trains."""
    rank: int
    world: int
    heartbeat: int
    """Descriptor of the memory of the `Heartbeat`."""
    stacks: int
    """Descriptor of the file that faulthandler writes to."""
    dump: int
    """The signal at which it does; 0: there is none."""
    folder: str
    """Where the guards of all ranks meet; it is made at the first alarm."""
    secret: str
    """By which they know each other's files in it."""
    removes: bool
    """It is a folder of this machine, for this rank to remove at the end."""
    events: str | None
    """Events file of rank 0."""
    follow_links: bool
    """The user has named the events file, so a link in its place is followed."""
    run: str
    """Id of rank 0's run in it."""
    timeout_s: float
    first_step_s: float
    confirm: bool
    """Ends the run only with certainty; see `alarm.verdict`."""
    ends: bool
    """The policy ends the run."""
    observes: bool
    path: tuple[str, ...]
    """`sys.path` of the training process, for the process that writes the report."""

    def dumps(self) -> bytes:
        """As JSON."""
        return json.dumps(self._asdict()).encode()

    @classmethod
    def loads(cls, text: bytes) -> Settings:
        """From JSON."""
        fields = json.loads(text)
        return cls(**{**fields, "path": tuple(fields["path"])})
