"""How the ranks of a run end together when one of them has raised, or has to end alone.

The first one posts why it ends, and makes them leave the collectives in which they wait
for it. If all have done the same steps and nothing speaks against it, they save that state.
Otherwise nothing is saved, the reason is reported, and the next start resumes from the newest
checkpoint that is complete. No single wait is longer than `WAIT_S`, and nobody waits for a process
that was killed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from healcore.runtime.driver import Rendezvous
from healcore.runtime.events.models import Ending
from healcore.runtime.faults import Fault
from healcore.runtime.loop.loop import Loop
from healcore.runtime.postmortem.diagnosis import AFTER_A_KILL

WAIT_S = 30.0
"""Seconds for which ranks wait for each other: a rank in a long forward pass comes after it."""
_TOGETHER_S = 1.0
"""Seconds within which ranks that end for the same reason do so; nothing is interrupted then."""
_WRITES_S = 10.0
"""Seconds for which a rank waits for checkpoints being written, before it posts how it ends."""
_REACHED_S = 5.0
"""Seconds within which the others are reached, by what takes milliseconds: a link may be cut."""
_MOST_SHOWN = 4
"""Ranks whose tracebacks are in the postmortem."""


class RankEnd(NamedTuple):
    """How one rank has ended."""

    ending: Ending
    fault: Fault | None
    """What an exception was classified as."""
    signal: int | None
    why: str
    """The signal, the reason of a stop, or the exception in one line."""
    trace: str
    """The exception with its traceback."""
    asks: bool
    """Whether this ending asks for a save: a signal, or an exception that the policy answers so."""
    killed: bool = False
    """Another rank has gone without having posted: it was killed."""
    step: int = 0
    """Complete steps."""
    why_not: str = ""
    """Why its state cannot be saved."""


class RanksEnd(NamedTuple):
    """How all ranks have ended, as far as they have said so in time."""

    first: RankEnd
    """Of the rank that ended first: the others have ended because of it."""
    rank: int
    """Which one that was."""
    killed: str
    """Which ranks were killed, for a sentence; "": none."""
    saved: bool
    """Whether they have saved the last state."""
    exception: str | None
    traces: str | None
    of_ranks: list[dict[str, Any]]
    problems: list[str]
    """Why nothing was saved, if a save was asked for."""


def end_of_ranks(
    loop: Loop, rendezvous: Rendezvous, mine: RankEnd, error: BaseException | None
) -> RanksEnd:
    """Meets the other ranks, and saves the last state with them if that is possible."""
    posted = partial(_reached, rendezvous.posted, else_=True)
    killed = rendezvous.lost_peer(error) and not posted()
    with suppress(Exception):
        _within(_TOGETHER_S if killed else _WRITES_S, loop.checkpoints.store.wait)
    # In JAX the last step may still wait for another process.
    why_not = _within(WAIT_S, partial(_obstacle, loop), "its last step has not ended in time")
    mine = mine._replace(why_not=why_not, step=loop.step, killed=killed)
    alone: list[Any] = [None] * loop.ranks.world
    alone[loop.ranks.rank] = (1, mine)
    # Otherwise the link is cut, or the process that held the store of the rendezvous was killed.
    reached = _reached(lambda: (rendezvous.post(mine), True)[1], else_=False)
    collect = partial(_collected, rendezvous, alone) if reached else lambda seconds: alone
    found = collect(_TOGETHER_S)  # the policy stops all of them, say
    if None in found:
        rendezvous.interrupt_others()
        killed = any(each is not None and each[1].killed for each in found)
        found = collect(_TOGETHER_S if killed else WAIT_S)
    ends: dict[int, RankEnd] = {rank: each[1] for rank, each in enumerate(found) if each}
    order = {rank: each[0] for rank, each in enumerate(found) if each}
    first = min(order, key=order.__getitem__, default=loop.ranks.rank)
    of_first = ends.get(first, mine)
    if mine.why_not:  # in JAX a step that the first rank has not taken: begun, and never completed
        loop.step = min(loop.step, of_first.step)
    why_not = _why_not(ends, loop.ranks.world) if reached else "no other rank can be reached"
    problems: list[str] = []
    if of_first.asks:
        why_not = why_not or _save(loop, rendezvous)
        if why_not:
            problems.append(f"no checkpoint was saved at the end: {why_not}")
    _reached(lambda: (rendezvous.close(), True)[1], else_=False)
    of_ranks = [
        {"rank": rank, "outcome": str(end.ending), "why": f"step {end.step}: {end.why:.300}"}
        for rank, end in ends.items()
    ]
    by_interest = sorted(ends, key=lambda rank: (rank != first, rank))[:_MOST_SHOWN]
    traced = [f"rank {rank}:\n{ends[rank].trace}" for rank in by_interest if ends[rank].trace]
    raised = of_first.ending == Ending.EXCEPTION
    gone = _killed(ends, loop.ranks.world)
    killed = f"rank {gone} was killed: its connection to rank {first} broke" if gone else ""
    exception = f"{killed}; {AFTER_A_KILL}" if killed else f"rank {first}: {of_first.why}"
    saved = of_first.asks and not problems
    traces = "\n".join(traced)
    exception, traces = (exception, traces) if raised else (None, None)
    return RanksEnd(of_first, first, killed, saved, exception, traces, of_ranks, problems)


def _reached(action: Callable[[], bool], seconds: float = 0.0, *, else_: bool) -> bool:
    """What an action of the rendezvous that takes so long finds; `else_` if it reaches nobody."""
    try:
        return bool(_within(seconds + _REACHED_S, action, else_))
    except RuntimeError:
        return else_


def _collected(rendezvous: Rendezvous, alone: list[Any], seconds: float) -> list[Any]:
    """What the ranks have posted by then; `alone` if they cannot be reached any more."""
    try:
        return _within(seconds + _REACHED_S, lambda: rendezvous.collect(seconds), alone)
    except RuntimeError:
        return alone


def emergency_obstacle(loop: Loop) -> str:
    """Counts and reads the last steps; why their state cannot be saved, or ""."""
    if not loop.take_last_step():
        return "the exception interrupted the optimizer's update"
    loop.read_last_steps()
    return loop.last_state.saves.emergency_obstacle(loop.step)


def _obstacle(loop: Loop) -> str:
    """The same on one of several ranks, which must not exchange anything meanwhile."""
    if loop.checkpoints.store.disk is None:
        loop.take_last_step()
        return "the store is in host memory, which ends with the process"
    try:
        if not loop.take_last_step():
            return "the exception interrupted the optimizer's update"
        if loop.has_unread_alarm():
            return "the last steps had an alarm"
        return emergency_obstacle(loop)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"


def _killed(ends: dict[int, RankEnd], world: int) -> str:
    """Which ranks were killed; "": none."""
    if not any(end.killed for end in ends.values()):
        return ""
    return ", ".join(str(rank) for rank in range(world) if rank not in ends)


def _why_not(ends: dict[int, RankEnd], world: int) -> str:
    missing = [str(rank) for rank in range(world) if rank not in ends]
    if killed := _killed(ends, world):
        return f"rank {killed} was killed"
    if missing:
        return f"rank {', '.join(missing)} has not ended within {WAIT_S:g} s"
    for rank, end in ends.items():
        if end.why_not:
            return f"rank {rank}: {end.why_not}"
    steps = {rank: end.step for rank, end in ends.items()}
    if len({*steps.values()}) > 1:
        done = ", ".join(f"rank {rank} {step}" for rank, step in steps.items())
        return f"the ranks have not done the same steps ({done})"
    return ""


def _save(loop: Loop, rendezvous: Rendezvous) -> str:
    """Saves on all ranks, when no earlier save is under way; returns why not, or ""."""
    store = loop.checkpoints.store
    ranks = [loop.ranks, store.processes]
    rendezvous.leave(ranks)  # ends an earlier save whose ranks wait for each other

    def ended() -> bool:
        with suppress(Exception):  # is given up: this save replaces it
            store.wait()
        return True

    mine = "" if _within(WAIT_S, ended) else "the disk still writes an earlier checkpoint"
    of_ranks = _answers(rendezvous, mine, loop.ranks.world)
    if None in of_ranks:
        missing = [str(rank) for rank, each in enumerate(of_ranks) if each is None]
        return f"rank {', '.join(missing)} was not ready in time, or has gone"
    for rank, each in enumerate(of_ranks):
        if each:
            return f"rank {rank}: {each}"

    def save() -> str:
        rendezvous.renew(ranks, WAIT_S)
        why_not = loop.last_state.save_emergency(loop.step, loop.waiting_batches())
        loop.checkpoints.wait()
        if loop.step in loop.checkpoints.unsaved:
            return loop.checkpoints.last_failure
        return why_not

    try:
        return _within(2 * WAIT_S, save, else_="it has not ended in time")
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"


def _answers(rendezvous: Rendezvous, mine: str, world: int) -> list[str | None]:
    """Whether each rank is ready, as `Rendezvous.answers`."""
    nobody: list[str | None] = [None] * world
    try:  # a rank may wait for its disk as long
        return _within(WAIT_S + _REACHED_S, lambda: rendezvous.answers(mine, WAIT_S), nobody)
    except RuntimeError:
        return nobody


def _within(seconds: float, action: Callable[[], Any], else_: Any = None) -> Any:
    """The result of an action that may hang, or `else_`; its error is raised."""
    results: list[Any] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(action())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="healcore-end", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return results[0] if results else else_
