"""`RunContext`: what all parts of one run share."""

from __future__ import annotations

from typing import NamedTuple

from healcore.runtime.driver import Driver
from healcore.runtime.run.batch_parts import BatchParts
from healcore.runtime.run.run_record import Ledger, RunRecord
from healcore.runtime.run_options import HostPolicy
from healcore.runtime.store.ranks import Ranks
from healcore.runtime.store.store import CheckpointStore
from healcore.runtime.story.run_log import RunLog


class RunContext(NamedTuple):
    """What all parts of one run share. No part replaces one of these objects."""

    policy: HostPolicy
    driver: Driver
    store: CheckpointStore
    ranks: Ranks
    log: RunLog
    record: RunRecord
    """The facts of the run, without the facts at a step."""
    parts: BatchParts
    """How batches are split since memory ran out."""

    @property
    def ledger(self) -> Ledger:
        """The steps, incidents and rollbacks of the run."""
        return self.record.ledger
