"""Constructs the parts of a run, and starts the run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from healcore.events import Log
from healcore.events.metrics import Metrics, path_next_to
from healcore.policy import PolicyError
from healcore.policy.errors import Problem
from healcore.runtime.checkpoints.host_state import HostState
from healcore.runtime.checkpoints.manager import CheckpointManager
from healcore.runtime.data.loader_registry import LoaderRegistry
from healcore.runtime.driver import Driver, driver_for
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.hooks import Hooks
from healcore.runtime.incidents.ledger import Ledger
from healcore.runtime.loop.data import Data
from healcore.runtime.loop.loop import Loop
from healcore.runtime.loop.rank_group import RankGroup, check_same
from healcore.runtime.loop.recovery import Recovery
from healcore.runtime.loop.run_settings import has_trainer
from healcore.runtime.loop.saver import Saver
from healcore.runtime.loop.start import start
from healcore.runtime.postmortem.postmortem import RankNotes
from healcore.runtime.recovery.restoring import Restorer
from healcore.runtime.run_log import RunLog
from healcore.runtime.run_options import Checkpoints, Logging
from healcore.runtime.store import CheckpointStore, Keep, StoreError
from healcore.runtime.store.claim import Claim, claim
from healcore.runtime.store.manifest import sweep
from healcore.runtime.store.ranks import RankFailed, Ranks, agreed, on_first
from healcore.runtime.trackers import Selection, Trackers

MAX_CANDIDATES = 8
"""Max checkpoints on probation in a store, unless `keep` is set."""


class Options(NamedTuple):
    """The arguments of `Healer`."""

    policy: HostPolicy
    state: Any
    store: Any
    loss_fn: Callable[..., Any] | None
    checkpoints: Checkpoints
    logging: Logging
    trackers: tuple[Selection, ...]
    hooks: Hooks
    resume: Any
    attach: dict[str, Any]
    stop_file: str | os.PathLike[str] | None

    def check(self) -> None:
        """Raises ValueError if a number or a choice is out of range."""
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise ValueError(
                f"loss_fn is a function that gives the loss of a batch, or None, not "
                f"{type(self.loss_fn).__name__}"
            )
        if self.resume not in (True, False, "auto"):
            raise ValueError(f'resume is "auto", True or False, not {self.resume!r}')


def open_run(options: Options) -> Loop:
    """Attaches, opens the store, resumes or saves a first snapshot. Errors: `Healer.__enter__`."""
    driver = driver_for(options.state, options.policy.engine, options.attach)
    own_claim: Claim | None = None
    try:
        _check_moments(options.policy, driver)
        ranks = driver.ranks()
        check_same(_shared_options(options), ranks)
        own_claim, warning = _claim(options.store, ranks)
        loop = _construct(options, driver, ranks, own_claim)
        start(loop, options.state, options.resume, warning)
    except BaseException:
        if own_claim is not None:
            own_claim.release()
        driver.close()
        raise
    return loop


def _check_moments(policy: HostPolicy, driver: Driver) -> None:
    """Raises PolicyError if the policy resets moments and the driver cannot."""
    resets = policy.rollback.reset_moments and not policy.observes
    if obstacle := driver.moments_obstacle() if resets else "":
        rule = f"false where the moments cannot be reset: {obstacle}"
        problem = Problem("rollback.reset_moments", "true", rule, "reset_moments = false")
        raise PolicyError(policy.name, (problem,))


def _shared_options(options: Options) -> dict[str, Any]:
    """Options that have to be equal on all ranks."""
    policy = options.policy
    return {
        "policy": policy.text or policy.fingerprint or policy.name,
        "save_every": options.checkpoints.every,
        "store": options.store is not None,
    }


def _claim(given: Any, ranks: Ranks) -> tuple[Claim | None, str | None]:
    """Claims the store's directory for this run, and removes partial files of killed processes.

    Returns the claim and a warning for the log; both are None without a directory. Raises
    StoreInUse if another run is using the directory.
    """
    folder = _given_folder(given)
    if folder is None:
        return None, None
    own_claim: Claim | None = None

    def take() -> str | None:
        nonlocal own_claim
        folder.mkdir(parents=True, exist_ok=True)
        own_claim = claim(folder)
        if isinstance(given, CheckpointStore):
            given.join()  # its temporary files are in use
        sweep(folder)
        return own_claim.warning

    try:
        warning = on_first(ranks, take)
    except RankFailed:
        raise  # all ranks fail together
    except OSError:
        warning = None  # the store raises a better message
    return own_claim, warning


def _construct(options: Options, driver: Driver, ranks: Ranks, own_claim: Claim | None) -> Loop:
    policy = options.policy
    store = _store(options, driver)
    folder = store.root
    group = RankGroup(ranks, driver, options.stop_file)
    # A rank whose reports reach rank 0 needs no events file of its own.
    silent = ranks.rank > 0 and group.votes
    events = Log(None) if silent else _events(options.logging.events, folder, ranks)
    selected = () if ranks.rank else options.trackers  # every rank has the same numbers
    trackers = Trackers(selected)
    log = RunLog(
        events,
        metrics=_metrics(options.logging.metrics, events, ranks, tracked=bool(selected)),
        console=options.logging.console,
        silent=ranks.rank > 0,
        trackers=trackers,
        hooks=options.hooks,
        on_local=group.report if group.votes else None,
    )
    probation = policy.rollback.probation
    every = options.checkpoints.every or probation
    checkpoints = CheckpointManager(
        store,
        every=every,
        # By default all checkpoints on probation, within a bound, and some older known-good ones.
        keep=options.checkpoints.keep
        or Keep(candidates=min(-(-probation // every) + 1, MAX_CANDIDATES), older=True),
        probation=probation,
        region=policy.rollback.region,
        ranks=ranks,
        log=log,
    )
    ledger, loaders = Ledger(), LoaderRegistry()
    host = HostState(loaders.position, driver.generators)
    restorer = Restorer(
        policy=policy,
        driver=driver,
        checkpoints=checkpoints,
        ledger=ledger,
        loaders=loaders,
        host=host,
        ranks=ranks,
        log=log,
    )
    loss_fn = options.loss_fn if policy.goes_back_for() else None
    data = Data(
        loaders=loaders,
        host=host,
        policy=policy,
        ranks=ranks,
        termination=group.termination,
        log=log,
        record=restorer.record,
        keeps_batches=loss_fn is not None,
    )
    recovery = Recovery(data, restorer, options.hooks, loss_fn)
    path = events.path
    return Loop(
        data=data,
        saver=Saver(data, recovery, restorer, own_claim),
        recovery=recovery,
        ranks=group,
        notes=RankNotes(*agreed(ranks, (path and path.absolute(), events.run))),
        has_trainer=has_trainer(options.state),
    )


def _store(options: Options, driver: Driver) -> CheckpointStore:
    store = options.store
    if store is None or isinstance(store, str | os.PathLike):
        store = driver.store(store)
    store.nonfinite_ok = (*store.nonfinite_ok, *options.checkpoints.nonfinite_ok)
    return store


def _given_folder(given: Any) -> Path | None:
    """The directory of the argument `store`, or None for a store in memory only."""
    if given is None or isinstance(given, str | os.PathLike):
        if "\0" in str(given):
            raise StoreError(f"store is a path without the NUL character, not {str(given)!r}")
        return None if given is None else Path(given)
    if not isinstance(given, CheckpointStore):
        raise StoreError(
            f"store is a directory, a CheckpointStore or None, not {type(given).__name__}: a store "
            "of your own is a subclass of healcore.CheckpointStore"
        )
    return given.root


def _events(events: Any, folder: Path | None, ranks: Ranks) -> Log:
    if events is None:
        path = None if folder is None else folder / "healcore.events.jsonl"
    else:
        path = Path(events).absolute()
    if path is not None and ranks.rank:
        # One file per rank: on a network disk two writers cannot share a file.
        path = path.with_name(f"{path.stem}.rank{ranks.rank}{path.suffix}")
    named = events is not None and not ranks.rank
    if path is not None and not named:
        _refuse_link(path, "events")
    return Log(path, follow_links=named)


def _refuse_link(path: Path, option: str) -> None:
    """Raises StoreError for a link at a path that the user has not chosen."""
    if path.is_symlink():
        raise StoreError(
            f"{path} is a link, and healcore follows no link at a path that it has chosen itself: "
            f"remove it, or name the file that it leads to with {option}="
        )


def _metrics(given: Any, log: Log, ranks: Ranks, *, tracked: bool) -> Metrics:
    if ranks.rank or given != "auto":  # every rank has the same numbers
        return Metrics(None if ranks.rank else given, run=log.run, tracked=tracked)
    to_file = log.path is not None and (log.path.is_file() or not log.path.exists())
    path = path_next_to(log.path) if log.path is not None and to_file else None
    if path is not None:
        _refuse_link(path, "metrics")
    return Metrics(path, run=log.run, automatic=True, tracked=tracked)
