"""The beginning of a run: put together what it needs, and go on from what is there already."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from healcore.runtime.checkpoints.background_verifier import BackgroundVerifier
from healcore.runtime.checkpoints.manager import CheckpointManager
from healcore.runtime.data.feeds import Feeds
from healcore.runtime.driver import Driver
from healcore.runtime.events import Log
from healcore.runtime.events.metrics import Metrics, path_beside
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.delayed_reader import DelayedReader
from healcore.runtime.incidents.hooks import Hooks
from healcore.runtime.ledger import Ledger
from healcore.runtime.loop.console_log import ConsoleLog
from healcore.runtime.loop.exits import AlreadyCompleted
from healcore.runtime.loop.frameworks import driver_for
from healcore.runtime.loop.loop import Loop
from healcore.runtime.loop.start import begin
from healcore.runtime.loop.termination import TerminationWatch
from healcore.runtime.postmortem import postmortem
from healcore.runtime.rollback.host_state import HostState
from healcore.runtime.rollback.journal import NAME, Journal
from healcore.runtime.rollback.manager import RollbackManager
from healcore.runtime.store import CheckpointStore, Keep, Saved, StoreError
from healcore.runtime.store.claim import Claim, claim
from healcore.runtime.store.memory import MemoryStore
from healcore.runtime.store.permissions import open_to_others
from healcore.runtime.store.ranks import RankFailed, Ranks, agreed, on_first
from healcore.runtime.store.room import fits

_logger = logging.getLogger("healcore")

_under_way: weakref.WeakSet[Loop] = weakref.WeakSet()
"""Runs of this process, ended ones too as long as somebody has them."""


class StoreNotEmpty(StoreError):
    """There are checkpoints of an earlier run, and `resume` does not say to go on from them."""


class Options(NamedTuple):
    """What `Healer` was given."""

    policy: HostPolicy
    state: Any
    store: Any
    events: Any
    metrics: Any
    save_every: int | None
    lag: int
    keep: Keep | None
    hooks: Hooks
    rerun: bool
    resume: Any
    nonfinite_ok: tuple[str, ...]
    ranks: Ranks | None
    framework: str | None
    attach: dict[str, Any]
    driver: Driver | None
    loss_fn: Callable[..., Any] | None
    trust: bool

    def checked(self) -> Options:
        """Itself.

        Raises:
            ValueError: a number or a choice is out of range.
        """
        DelayedReader(self.lag)
        if self.keep is not None:
            self.keep.checked()
        every = self.save_every
        if every is not None and (
            isinstance(every, bool) or not isinstance(every, int) or every < 1
        ):
            raise ValueError(f"save_every is a whole number of steps >= 1, or None, not {every!r}")
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise ValueError(
                f"loss_fn is a function that gives the loss of a batch, or None, not "
                f"{type(self.loss_fn).__name__}"
            )
        if not isinstance(self.trust, bool):
            raise ValueError(f"trust is True or False, not {self.trust!r}")
        if self.resume not in (True, False, "auto"):
            raise ValueError(f'resume is "auto", True or False, not {self.resume!r}')
        return self


def open_run(options: Options) -> Loop:
    """Everything from attaching to the first snapshot or the checkpoint to go on from.

    Raises:
        AlreadyCompleted: there is nothing left to do.
        StoreNotEmpty: `resume` does not allow what lies in the store.
        StoreError: the store cannot be used, or nothing in it is intact.
    """
    policy = options.policy
    if any(loop.abandoned is not None and loop.abandoned.alive for loop in _under_way):
        gc.collect()  # one that nobody has any more may only wait for that
    driver = options.driver or driver_for(options.state, policy, options.framework, options.attach)
    held: Claim | None = None
    try:
        ranks = options.ranks or driver.ranks()
        held, warning = _claimed(options.store, ranks)
        loop = _opened(options, driver, ranks, warning)
        loop.claim = held
        loop.abandoned = weakref.finalize(loop, _clear, driver, loop.termination, loop.console)
        loop.abandoned.atexit = False
        _under_way.add(loop)
    except BaseException:
        if held is not None:
            held.release()
        driver.close()
        raise
    return loop


def _clear(driver: Driver, termination: TerminationWatch, console: ConsoleLog) -> None:
    """A Healer was forgotten within its block: hooks, handlers and the claim must not outlive it.

    The claim clears itself.
    """
    for end in (termination.release, driver.close, console.end):
        with contextlib.suppress(Exception):
            end()


def _claimed(given: Any, ranks: Ranks) -> tuple[Claim | None, str | None]:
    """The store's directory for this run alone, before anything in it is swept or deleted.

    Raises:
        StoreInUse: another run is at work there.
    """
    if isinstance(given, str | os.PathLike):
        folder = Path(given)
    else:
        folder = None if given is None else _folder(given)
    if folder is None:
        return None, None
    held: Claim | None = None

    def take() -> str | None:
        nonlocal held
        folder.mkdir(parents=True, exist_ok=True)
        held = claim(folder)
        return held.warning

    try:
        warning = on_first(ranks, take)
    except RankFailed:
        raise  # nobody goes on alone
    except OSError:
        warning = None  # the store says it better
    return held, warning


def _opened(options: Options, driver: Driver, ranks: Ranks, warning: str | None) -> Loop:
    policy = options.policy
    store = _store(options, driver, ranks)
    folder = _folder(store)
    log = _log(options.events, folder, ranks)
    died = postmortem.of_killed(log.path) if log.path is not None and ranks.rank == 0 else None
    ledger, feeds = Ledger(), Feeds(trust=options.trust)
    host = HostState(feeds.position, driver.generators(), trust=options.trust)
    journal = Journal(None if folder is None else folder / NAME, writes=ranks.rank == 0)
    log_event: Callable[..., object] = log.write
    console = ConsoleLog(enabled=ranks.rank == 0)
    every = options.save_every or policy.probation
    checkpoints = CheckpointManager(
        store,
        every=every,
        keep=options.keep or _keep(every, policy),
        probation=policy.probation,
        region=policy.region,
        verifier=BackgroundVerifier(behind=ranks.world == 1),
        ranks=ranks,
        log_event=log_event,
        warn=console.warning,
    )
    rollbacks = RollbackManager(
        policy=policy,
        driver=driver,
        checkpoints=checkpoints,
        journal=journal,
        ledger=ledger,
        feeds=feeds,
        host=host,
        ranks=ranks,
        log_event=log_event,
    )
    loop = Loop(
        policy=policy,
        driver=driver,
        ranks=ranks,
        checkpoints=checkpoints,
        rollbacks=rollbacks,
        journal=journal,
        ledger=ledger,
        feeds=feeds,
        reader=DelayedReader(options.lag),
        hooks=options.hooks,
        log=log,
        metrics=_metrics(options.metrics, log, ranks),
        console=console,
        rerun=options.rerun,
        loss_fn=options.loss_fn,
    )
    journal.read()
    saves = rollbacks.saves()
    try:
        _check(options.resume, agreed(ranks, journal.page.ended), saves, store)
    except AlreadyCompleted as done:
        console.begin()
        console.info(str(done))
        console.end()
        raise
    log_event(
        "start",
        step=None,
        policy=policy.name,
        fingerprint=policy.fingerprint,
        policy_toml=policy.text,
        mode=policy.engine.mode,
        framework=driver.framework,
        rank=ranks.rank,
        world=ranks.world,
        lag=options.lag,
        save_every=every,
        store=_described(store),
        resumes=bool(saves),
    )
    shared = open_to_others(folder) if folder is not None and ranks.rank == 0 else None
    warnings = [each for each in (warning, shared) if each is not None]
    for problem in [*warnings, *store.problems()]:
        log_event("problem", step=None, problem=problem)
    for each in warnings:
        _logger.warning("%s", each)
    try:
        begin(loop, resume=bool(saves), died=died)
    except BaseException as error:
        # Refused, not killed: the next start must not take it for that.
        raised = "".join(traceback.format_exception_only(error)).strip()
        log_event("problem", step=loop.step, problem=f"the run did not begin: {raised}")
        log_event("end", step=loop.step, ending="exception")
        loop.termination.release()
        console.end()
        log.close()
        raise
    return loop


def _store(options: Options, driver: Driver, ranks: Ranks) -> CheckpointStore:
    given = options.store
    if given is None or isinstance(given, str | os.PathLike):
        store = driver.store(given, options.nonfinite_ok, trust=options.trust)
        return _with_room(store, driver, ranks)
    if not isinstance(given, CheckpointStore):
        raise StoreError(
            f"store is a directory, a CheckpointStore or None, not {type(given).__name__}"
        )
    if options.nonfinite_ok:
        if not hasattr(given, "nonfinite_ok"):
            raise StoreError(
                f"{type(given).__name__} has no nonfinite_ok to add {options.nonfinite_ok} to: "
                "tell the store itself"
            )
        store: Any = given
        store.nonfinite_ok = (*store.nonfinite_ok, *options.nonfinite_ok)
    return given


def _keep(every: int, policy: HostPolicy) -> Keep:
    """By default as many on probation as it lasts, within bounds, and some older ones."""
    return Keep(candidates=min(max(2, -(-policy.probation // every) + 1), 8), older=True)


def _with_room(store: Any, driver: Driver, ranks: Ranks) -> CheckpointStore:
    """The default store, without its snapshots in memory where those do not fit.

    Raises:
        StoreError: there is nothing else.
    """
    memory: MemoryStore = getattr(store, "memory", store)
    copies, nbytes = memory.keep.most + 1 + (memory is not store), driver.state_bytes()
    # As if all ranks were on this machine: better a slower rollback than the out-of-memory killer.
    fit = all(ranks.gather(fits(copies, nbytes, ranks.world)))
    if fit:
        return store
    told = f"{copies} copies of the state ({nbytes / 1e9:.3g} GB each, {ranks.world} ranks)"
    if memory is store:
        raise StoreError(
            f"{told} do not fit into half of the free host memory: pass a directory as the store"
        )
    _logger.warning("%s do not fit into half of the free host memory: checkpoints go to disk", told)
    return store.disk


def _folder(store: CheckpointStore) -> Path | None:
    """The directory of a store, if it has one."""
    root = getattr(getattr(store, "disk", store), "root", None)
    return None if root is None else Path(root)


def _log(events: Any, folder: Path | None, ranks: Ranks) -> Log:
    if events is None:
        path = None if folder is None else folder / "healcore.events.jsonl"
    else:
        path = Path(events).absolute()
    if path is not None and ranks.rank:
        # Every rank has its own: two writers can share a file, but not one network disk.
        path = path.with_name(f"{path.stem}.rank{ranks.rank}{path.suffix}")
    named = events is not None and not ranks.rank
    if path is not None and not named:
        _refuse_link(path, "events")
    return Log(path, named=named)


def _refuse_link(path: Path, option: str) -> None:
    """Nobody has named this path but healcore: a link there is not the user's choice.

    Raises:
        StoreError: it is one.
    """
    if path.is_symlink():
        raise StoreError(
            f"{path} is a link, and healcore writes through none that you have not named: remove "
            f"it, or name the file that it leads to with {option}="
        )


def _metrics(given: Any, log: Log, ranks: Ranks) -> Metrics:
    if ranks.rank:  # every rank has the same numbers
        return Metrics(None, run=log.run)
    if given != "auto":
        return Metrics(given, run=log.run)
    to_file = log.path is not None and (log.path.is_file() or not log.path.exists())
    path = path_beside(log.path) if log.path is not None and to_file else None
    if path is not None:
        _refuse_link(path, "metrics")
    return Metrics(path, run=log.run, thinned=True, named=False)


def _check(resume: Any, ended: str | None, saves: list[Saved], store: CheckpointStore) -> None:
    if not saves or resume is True:
        return
    where = _folder(store) or "the store"
    newest = max([each.step for each in saves if each.status != "quarantined"], default=0)
    if resume is False:
        raise StoreNotEmpty(
            f"{where} holds checkpoints of an earlier run, up to step {newest}: pass an empty "
            'directory, or resume="auto" to go on from them'
        )
    if ended == "completed":
        raise AlreadyCompleted(
            f"nothing to do: {where} holds a run that completed at step {newest}; resume=True "
            "trains it further, an empty directory begins a new one"
        )


def _described(store: CheckpointStore) -> str:
    describe = getattr(store, "describe", None)
    return describe() if describe is not None else type(store).__name__
