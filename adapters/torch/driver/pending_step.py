"""A step that the loop has taken: what every engine recorded of it."""

from __future__ import annotations

from typing import NamedTuple

from healcore.core.step_record import StepRecord
from healcore.runtime.store.ranks import Ranks
from healcore.torch.driver.evidence import EvidenceReader, Names
from healcore.torch.driver.unread import Unread
from healcore.torch.errors import RanksDisagreeError
from healcore.torch.healing import Healing
from healcore.torch.measurement import Judged
from healcore.torch.step_record import Source, source


class Entry(NamedTuple):
    """One judged step of one engine, not read yet."""

    recorder: Recorder
    source: Source
    before: Source | int
    """Where the number of steps judged before this one can be read, or that number."""
    judged: Judged


class Recorder:
    """Writes down every step that one optimizer's engine judges. Waits for nothing.

    Args:
        name: of the engine.
        healing: the optimizer's handle.
        names: how parameters are called.
        unread: where to write; the same for all optimizers.
    """

    def __init__(self, name: str, healing: Healing, names: Names, unread: Unread[Entry]) -> None:
        self.name = name
        self.healing = healing
        self.evidence = EvidenceReader(names)
        self._unread = unread
        self._before: Source | int = 0
        self.restart()
        healing.hooks.on_judged = self._record

    def restart(self) -> None:
        """Begins again after the engine's state was replaced from outside. A sync."""
        self._before = int(self.healing.seat.state.step)

    def _record(self, judged: Judged) -> None:
        record = source(self.healing.seat)
        self._unread.add(Entry(self, record, self._before, judged))
        self._before = record


class PendingStep:
    """What was judged between two calls of `poll_step`, in the order of judging.

    An optimizer that was stepped twice has two entries: an order in the first must not be lost.

    Args:
        entries: the steps.
        ranks: the processes to compare decisions with, where the engines exchange nothing.
    """

    count = 1

    def __init__(self, entries: list[Entry], ranks: Ranks | None = None) -> None:
        self._entries = entries
        self._ranks = ranks
        self._records: list[StepRecord] | None = None

    def steps(self) -> list[list[StepRecord]]:
        """The one step."""
        return [self.read()]

    def read(self) -> list[StepRecord]:
        """Waits only for what has not arrived yet; evidence, on steps with a cause, is a sync.

        Raises:
            RanksDisagreeError: another rank decided something else. On all of them: a rank that
                went back alone would wait for the others for ever.
        """
        if self._ranks is not None:
            _compare(self._entries, self._ranks)
            self._ranks = None
        if self._records is None:
            self._records = [_record(entry) for entry in self._entries]
            self._entries = []
        return self._records


def _compare(entries: list[Entry], ranks: Ranks) -> None:
    mine = [(each.recorder.name, each.source.read()) for each in entries]
    decided = [(name, n.step, n.action, n.cause, n.skip, n.lr_scale) for name, n in mine]
    if any(other != decided for other in ranks.gather(decided)):
        raise RanksDisagreeError(
            "the ranks have decided different things, and with process_group=None they exchange no "
            "losses: leave process_group out, or observe the same loss and step with the same "
            "gradients on every rank"
        )


def _record(entry: Entry) -> StepRecord:
    record = entry.source.read()._replace(engine=entry.recorder.name)
    before = entry.before if isinstance(entry.before, int) else entry.before.read().step
    if record.step == before:
        # A GradScaler has skipped it, and the state still holds the record of the step before.
        return record.unjudged()
    evidence = entry.recorder.evidence
    if record.cause:
        return record._replace(evidence=evidence.of(entry.judged))
    evidence.healthy(entry.judged)
    return record
