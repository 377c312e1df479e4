"""Going back, and going on after a crash: what is done, in which order, written down first.

The order matters twice. Nothing live is touched before everything that can refuse has agreed. And
every step on disk can be done twice, so that a start after a crash just carries the plan out again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from healcore.runtime.data import BatchId
from healcore.runtime.data.feeds import Feeds, Moved
from healcore.runtime.driver import Driver
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.ledger import Ledger
from healcore.runtime.recovery import lineage
from healcore.runtime.recovery.choice import Choice, choose, common, tainted
from healcore.runtime.recovery.host_state import ITEM, HostState, position_in
from healcore.runtime.recovery.journal import Branch, Journal, Plan
from healcore.runtime.recovery.keeping import Keeper
from healcore.runtime.recovery.returning import cut_lr, gone_back, readable, tried_again
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
    own: dict[str, Any] | None
    """What the checkpoint holds for `HostState`."""


class Recovery:
    """Everything that a rollback needs to get at."""

    def __init__(
        self,
        *,
        policy: HostPolicy,
        driver: Driver,
        keeper: Keeper,
        journal: Journal,
        ledger: Ledger,
        feeds: Feeds,
        host: HostState,
        ranks: Ranks,
        tell: Callable[..., object],
    ) -> None:
        self.policy = policy
        self.driver = driver
        self.keeper = keeper
        self.journal = journal
        self.ledger = ledger
        self.feeds = feeds
        self.host = host
        self.ranks = ranks
        self.tell = tell
        self.began_at: int | None = None
        """Step of the snapshot or checkpoint that this process started from."""
        self.damage: list[CheckpointDamaged] = []
        """What was found damaged by this process."""
        self.unwritten = False
        """The journal on disk is not the one of now: to be tried again with the next save."""

    # -- back -----------------------------------------------------------------------------------

    def go_back(self, wanted: Wanted) -> Arrival:
        """A rollback, from the choice of the checkpoint to the last line in the journal.

        Raises:
            NoGoodCheckpoint: there is nothing to go back to.
            StateMismatch: the checkpoint is of another state; nothing was changed.
        """
        self.keeper.settle()
        self.keeper.catch_up(self.ledger, before=wanted.onset)
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
        self.tell(
            "rollback_begin",
            step=wanted.step,
            number=plan.number,
            onset=wanted.onset,
            checkpoint=choice.order[0],
        )
        outcome = self._carry_out(plan, now=wanted.step)
        moved = self.feeds.go_back(position_in(outcome.own), bad, more)
        if outcome.own is not None:
            self.host.load_state_dict(outcome.own)  # after the loaders, which draw random numbers
        self._strike_off(plan, outcome)
        return Arrival(outcome.target, moved, choice.repeated, choice.initial)

    def before(self, onset: int) -> Mapping[str, Any] | None:
        """The state of the checkpoint that a rollback would go to; None: there is none.

        Nothing is changed. The copy is as large as the state.
        """
        try:
            choice = self._choice(self.saves(), onset)
            like = {**self.driver.items(), ITEM: self.host}
            return self.keeper.store.restore(choice.order[0], like).state
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
        self.keeper.set_aside(plan.aside, now=now)
        landed = self._restore(plan.order, now)
        lineage.check(self.journal, landed)
        self.keeper.set_aside(_newer(self.saves(), landed.step), now=now)
        self.keeper.quarantine_later(landed.step)
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
        self.keeper.take_stock()

    # -- on, after a start ----------------------------------------------------------------------

    def finish(self, plan: Plan) -> tuple[int, dict[str, Any] | None]:
        """Carries out a plan that an earlier process was killed in.

        Returns:
            As for `resume`.
        """
        if self.journal.page.ledger is not None:
            self.ledger.take_over(Ledger.from_dict(self.journal.page.ledger), plan.order[0])
        outcome = self._carry_out(plan, now=plan.step)
        position = {**(position_in(outcome.own) or {}), **plan.forward}
        self.feeds.resume(position, plan.left_out)
        self._strike_off(plan, outcome)
        return outcome.target, outcome.own

    def resume(self, order: Sequence[int]) -> tuple[int, dict[str, Any] | None]:
        """Goes on from the newest intact checkpoint.

        Returns:
            Its step, and what to give to `HostState.load_state_dict` once the loop has named its
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
        self.feeds.resume({**(position_in(own) or {}), **forward}, left_out)
        return landed.step, own

    # -- within ---------------------------------------------------------------------------------

    def saves(self) -> list[Saved]:
        """The checkpoints that every rank has."""
        mine = self.keeper.listed()
        return mine if self.ranks.world == 1 else common(self.ranks.gather(mine))

    def look_for_damage(self) -> None:
        """Tells of the checkpoints that are not even listed any more."""
        store = getattr(self.keeper.store, "disk", self.keeper.store)
        found = []
        with suppress(StoreError):  # a disk that is gone is told where it is needed
            found = store.damaged() if isinstance(store, DirectoryStore) else []
        known = {(error.path, error.file) for error in self.damage}
        for error in agreed(self.ranks, found):
            if (error.path, error.file) not in known:
                self._note_damage(error)

    def _note_damage(self, error: CheckpointDamaged) -> None:
        self.damage.append(error)
        self.keeper.note_damage(error)

    def _restore(self, order: Sequence[int], now: int) -> Landed:
        """The first that is intact on every rank: in memory each rank has a copy of its own."""
        like = {**self.driver.items(), ITEM: self.host}
        store, note = self.keeper.store, self._note_damage
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
            self.tell("problem", step=now, problem=wrong)
        return dict(engines)

    def _apply(self, landed: Landed, engines: dict[str, Any]) -> dict[str, Any] | None:
        """Puts it into the live run; returns the host's own part."""
        state = dict(landed.restored.state)
        own = state.pop(ITEM, None)
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
            lineage.note_disk(self.journal, self.keeper.store.steps())
            self.journal.write()
        except (OSError, StoreError) as error:
            # Training goes on; only a crash before the next try would miss the note.
            told = f"the journal could not be written: {error}"
            self.tell("problem", step=now, problem=told)
            if not self.unwritten:
                self.keeper.warn(told)
            self.unwritten = True
        else:
            self.unwritten = False


def _newer(saves: Sequence[Saved], step: int) -> list[int]:
    return [save.step for save in saves if save.step > step]
