"""A run under way: what happens between two steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from healcore.core.verdict import Action, names
from healcore.runtime.data import BatchId
from healcore.runtime.events import Log, reading
from healcore.runtime.incidents.hooks import Hooks
from healcore.runtime.incidents.incident import Facts
from healcore.runtime.incidents.judging import Judge, Order
from healcore.runtime.incidents.lagging import Lagging, Taken
from healcore.runtime.postmortem import diagnosis
from healcore.runtime.postmortem.diagnosis import Tried
from healcore.runtime.recovery.host_state import ITEM
from healcore.runtime.recovery.journal import Plan
from healcore.runtime.recovery.recovering import Arrival, Recovery, Wanted
from healcore.runtime.run.casework import case_of
from healcore.runtime.run.ending import RunStopped
from healcore.runtime.run.narrating import Narrator
from healcore.runtime.run.terminating import Terminating, ending
from healcore.runtime.store import NoGoodCheckpoint, StoreError
from healcore.runtime.store.claim import Claim

_FEW_UNHEARD = 10
_UNHEARD = 100
"""Batches without a step after which it is asked whether that is meant: it may be accumulation."""


class Trial(NamedTuple):
    """A bad window that is being gone through a second time, with nothing changed."""

    onset: int
    last: int
    """Index of the step that brought the order."""


class Run:
    """The live part of a `Healer`. One thread."""

    def __init__(
        self,
        *,
        recovery: Recovery,
        lagging: Lagging,
        hooks: Hooks,
        log: Log,
        narrator: Narrator,
        rerun: bool,
    ) -> None:
        self.recovery = recovery
        self.terms = recovery.terms
        self.driver = recovery.driver
        self.keeper = recovery.keeper
        self.journal = recovery.journal
        self.ledger = recovery.ledger
        self.feeds = recovery.feeds
        self.log = log
        self.tell = log.write
        self.narrator = narrator
        self.terminating = Terminating()
        self.claim: Claim | None = None
        """On the store's directory."""
        self.step = 0
        self.judge = Judge(
            terms=self.terms,
            ledger=self.ledger,
            hooks=hooks,
            ranks=recovery.ranks,
            tell=self.tell,
            facts=self._facts,
        )
        self._lagging = lagging
        self._rerun = rerun
        self._trial: Trial | None = None
        self.tried: list[Tried] = []
        """Rollbacks of this process."""
        self.verdict = ""
        """What the last re-run has shown."""
        self.began = time.monotonic()
        self._ids: dict[int, list[BatchId]] = {}
        self._yielded = 0
        self._generators: dict[str, Any] | None = None
        self._overdue = 0
        """Step at which a save was due that has not been taken yet."""
        self._saved = -1
        self._begun: int | None = None
        """Step that an earlier process had come to."""

    # -- the beginning --------------------------------------------------------------------------

    def begin(self, *, resume: bool, died: Any | None) -> None:
        """Goes on from the newest checkpoint, or takes the first snapshot."""
        self.narrator.begin()
        page = self.journal.page
        self.keeper.accept(page.meant or [])
        if died is not None:
            self.narrator.warn("the run before this one was killed; its postmortem was written")
        if page.begun is not None:
            self._finish_rollback()
        elif resume:
            self._resume()
        if page.branch is not None and self.step <= (page.branch.plan.trial or [0, -1])[1]:
            self._trial = Trial(*(page.branch.plan.trial or ()))
        self._note_rates()
        page.ended = None
        self.recovery.write_journal(self.step)
        self.recovery.initial = self._saved = self.step
        self._begun = self.step if resume else None
        self.keeper.take_stock()
        if not resume:
            self._accept_first()
            self.save("first")
        self.terminating.watch()
        mode = "observed" if self.terms.observes else "healed"
        self.narrator.say(
            f"{mode} by policy {self.terms.name}, from step {self.step}; "
            f"{_describe(self.keeper.store)}"
        )

    def _accept_first(self) -> None:
        meant = self.keeper.accept_first(self.driver.items())
        if meant:
            self.journal.page.meant = meant
            self.recovery.write_journal(self.step)
            told = f"not finite from the start, and taken to be meant so: {', '.join(meant[:5])}"
            self.tell("problem", step=self.step, problem=told)
            self.narrator.warn(told)

    def _resume(self) -> None:
        saves = self.recovery.saves()
        usable = [s.step for s in saves if s.finite and s.status != "quarantined"]
        if not usable:
            raise NoGoodCheckpoint(
                f"there are checkpoints ({', '.join(str(s.step) for s in saves)}), and all are "
                "quarantined or not finite: pass an empty directory to begin anew"
            )
        self.step, self._generators = self.recovery.resume(usable[::-1])
        self._restore_generators()
        branch = self.journal.page.branch
        if branch is not None and not self._told(branch.plan.number):
            self._tell_late(branch.plan, branch.target)
        self.tell("resume", step=self.step, checkpoint=self.step)
        passed = [s for s in saves if s.step > self.step]
        over = ", ".join(f"{s.step} ({s.status if s.finite else 'not finite'})" for s in passed)
        told = f"goes on from the checkpoint of step {self.step}"
        self.narrator.say(f"{told}; newer ones were passed over: {over}" if over else told)

    def _finish_rollback(self) -> None:
        """The process before was killed in the middle of one."""
        plan = self.journal.page.begun
        assert plan is not None
        landed, self._generators = self.recovery.finish(plan)
        self.step = landed
        self._restore_generators()
        self._tell_late(plan, landed)
        self.narrator.warn(f"finished a rollback that was cut short: back at step {landed}")

    def _told(self, number: int) -> bool:
        """Whether the events have a rollback's end: the process may have died just before."""
        if self.journal.page.ended is not None or self.log.path is None:
            return True
        try:
            events = reading.read(self.log.path).events
        except OSError:
            return True
        return any(e["kind"] == "rollback" and e.get("number") == number for e in events)

    def _tell_late(self, plan: Plan, target: int) -> None:
        self.tell(
            "rollback",
            step=plan.step,
            number=plan.number,
            onset=plan.onset,
            checkpoint=target,
            outcome="finished after a crash" if plan.trial is None else "trial",
        )

    # -- the loop -------------------------------------------------------------------------------

    def batches(self, loader: Any, epochs: int | None) -> Iterator[Any]:
        """See `Healer.batches`."""
        self.after_step()  # of a loop that has broken off
        number = self.feeds.feed(loader, epochs)
        self._restore_generators()
        for line in self.feeds.told:
            self.tell("data", step=self.step, outcome=line)
            self.narrator.say(f"data: {line}")
        self.feeds.told.clear()
        while True:
            try:
                batch, name = self._next(number)
            except StopIteration:
                # What is still on its way may send the run back into this data.
                if not self._read(all=True):
                    break
                continue
            finally:
                self._note_skipped(number)
            self._yielded = number
            self._ids.setdefault(number, []).append(name)
            self._generators = None
            yield batch
            self.after_step()
            if number == self.feeds.current and len(self._ids.get(number, ())) == _UNHEARD:
                self._warn_unheard()
        self.feeds.close(number)

    def _next(self, number: int) -> tuple[Any, BatchId]:
        if not self.whole:
            return self.feeds.next(number)
        with self.terminating.idle():
            return self.feeds.next(number)

    @property
    def whole(self) -> bool:
        """Whether no step is under way: the state is that of `step`, and so is the data's place."""
        return not self._ids.get(self._yielded)

    def after_step(self) -> bool:
        """See `Healer.after_step`."""
        handle = self.driver.took()
        if handle is not None:
            self._push(handle)
            if self._read():
                return True
            if self.keeper.due(self.step):
                self._overdue = self._overdue or self.step
            if self._overdue and self._calm and self.driver.may_save():
                # Unread steps might bring an order, which a start from this save would never get.
                # It does not hold up more than the save: that waits for the device anyway.
                if self._read(all=True):
                    return True
                if self._calm:
                    self.save("regular")
            self.keeper.look_after(self.ledger, self.step)
        self._tell_notes()
        # In the middle of an accumulation the state cannot be saved: on to its end.
        unheard = len(self._ids.get(self._yielded, ()))
        if self.terminating.asked is not None and (self.whole or unheard >= _UNHEARD):
            raise ending(self.terminating.asked)
        return False

    @property
    def _calm(self) -> bool:
        """Whether to save now. Not right after an alarm, which may be the first of many.

        But not never: in a run with an alarm now and then an incident is open most of the time.
        What was saved after an onset is set aside when the run goes back; nothing is lost by it.
        """
        alarmed = bool(self.ledger.unhealthy) and self.ledger.unhealthy[-1] >= self.step - 2
        late = self.step - self._overdue >= self.keeper.every
        return not alarmed or late or self.terms.observes

    def _push(self, handle: Any) -> None:
        """A step was taken, with the batches of the loader that was asked last."""
        ids = self._ids.pop(self._yielded, [])
        self.feeds.stepped(self._yielded, ids[-1] if ids else None)
        self._lagging.push(Taken(self.step, handle, tuple(ids)))
        self.step += 1

    def save(self, why: str) -> None:
        """A checkpoint of this step."""
        self._overdue, self._saved = 0, self.step
        healing = {
            "schema": 1,
            "step": self.step,
            "engines": self.driver.healing(),
            "ledger": self.ledger.to_dict(),
        }
        state = {**self.driver.items(), ITEM: self.recovery.host}
        failed = self.keeper.failed
        self.keeper.save(self.step, state, healing, why)
        if self.keeper.failed > failed:
            self.narrator.warn(f"step {self.step} could not be saved; training goes on")

    def save_last(self) -> None:
        """A checkpoint of where the run ends, if the last one is older."""
        if self.step == self._saved:
            return
        if self.driver.may_save():
            self.save("last")
            return
        told = f"the run ends within an accumulation: the last checkpoint is of step {self._saved}"
        self.tell("problem", step=self.step, problem=told)
        self.narrator.warn(told)

    def release(self) -> None:
        """Gives the store's directory back."""
        if self.claim is not None:
            self.claim.release()

    def note_ending(self, ending: str) -> None:
        """The journal knows how the process ended; if it does not, it was killed."""
        self.journal.page.ended = ending
        self.recovery.write_journal(self.step)

    def drain(self) -> None:
        """Reads what is left at the end of a run. Nothing is carried out any more."""
        handle = self.driver.took()
        if handle is not None:
            self._push(handle)
        self._tell_notes()
        unheard = len(self._ids.get(self._yielded, ()))
        if unheard >= _FEW_UNHEARD:
            self._warn_unheard()
        if self._begun is not None and self.step == self._begun:
            told = f"no step was taken: the data had been used up at step {self.step}"
            self.tell("problem", step=self.step, problem=told)
            self.narrator.warn(told)
        for seen in self._lagging.due(all=True):
            order = self.judge.judge(seen)
            if order is not None:
                self.tell(
                    "problem",
                    step=seen.index,
                    problem=f"{', '.join(names(order.action))} came with the last steps of the "
                    "run and was not carried out",
                )

    # -- orders ---------------------------------------------------------------------------------

    def _read(self, *, all: bool = False) -> bool:
        """Reads the steps that are due; whether the run has gone back."""
        for seen in self._lagging.due(all=all):
            order = self.judge.judge(seen)
            self._watch_trial(seen.index, order)
            if order is not None and self._carry_out(order):
                return True
        return False

    def _carry_out(self, order: Order) -> bool:
        if order.action & Action.STOP:
            self.stop(self._why_stop(order))
        if order.action & Action.ROLLBACK:
            self._check_progress(order)
            self._go_back(order)
            return True
        if order.action & Action.SAVE:
            self.save("ordered")
        return False

    def _check_progress(self, order: Order) -> None:
        """Stops a run that goes back again and again without getting further.

        The engine's budget is refunded by health, and steps that are taken again are healthy too;
        hooks are paid by nobody. What counts here is where in the run the trouble was.
        """
        reach = max(self.terms.refund_after, 1)
        near = [past for past in self.ledger.earlier if abs(order.onset - past.onset) < reach]
        if len(near) >= max(self.terms.recoveries, 1):
            self.stop(f"it has gone back {len(near)} times within {reach} steps of the run")

    def _go_back(self, order: Order) -> None:
        began, trial = self.step, self._wants_trial(order)
        rate_before = self.driver.learning_rate()
        # Steps that are still on their way belong to the window if they are bad too.
        bad = order.bad + self.judge.also_bad(list(self._lagging.due(all=True)))
        wanted = Wanted(order.onset, order.depth, self.step, bad, order.index if trial else None)
        try:
            arrival = self.recovery.go_back(wanted)
        except StoreError as error:
            self.recovery.give_up_plan(self.step)
            self.stop(str(error))
        self.step = self._saved = arrival.target
        self._lagging.clear()
        self._ids.clear()
        self._overdue = 0
        self.judge.went_back(arrival.target)
        self._trial = Trial(order.onset, order.index) if trial else None
        if not trial:
            rate = rate_before or 0.0
            self.tried.append(
                Tried(
                    step=began,
                    onset=order.onset,
                    target=arrival.target,
                    lr_before=rate * self.judge.lr_scale_before or None,
                    lr_after=(self.driver.learning_rate() or 0.0) * self.judge.lr_scale or None,
                    left_out=len(bad),
                )
            )
        self._tell_arrival(order._replace(bad=bad), arrival, began, trial)
        self._note_rates()

    def _tell_arrival(self, order: Order, arrival: Arrival, began: int, trial: bool) -> None:
        rate, moved = self.driver.learning_rate(), arrival.moved
        before, after = self.judge.lr_scale_before, self.judge.lr_scale
        if trial:
            self.tell("rerun", step=began, checkpoint=arrival.target, onset=order.onset)
        self.tell(
            "rollback",
            step=began,
            number=self.journal.page.rollbacks,
            onset=order.onset,
            cause=names(order.cause),
            checkpoint=arrival.target,
            outcome="trial" if trial else "done",
            lr=rate,
            lr_scale_before=before,
            lr_scale=before if trial else after,
            batches=[] if trial else [list(each) for each in order.bad],
            repeated=arrival.repeated,
            initial=arrival.initial,
        )
        how = "rewound" if moved.rewound else f"goes on forward: {moved.why_not}"
        self.tell("data", step=arrival.target, outcome=how, rewound=moved.rewound)
        what = " and ".join(names(order.cause)).lower().replace("_", " ") or "an order of a hook"
        rest = (
            "nothing else is changed, to see whether it happens again"
            if trial
            else f"learning rate × {after:g}, data {how.split(':')[0]}"
        )
        kind = "first snapshot" if arrival.initial else "known-good checkpoint"
        self.narrator.warn(
            f"step {order.index}: {what}, since step {order.since}; "
            f"back to the {kind} of step {arrival.target}; {rest}"
        )

    def stop(self, why: str) -> NoReturn:
        """Ends the run.

        Raises:
            RunStopped: always.
        """
        text = diagnosis.explain(case_of(self, "stopped", why))
        good = self.keeper.good
        self.tell("stop", step=self.step, why=why, diagnosis=text, checkpoint=good)
        raise RunStopped(text, why, good)

    def _why_stop(self, order: Order) -> str:
        if order.overridden:
            return "an on_incident hook said so"
        spent = [
            name
            for name, engine in self.driver.healing().items()
            if engine["state"]["budget"]["recoveries"] == 0
        ]
        if spent:
            return "the budget of recoveries is spent, and the trouble goes on"
        return "a rule of the policy says so"

    # -- a second try ---------------------------------------------------------------------------

    def _wants_trial(self, order: Order) -> bool:
        # One in a region: a second would find the same, for ever.
        onsets = [*self.journal.page.trials, *(past.onset for past in self.ledger.earlier)]
        near = any(abs(order.onset - onset) <= self.terms.region for onset in onsets)
        return self._rerun and not near and not order.overridden and self.feeds.can_rewind

    def _watch_trial(self, index: int, order: Order | None) -> None:
        trial = self._trial
        if trial is None:
            return
        again = order is not None and bool(order.action & (Action.ROLLBACK | Action.STOP))
        if not again and index < trial.last:
            return
        self._trial = None
        self.verdict = "reproducible" if again else "transient"
        self.tell("verdict", step=index, outcome=self.verdict, onset=trial.onset)
        self.narrator.say(f"step {index}: the fault of step {trial.onset} is {self.verdict}")

    # -- within ---------------------------------------------------------------------------------

    def _restore_generators(self) -> None:
        """Sets random generators to the checkpoint's; loaders that were put back have drawn some.

        Right after a restart, and again with each loader until there is a first batch.
        """
        if self._generators is not None:
            self.recovery.host.load_state_dict(self._generators)

    def _warn_unheard(self) -> None:
        """A forgotten `healer.update`, or an optimizer that is not in the state."""
        told = (
            f"{len(self._ids[self._yielded])} batches and no step: in JAX call "
            "healer.update(state) after each step, in torch the optimizer that steps has to be "
            "in the state"
        )
        self.tell("problem", step=self.step, problem=told)
        self.narrator.warn(told)

    def _note_rates(self) -> None:
        engines = self.driver.healing().items()
        self.judge.goes_on({name: each["state"]["lr"]["scale"] for name, each in engines})

    def _tell_notes(self) -> None:
        """What the driver has noticed beside the steps."""
        notes: list[str] = getattr(self.driver, "notes", [])
        while notes:
            told = notes.pop(0)
            self.tell("problem", step=self.step, problem=told)
            self.narrator.warn(told)

    def _note_skipped(self, number: int) -> None:
        skipped = self.feeds.skipped(number)
        if skipped:
            self.tell("skipped_batches", step=self.step, batches=[list(each) for each in skipped])
            self.narrator.say(f"step {self.step}: {len(skipped)} batches left out")

    def _facts(self) -> Facts:
        return Facts(
            run=self.log.run,
            policy=self.terms.name,
            observes=self.terms.observes,
            framework=self.driver.framework,
            rank=self.recovery.ranks.rank,
            learning_rate=self.driver.learning_rate(),
            rollbacks=self.journal.page.rollbacks,
            last_good=self.keeper.good,
            checkpoints=tuple(self._listed()),
        )

    def _listed(self) -> list[Any]:
        try:
            return self.keeper.store.steps()
        except StoreError:
            return []


def _describe(store: Any) -> str:
    describe = getattr(store, "describe", None)
    return describe() if describe is not None else f"checkpoints in {type(store).__name__}"
