"""The handle of a step that the loop has taken: every engine's word on it."""

from __future__ import annotations

from typing import NamedTuple

from healcore.core.verdict import Action, Cause
from healcore.runtime.driver import Told
from healcore.runtime.store.ranks import Ranks
from healcore.torch.driver.evidence import Names, Witness
from healcore.torch.driver.unread import Unread
from healcore.torch.errors import RanksDisagreeError
from healcore.torch.healing import Healing
from healcore.torch.measurement import Judged
from healcore.torch.numbers import Numbers, Source, source


class Entry(NamedTuple):
    """One judged step of one engine, not read yet."""

    recorder: Recorder
    numbers: Source
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
        self.witness = Witness(names)
        self._unread = unread
        self._before: Source | int = 0
        self.restart()
        healing.hooks.on_judged = self._record

    def restart(self) -> None:
        """Begins anew after the engine's state was replaced from outside. A sync."""
        self._before = int(self.healing.seat.state.step)

    def _record(self, judged: Judged) -> None:
        numbers = source(self.healing.seat)
        self._unread.add(Entry(self, numbers, self._before, judged))
        self._before = numbers


class Step:
    """A `Handle`: what was judged between two calls of `took`, in the order of judging.

    An optimizer that was stepped twice has two entries: an order in the first must not be lost.

    Args:
        entries: the steps.
        ranks: the processes to compare decisions with, where the engines exchange nothing.
    """

    count = 1

    def __init__(self, entries: list[Entry], ranks: Ranks | None = None) -> None:
        self._entries = entries
        self._ranks = ranks
        self._told: list[Told] | None = None

    def steps(self) -> list[list[Told]]:
        """The one step."""
        return [self.read()]

    def read(self) -> list[Told]:
        """Waits only for what has not arrived yet; evidence, on steps with a cause, is a sync.

        Raises:
            RanksDisagreeError: another rank decided something else. On all of them: a rank that
                went back alone would wait for the others for ever.
        """
        if self._ranks is not None:
            _compare(self._entries, self._ranks)
            self._ranks = None
        if self._told is None:
            self._told = [_told(entry) for entry in self._entries]
            self._entries = []
        return self._told


def _compare(entries: list[Entry], ranks: Ranks) -> None:
    mine = [(each.recorder.name, each.numbers.read()) for each in entries]
    decided = [(name, n.step, n.action, n.cause, n.skip, n.lr_scale) for name, n in mine]
    if any(other != decided for other in ranks.gather(decided)):
        raise RanksDisagreeError(
            "the ranks have decided different things, and with process_group=None they exchange no "
            "losses: leave process_group out, or observe the same loss and step with the same "
            "gradients on every rank"
        )


def _told(entry: Entry) -> Told:
    now = entry.numbers.read()
    before = entry.before if isinstance(entry.before, int) else entry.before.read().step
    witness, evidence = entry.recorder.witness, ()
    if now.step == before:
        # Somebody else skipped it (a GradScaler), and the state still tells of the step before.
        now = now._replace(
            action=Action(0), cause=Cause(0), rollback_depth=0, skip=False, grad_scale=1.0
        )
    elif now.cause:
        evidence = witness.evidence(entry.judged)
    else:
        witness.calm(entry.judged)
    return _worded(entry.recorder.name, now)._replace(evidence=evidence)


def _worded(engine: str, numbers: Numbers) -> Told:
    return Told(
        engine=engine,
        engine_step=numbers.step,
        decision=numbers.decision,
        onset=numbers.onset,
        incident=numbers.incident,
        incident_open=bool(numbers.incident_open),
        loss=numbers.loss,
        grad_norm=numbers.grad_norm,
        threshold=numbers.threshold,
        z=numbers.z,
        z_loss=numbers.z_loss,
    )
