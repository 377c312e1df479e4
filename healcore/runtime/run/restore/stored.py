"""`StoredCheckpoints`: the checkpoints of a run as all ranks can read them.

Reading is collective. A rank may lack a checkpoint, or find it damaged, that the others could load:
its copy in memory is gone, or its disk has a fault. All ranks then take the next older one, because
weights of different steps would not fit together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from healcore.core.decision import Cause
from healcore.runtime.data.positions import check_positions, positions_of_other_ranks
from healcore.runtime.driver import Engines
from healcore.runtime.faults.classification import classify
from healcore.runtime.run.data_state import DATA_STATE_ITEM, SavedDataState
from healcore.runtime.run.engine_states import compatible_states
from healcore.runtime.run.healthy_ranges import HealthyValues
from healcore.runtime.run.run_record import RunRecord
from healcore.runtime.store.checkpoints import (
    MEMORY,
    CheckpointDamaged,
    CheckpointInfo,
    CheckpointNotFound,
    NoGoodCheckpoint,
    Restored,
    StateMismatch,
    StoreError,
)
from healcore.runtime.store.ranks import RankFailed, broadcast, run_on_each
from healcore.runtime.store.values import attribute

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

T = TypeVar("T")
SavedItems: TypeAlias = Mapping[str, Any]
"""Name in the user's state -> what the checkpoint has for it."""
Positions: TypeAlias = Mapping[str, Any]
"""Number of a loader -> its position; besides, the counts of all loaders."""


class SavedCheckpoint(NamedTuple):
    """The content of a checkpoint, after its checks and before any use.

    All parts are decoded before the first part is loaded. A checkpoint with one unreadable part
    then changes nothing, and an older checkpoint can be tried.
    """

    step: int
    """Step of the checkpoint."""
    state: dict[str, Any]
    """The user's state."""
    record: RunRecord | None
    """Healcore's record, or None if another program has saved the checkpoint."""
    engines: dict[str, Any]
    """The engine states that fit this policy, by engine name."""
    problem: str
    """The problem of the engine states that do not fit, or an empty string."""
    data_state: SavedDataState | None
    """Random states and positions of the loaders, or None if they cannot be used."""

    @property
    def position(self) -> dict[str, Any] | None:
        """Positions of the loaders, or None."""
        if self.data_state is None:
            return None
        return self.data_state.data


