"""Compares the settings of a program with the settings at the run's first start.

A checkpoint restores the optimizer's hyperparameters and the schedule, so a changed learning rate
has no effect, and a run that had completed returns the old model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from healcore.runtime.driver import Driver
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.recovery.journal import Journal
from healcore.runtime.store.structure import attribute

_SHOWN = 6
"""Max differences in one line."""
_LOADERS = 8
"""Max loaders with a recorded batch size: a loop may create a new loader for every epoch."""
_LENGTHS = {"max_steps", "max_epochs", "num_train_epochs"}
"""Settings of the run's length, which do not change the model."""


class RunSettings(NamedTuple):
    """Settings of one start: name -> a value that JSON can hold."""

    saved: dict[str, Any]
    """Hyperparameters in the state, which a checkpoint replaces."""
    given: dict[str, Any]
    """Settings outside the state, such as the batch size, which always take effect."""
    policy: str
    initial: str
    """Number of ranks, which shard the weights, and digest of the initial weights."""

    @classmethod
    def of(cls, driver: Driver, policy: HostPolicy, state: Any, world: int) -> RunSettings:
        """The settings of a program before it restores a checkpoint."""
        initial = f"{world}:{driver.weights_digest()}"
        return cls(driver.hyperparameters(), settings_of(state), _named(policy), initial)

    def batch(self, ranks: int) -> str:
        """The size of a batch if a trainer knows it: `8`, or `8 × 4 accumulated × 2 ranks`."""
        given = self.given
        size = given.get("per_device_train_batch_size", given.get("batch_size"))
        parts = given.get("gradient_accumulation_steps", given.get("accumulate_grad_batches", 1))
        return "" if size is None else batch_text(size, parts, ranks)


class SettingsChange(NamedTuple):
    """Differences between the settings of this start and of the run's first start."""

    saved: tuple[str, ...]
    """`name: saved -> given`, where the saved value stays in force."""
    given: tuple[str, ...]
    """`name: saved -> given`, where the given value takes effect."""
    policy: str
    """`policy: saved -> given`, or an empty string."""
    initial: bool
    """Whether the initial weights differ. Numbers of ranks that differ are not compared."""

    @property
    def other_run(self) -> str:
        """What makes the model differ from the model of the run, or an empty string."""
        if self.saved or self._training_changes:
            return f"that completed with other settings (saved -> given): {self}"
        return "that completed and began with other weights than this program" * self.initial

    @property
    def _training_changes(self) -> list[str]:
        """Changed settings that affect training, without the run length and `hparams`."""
        names = {each: each.partition(":")[0] for each in self.given}
        return [e for e in self.given if names[e] not in _LENGTHS and "hparams." not in names[e]]

    def __str__(self) -> str:
        parts = [_listed(self.saved, "the saved value stays in force")]
        parts.append(_listed((*self.given, *filter(None, [self.policy])), "the new one is used"))
        return "; ".join(filter(None, parts))


def batch_text(size: object, accumulated: int, ranks: int) -> str:
    """The size of a batch for the first line."""
    more = f" × {accumulated} accumulated" if accumulated > 1 else ""
    return f"{size}{more}{f' × {ranks} ranks' if ranks > 1 else ''}"


def settings_of(state: Any) -> dict[str, Any]:
    """The settings of the trainer that owns the state: name -> value; empty without a trainer."""
    parts = state.values() if isinstance(state, Mapping) else ()
    settings = [attribute(part, "run_settings") for part in parts]
    return {
        name: each for some in settings if isinstance(some, dict) for name, each in some.items()
    }


def has_trainer(state: Any) -> bool:
    """Whether a trainer owns the loop. The trainer decides when its run is complete."""
    parts = state.values() if isinstance(state, Mapping) else ()
    return any(attribute(part, "run_settings") is not None for part in parts)


def change_since(journal: Journal, now: RunSettings) -> SettingsChange:
    """The difference from the settings in the journal, if it has any.

    A value from the end of the run's last process is no difference, because an optimizer that is
    used again in the same process has this value.
    """
    at_start, at_end = journal.state.settings or {}, journal.state.settings_at_end or {}

    def of(kind: str, values: dict[str, Any]) -> tuple[str, ...]:
        before, last = at_start.get(kind, {}), at_end.get(kind, {})
        return tuple(
            f"{name}: {_short_repr(before[name])} -> {_short_repr(value)}"
            for name, value in values.items()
            if name in before and value != before[name] and value != last.get(name, before[name])
        )

    policy = at_start.get("policy", now.policy)
    changed = "" if policy == now.policy else f"policy: {policy} -> {now.policy}"
    initial = at_start.get("initial", "")
    other = initial.partition(":")[0] == now.initial.partition(":")[0] and initial != now.initial
    return SettingsChange(of("saved", now.saved), of("given", now.given), changed, other)


def change_of_batch_size(journal: Journal, number: int, loader: Any) -> str:
    """`batch size: saved -> given` of a loader that has one, or an empty string; records it."""
    size, settings = getattr(loader, "batch_size", None), journal.state.settings
    if type(size) is not int or settings is None or number >= _LOADERS:
        return ""
    sizes = settings.setdefault("batch_sizes", {})
    before = sizes.get(str(number), size)
    sizes[str(number)] = size
    return "" if before == size else f"batch size: {before} -> {size}"


def record_start(journal: Journal, now: RunSettings) -> None:
    """Records the settings in force; the caller writes the journal."""
    before = journal.state.settings or {}
    saved = {**now.saved, **before.get("saved", {})}
    journal.state.settings = {
        **before,
        "saved": saved,
        "given": now.given,
        "policy": now.policy,
        "initial": before.get("initial", now.initial),
    }


def record_end(journal: Journal, driver: Driver) -> None:
    """Records the hyperparameters that this process ends with; the caller writes the journal."""
    journal.state.settings_at_end = {"saved": driver.hyperparameters()}


def _named(policy: HostPolicy) -> str:
    return f"{policy.name} ({(policy.fingerprint or 'unnamed')[:8]})"


def _listed(changes: tuple[str, ...], effect: str) -> str:
    if not changes:
        return ""
    more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
    return f"{', '.join(changes[:_SHOWN])}{more} ({effect})"


def _short_repr(value: Any) -> str:
    return f"{value!r:.60}"
