"""`UnreadRecords`: the records of judged steps that the host has not read yet."""

from __future__ import annotations

from collections import deque

from healcore.core.step_record import StepRecord
from healcore.torch.engines.device import DeviceEngine
from healcore.torch.engines.host import HostEngine
from healcore.torch.engines.late_judge import RECORD_LAG
from healcore.torch.engines.stateful import PendingRecord


class UnreadRecords:
    """Records of judged steps, oldest first. No step waits for a record.

    A record of an engine on a device is on its way to the host for some steps. A record of an
    engine on the host is there at once:

        host engine      step n: add ─► take_arrived
        device engine    step n: add ─► step n + RECORD_LAG: take_arrived

    Args:
        live_engine: the engine whose records are read.
    """

    def __init__(self, live_engine: HostEngine | DeviceEngine) -> None:
        self._live_engine = live_engine
        self._unread: deque[PendingRecord] = deque()
        self._lag = 0
        """Number of records that may still be on their way."""
        if live_engine.is_late:
            self._lag = RECORD_LAG

    def add(self) -> None:
        """Adds the record of the step that the engine has judged now."""
        self._unread.append(self._live_engine.pending_record())

    def take_arrived(self) -> list[StepRecord]:
        """Removes and reads the records that have arrived. Does not wait."""
        records: list[StepRecord] = []
        while len(self._unread) > self._lag:
            read = self._unread.popleft()
            records.append(read())
        return records

    def take_all(self) -> list[StepRecord]:
        """Removes and reads all records. Waits for the device."""
        records = [read() for read in self._unread]
        self._unread.clear()
        return records

    def clear(self) -> None:
        """Drops the records without reading them."""
        self._unread.clear()