class StoredCheckpoints:
    """Lists the checkpoints of a run, and loads the first checkpoint that is intact on every rank.

    A disk may show a checkpoint to one rank and not to another. Ranks that restored different steps
    would train different weights, so all methods agree between the ranks first.

    Args:
        run: the parts of the run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def listed(self) -> list[CheckpointInfo]:
        """The checkpoints that every rank lists, as rank 0 sees them. Collective."""
        of_ranks = self.run.ranks.gather(self.run.saver.listed())
        common = set.intersection(*({saved.step for saved in saves} for saves in of_ranks))
        return [saved for saved in of_ranks[0] if saved.step in common]

    def records(self) -> dict[int, RunRecord]:
        """The records of the checkpoints on disk and in memory. Reads no arrays. Collective.

        Returns:
            Step -> its record. One that cannot be read is left to the restore, which reports it.
        """
        stored: Mapping[int, Mapping[str, Any]] = {}
        if self.run.ranks.rank == 0:
            with suppress(StoreError):
                stored = self.run.store.records()
        found: dict[int, RunRecord] = {}
        for step, each in broadcast(self.run.ranks, stored).items():
            with suppress(Exception):
                found[step] = RunRecord.of(each)
        return found

    def healthy_values(self, steps: Sequence[int]) -> dict[int, HealthyValues]:
        """What was healthy up to some checkpoints. Collective.

        Names that were unknown there are taken from later knowledge.

        Args:
            steps: steps of the checkpoints.

        Returns:
            Step -> healthy values, without checkpoints that have no readable record.
        """
        now = self.run.record.healthy
        records = self.records()
        return {at: now.with_better(records[at].healthy) for at in steps if at in records}

    def newest_record(self) -> RunRecord | None:
        """The record of the newest step of the latest attempt, or None. Collective."""
        records = self.records().values()
        return max(records, key=lambda each: (len(each.attempts), each.step), default=None)

    def find_damage(self) -> None:
        """Reports checkpoints that are too damaged for a listing. Collective.

        Rank 0 looks for them, and all ranks report the same. A store that cannot be read reports
        nothing here: the restore raises about it.
        """
        damaged = []
        with suppress(StoreError):  # a missing disk is reported where it is needed
            damaged = self.run.store.damaged()
        for error in broadcast(self.run.ranks, damaged):
            self.run.saver.report_damage(error)

    def load_first_intact(
        self,
        steps: Sequence[int],
        load: Callable[[SavedCheckpoint], T],
        now: int | None = None,
    ) -> tuple[T, SavedCheckpoint]:
        """Calls `load` with the first checkpoint that all ranks can load. Collective.

        A checkpoint with intact digests counts as damaged if its values cannot be loaded. If no
        checkpoint can be loaded, a part of the live state may have changed.

        Args:
            steps: steps of the checkpoints to try, the best first.
            load: puts a checkpoint into the live run. It raises StateMismatch if the checkpoint
                does not fit, and any other exception if its values are damaged.
            now: steps done, for the log of a rollback; None at a start.

        Returns:
            The result of `load`, and the checkpoint.

        Raises:
            NoGoodCheckpoint: no checkpoint of `steps` can be loaded on all ranks.
            StateMismatch: the first intact checkpoint does not fit the live state.
        """
        problems: list[str] = []
        for step in steps:
            restored = failure = None
            try:
                restored = self.run.store.restore(step, self.run.saver.items())
            except CheckpointNotFound:
                pass
            except CheckpointDamaged as error:
                failure = error
            # The ranks' copies in memory may differ.
            if all(self.run.ranks.gather(restored is not None)):
                assert restored is not None
                loaded = self._load_on_all_ranks(step, restored, load)
                if not isinstance(loaded, CheckpointDamaged):
                    problem = loaded[1].problem
                    if problem:
                        self.run.log.event("problem", step=now or step, problem=problem)
                    return loaded
                failure = loaded
            if failure is not None:
                problems.append(str(failure))
                self.run.saver.report_damage(failure)
        reasons = "; ".join(problems) or "none of them is on every rank"
        raise NoGoodCheckpoint(f"no checkpoint of steps {list(steps)} can be restored: {reasons}")

    def load_program(self, saved: SavedItems, engines: Engines) -> None:
        """Puts the program's state of a checkpoint into the live run, and nothing else.

        Args:
            saved: items of the checkpoint, by name. Healcore's own item is not loaded.
            engines: engine states to load with it.
        """
        state = {name: each for name, each in saved.items() if name != DATA_STATE_ITEM}
        self.run.driver.load(state, engines)

    def load_step(self, step: int) -> None:
        """Loads the program's state of a checkpoint, without healcore's record.

        The engines keep their states, and no step is undone.

        Args:
            step: step of the checkpoint.
        """
        saved = self.run.store.restore(step, self.run.saver.items()).state
        self.load_program(saved, {})

    def _load_on_all_ranks(
        self, step: int, restored: Restored, load: Callable[[SavedCheckpoint], T]
    ) -> tuple[T, SavedCheckpoint] | CheckpointDamaged:
        """Calls `load`, or returns the damage if the values of a rank cannot be loaded. Collective.

        Raises the error if the state does not fit or memory is exhausted on a rank.
        """
        result: tuple[T, SavedCheckpoint] | None = None
        failure: Exception = RankFailed("another rank cannot load it")
        ends: bool | None = None  # whether the failure ends the search, or None without a failure
        try:
            saved = run_on_each(self.run.ranks, partial(self._checked, step, restored))
            saved = self._adapted_to_world(saved)
            result = load(saved), saved
        except StateMismatch as error:
            failure, ends = replace(error, step=step), True
        except Exception as error:
            failure, ends = error, classify(error).cause is Cause.OOM
        outcomes = self.run.ranks.gather(ends)
        if result is not None and outcomes.count(None) == len(outcomes):
            return result
        if any(outcomes):
            raise failure
        why = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
        text = f"holds values that healcore does not write ({why})"
        return CheckpointDamaged(step, self.run.store.place or MEMORY, "its content", text)

    def _checked(self, step: int, restored: Restored) -> SavedCheckpoint:
        """Checks healcore's part of a checkpoint. Malformed values raise any exception."""
        record = None if restored.record is None else RunRecord.of(restored.record)
        data_state = SavedDataState.read(restored.state.get(DATA_STATE_ITEM))
        stored: Engines = {}
        if record is not None:
            stored = record.engines
            if record.step != step:
                raise StoreError(f"its record is of step {record.step}")
            if data_state is None and record.world == self.run.ranks.world:
                raise StoreError("it has no random states and positions of the loaders")
            check_positions({"epoch": 0, "trained": None, "sources": record.forward})
        engines, problem = compatible_states(self.run.policy.engine, stored)
        saved = SavedCheckpoint(step, restored.state, record, engines, problem, data_state)
        if saved.position is not None:
            check_positions(saved.position)
        return saved

    def _adapted_to_world(self, saved: SavedCheckpoint) -> SavedCheckpoint:
        """Adapts this rank's part if the number of ranks has changed: all continue as rank 0.

        Random generators stay as the program has set them: added ranks have no saved state.
        """
        world = self.run.ranks.world
        saved_by = world if saved.record is None else saved.record.world
        if saved_by == world:
            return saved
        parts = self.run.ranks.gather(saved.position)
        wrong = []
        for name, item in self.run.saver.items().items():
            if name != DATA_STATE_ITEM and attribute(item, "per_rank"):
                wrong.append(
                    f'"{name}" was saved in {saved_by} parts, one for each rank, but the number of '
                    f"ranks is {world} now"
                )
        first, *others = [_places(part) for part in parts[:saved_by]]
        if any(each != first for each in others):
            wrong.append(f"its {saved_by} ranks were at different batches of their loaders")
        if wrong:
            raise StateMismatch(saved.step, wrong)
        self.run.log.problem(
            saved.step,
            f"checkpoint {saved.step} was saved by {saved_by} ranks, but this run has {world}: the "
            "saved random generators are not used; the loaders begin the epoch again and discard "
            "the batches before the checkpoint",
        )
        if parts[0] is None:
            return saved._replace(data_state=None)
        moved = positions_of_other_ranks(parts[0]["sources"], saved_by)
        positions = {**parts[0], "sources": moved}
        return saved._replace(data_state=SavedDataState({}, {}, positions))


def _places(position: Positions | None) -> dict[str, tuple[Any, ...]]:
    """Name of a source -> its kind, epoch and batch, to compare the places of several ranks."""
    sources = {} if position is None else position["sources"]
    return {name: (at["kind"], at["epoch"], at["index"]) for name, at in sources.items()}
