"""Going back, and going on after a crash: what is done, in which order, written down first.

The order matters twice. Nothing live is touched before everything that can refuse has agreed. And
every step on disk can be done twice, so that a start after a crash just carries the plan out again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from healcore.runtime.checkpoints.manager import CheckpointManager
from healcore.runtime.data import BatchId
from healcore.runtime.data.feeds import Feeds, Moved
from healcore.runtime.driver import Driver
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.ledger import Ledger
from healcore.runtime.rollback import lineage
from healcore.runtime.rollback.checkpoint_choice import Choice, choose, common, tainted
from healcore.runtime.rollback.engine_states import cut_lr, gone_back, readable, tried_again
from healcore.runtime.rollback.host_state import ITEM, HostParts, HostState
from healcore.runtime.rollback.journal import Branch, Journal, Plan
from healcore.runtime.store import (
    CheckpointDamaged,
    Landed,
    NoGoodCheckpoint,
    Saved,
    StoreError,
    restore_first,
)
from healcore.runtime.store.directory import DirectoryStore
from healcore.runtime.store.ranks import Ranks, agreed


class Wanted(NamedTuple):
    """Why and how far to go back."""

    onset: int
    """Index of the incident's first alarm."""
    depth: int
    step: int
    """Steps done at the moment."""
    bad: tuple[BatchId, ...]
    """The bad window's data."""
    more: int = 0
    """Batches after it to leave out besides those of the policy."""
    cut: bool = False
    """Cut the learning rate too, though no rule of the policy has."""
    trial: int | None = None
    """Only to see whether it happens again: same learning rate, same data, no attempt spent. The
    index of the step that brought the order."""


class Arrival(NamedTuple):
    """Where it went."""

    number: int
    """Of the rollback, from 1, over the whole run."""
    target: int
    moved: Moved
    repeated: bool
    """The same checkpoint as the last time, and nothing older is there."""
    initial: bool
    """No known-good checkpoint: the snapshot that the run started from."""


class Outcome(NamedTuple):
    """What carrying out a plan has come to."""

    target: int
    engines: dict[str, dict[str, Any]]
    own: HostParts | None
    """What the checkpoint holds for `HostState`."""


class RollbackManager:
    """Goes back, and goes on from a checkpoint after a start.

    Args:
        policy: the policy.
        driver: the live state.
        checkpoints: of the run.
        journal: what has to survive the process.
        ledger: healthy and unhealthy steps, earlier rollbacks.
        feeds: the loaders.
        host: random states and positions that a checkpoint holds.
        ranks: the processes of this run.
        log_event: writes an event, see `Log.write`.
    """

    def __init__(
        self,
        *,
        policy: HostPolicy,
        driver: Driver,
        checkpoints: CheckpointManager,
        journal: Journal,
        ledger: Ledger,
        feeds: Feeds,
        host: HostState,
        ranks: Ranks,
        log_event: Callable[..., object],
    ) -> None:
        self.policy = policy
        self.driver = driver
        self.checkpoints = checkpoints
        self.journal = journal
        self.ledger = ledger
        self.feeds = feeds
        self.host = host
        self.ranks = ranks
        self.log_event = log_event
        self.began_at: int | None = None
        """Step of the snapshot or checkpoint that this process started from."""
        self.damage: list[CheckpointDamaged] = []
        """What was found damaged by this process."""
        self.unwritten = False
        """The journal on disk is not the one of now: to be tried again with the next save."""

    # -- what a checkpoint holds ------------------------------------------------------------------

    def contents(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state to save after `step` steps, and what healcore keeps with it."""
        healing = {
            "schema": 1,
            "lineage": self.journal.page.lineage,
            "step": step,
            "engines": self.driver.healing(),
            "ledger": self.ledger.to_dict(),
        }
        return {**self.driver.items(), ITEM: self.host}, healing

    # -- back -----------------------------------------------------------------------------------

    def go_back(self, wanted: Wanted) -> Arrival:
        """A rollback, from the choice of the checkpoint to the last line in the journal.

        Raises:
            NoGoodCheckpoint: there is nothing to go back to.
            StateMismatch: the checkpoint is of another state; nothing was changed.
        """
        self.checkpoints.settle()
        self.checkpoints.catch_up(self.ledger, before=wanted.onset)
        self.look_for_damage()
        saves = self.saves()
        choice = self._choice(saves, wanted.onset, wanted.depth)
        bad, more = (
            ((), 0)
            if wanted.trial is not None
            else (wanted.bad, self.policy.skip_batches + wanted.more)
        )
        aside = {*tainted(saves, onset=wanted.onset), *_newer(saves, choice.order[0])}
        plan = Plan(
            number=self.journal.page.rollbacks + 1,
            step=wanted.step,
            onset=wanted.onset,
            order=list(choice.order),
            aside=sorted(aside - {*choice.order}),
            engines=self._live(wanted),
            left_out=self.feeds.left_out(bad, more),
            forward=self.feeds.forward(),
            trial=None if wanted.trial is None else [wanted.onset, wanted.trial],
        )
        self.journal.page.begun, self.journal.page.ledger = plan, self.ledger.to_dict()
        self.journal.page.quarantined += lineage.directories(saves, plan.aside)
        self.write_journal(wanted.step)
        self.log_event(
            "rollback_begin",
            step=wanted.step,
            number=plan.number,
            onset=wanted.onset,
            checkpoint=choice.order[0],
        )
        outcome = self._carry_out(plan, now=wanted.step)
        moved = self.feeds.go_back(_position(outcome.own), bad, more)
        if outcome.own is not None:
            self.host.put_back(outcome.own)  # after the loaders, which draw random numbers
        self._strike_off(plan, outcome)
        return Arrival(plan.number, outcome.target, moved, choice.repeated, choice.initial)

    def before(self, onset: int) -> Mapping[str, Any] | None:
        """The state of the checkpoint that a rollback would go to; None: there is none.

        Nothing is changed. The copy is as large as the state.
        """
        try:
            choice = self._choice(self.saves(), onset)
            like = {**self.driver.items(), ITEM: self.host}
            return self.checkpoints.store.restore(choice.order[0], like).state
        except StoreError:
            return None

    def _choice(self, saves: Sequence[Saved], onset: int, depth: int = 1) -> Choice:
        return choose(
            saves,
            onset=onset,
            depth=depth,
            earlier=self.ledger.earlier,
            region=self.policy.region,
            initial=[s for s in (self.journal.page.first, self.began_at) if s is not None],
        )

    def _live(self, wanted: Wanted) -> dict[str, dict[str, Any]]:
        """The engines' states, with the cut that is wanted."""
        live = self.driver.healing()
        if not wanted.cut:
            return live
        return cut_lr(self.policy.engine, live, self.driver.learning_rate())

    def _carry_out(self, plan: Plan, *, now: int) -> Outcome:
        """The plan. Doing it twice does the same."""
        self.checkpoints.set_aside(plan.aside, now=now)
        landed = self._restore(plan.order, now)
        lineage.check(self.journal, landed)
        self.checkpoints.set_aside(_newer(self.saves(), landed.step), now=now)
        self.checkpoints.quarantine_later(landed.step)
        merge = gone_back if plan.trial is None else tried_again
        engines = merge(self.policy.engine, plan.engines, self._engines(landed, now))
        own = self._apply(landed, engines)
        self.ledger.went_back(plan.onset, landed.step, counts=plan.trial is None)
        return Outcome(landed.step, engines, own)

    def _strike_off(self, plan: Plan, outcome: Outcome) -> None:
        """The plan is carried out; its result stays, for a restart before the next save."""
        page = self.journal.page
        page.begun, page.rollbacks = None, plan.number
        page.branch = Branch(outcome.target, outcome.engines, replace(plan, engines={}))
        page.ledger = self.ledger.to_dict()
        if plan.trial is not None:
            page.trials.append(plan.onset)
        self.write_journal(outcome.target)
        self.checkpoints.take_stock()

    # -- on, after a start ----------------------------------------------------------------------

    def finish(self, plan: Plan) -> tuple[int, HostParts | None]:
        """Carries out a plan that an earlier process was killed in.

        Returns:
            As for `resume`.
        """
        if self.journal.page.ledger is not None:
            self.ledger.take_over(Ledger.from_dict(self.journal.page.ledger), plan.order[0])
        outcome = self._carry_out(plan, now=plan.step)
        position = {**(_position(outcome.own) or {}), **plan.forward}
        self.feeds.resume(position, plan.left_out)
        self._strike_off(plan, outcome)
        return outcome.target, outcome.own

    def resume(self, order: Sequence[int]) -> tuple[int, HostParts | None]:
        """Goes on from the newest intact checkpoint.

        Returns:
            Its step, and what to give to `HostState.put_back` once the loop has named its
            loader.

        Args:
            order: checkpoints to try, the newest first.

        Raises:
            NoGoodCheckpoint: none is intact.
            StateMismatch: they are of another state.
        """
        landed = self._restore(order, order[0])
        lineage.check(self.journal, landed)
        engines = self._engines(landed, landed.step)
        healing = landed.restored.healing or {}
        remembered = healing.get("ledger")
        branch, forward = self.journal.page.branch, {}
        if branch is not None and landed.step <= branch.target:
            # Killed between the rollback and the first save after it, or that one is damaged.
            live, _ = readable(self.policy.engine, branch.engines)
            older = landed.step < branch.target
            engines = gone_back(self.policy.engine, live, engines) if older else live
            remembered, forward = self.journal.page.ledger, branch.plan.forward
        own = self._apply(landed, engines)
        if remembered is not None:
            self.ledger.take_over(Ledger.from_dict(remembered), landed.step)
        else:
            self.ledger.judged = landed.step
        left_out = {} if branch is None else branch.plan.left_out
        self.feeds.resume({**(_position(own) or {}), **forward}, left_out)
        return landed.step, own

    # -- within ---------------------------------------------------------------------------------

    def saves(self) -> list[Saved]:
        """The checkpoints that every rank has."""
        mine = self.checkpoints.listed()
        return mine if self.ranks.world == 1 else common(self.ranks.gather(mine))

    def look_for_damage(self) -> None:
        """Tells of the checkpoints that are not even listed any more."""
        store = getattr(self.checkpoints.store, "disk", self.checkpoints.store)
        found = []
        with suppress(StoreError):  # a disk that is gone is told where it is needed
            found = store.damaged() if isinstance(store, DirectoryStore) else []
        known = {(error.path, error.file) for error in self.damage}
        for error in agreed(self.ranks, found):
            if (error.path, error.file) not in known:
                self._note_damage(error)

    def _note_damage(self, error: CheckpointDamaged) -> None:
        self.damage.append(error)
        self.checkpoints.note_damage(error)

    def _restore(self, order: Sequence[int], now: int) -> Landed:
        """The first that is intact on every rank: in memory each rank has a copy of its own."""
        like = {**self.driver.items(), ITEM: self.host}
        store, note = self.checkpoints.store, self._note_damage
        if self.ranks.world == 1:
            return restore_first(store, order, like, note)
        for step in order:
            landed = None
            with suppress(NoGoodCheckpoint):
                landed = restore_first(store, [step], like, note)
            if all(self.ranks.gather(landed is not None)):
                assert landed is not None
                return landed
        raise NoGoodCheckpoint(f"none of the checkpoints of steps {list(order)} is intact anywhere")

    def _engines(self, landed: Landed, now: int) -> dict[str, Any]:
        healing = landed.restored.healing or {}
        engines, wrong = readable(self.policy.engine, healing.get("engines"))
        if wrong:
            self.log_event("problem", step=now, problem=wrong)
        return dict(engines)

    def _apply(self, landed: Landed, engines: dict[str, Any]) -> HostParts | None:
        """Puts it into the live run; returns the host's own part.

        Raises:
            Untrusted: that part is not to be read; nothing was changed.
        """
        state = dict(landed.restored.state)
        own = self.host.read(state.pop(ITEM, None))
        self.driver.replace(state)
        self.driver.load_healing(engines)
        return own

    def give_up_plan(self, now: int) -> None:
        """A rollback that cannot be carried out is not to be finished by the next start."""
        self.journal.page.begun = None
        self.write_journal(now)

    def write_journal(self, now: int) -> None:
        """Puts the journal on disk, or tells that it could not."""
        try:
            lineage.note_disk(self.journal, self.checkpoints.store.steps())
            self.journal.write()
        except (OSError, StoreError) as error:
            # Training goes on; only a crash before the next try would miss the note.
            told = f"the journal could not be written: {error}"
            self.log_event("problem", step=now, problem=told)
            if not self.unwritten:
                self.checkpoints.warn(told)
            self.unwritten = True
        else:
            self.unwritten = False


def _position(own: HostParts | None) -> dict[str, Any] | None:
    """Where the loaders were; None of an old checkpoint."""
    return None if own is None else own.data


def _newer(saves: Sequence[Saved], step: int) -> list[int]:
    return [save.step for save in saves if save.step > step]
