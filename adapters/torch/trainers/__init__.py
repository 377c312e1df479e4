"""Integrations with the trainers of other libraries, each imported on first use.

Each opens a `Healer` inside the training loop of the library. This file has their common parts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

from healcore import console
from healcore.core.engine import Engine, StateError
from healcore.policy import Overrides, Policy, PolicyLike
from healcore.policy.loader import resolve
from healcore.runtime.healer import Healer, hooks_of
from healcore.runtime.run_options import Checkpoints, Hooks, Logging
from healcore.runtime.store.manifest import scan
from healcore.runtime.store.store import CheckpointStore
from healcore.torch.attachment import Healing
from healcore.torch.driver import TorchDriver
from healcore.torch.store import MemoryStore


class TrainerOptions(Overrides, total=False):
    """Further arguments of `healcore.Healer`, and values to replace in the policy."""

    checkpoints: Checkpoints
    logging: Logging
    trackers: object
    hooks: Hooks
    resume: bool | Literal["auto"]
    attach: Mapping[str, object] | None
    stop_file: str | os.PathLike[str] | None


def resolve_options(
    policy: PolicyLike, options: Mapping[str, Any]
) -> tuple[Policy | Engine, dict[str, Any]]:
    """Separates `TrainerOptions`: the policy with its replaced values, and Healer arguments.

    Raises PolicyError, ValueError or TypeError for an invalid policy or option.
    """
    healer_options = dict(options)
    names = Overrides.__annotations__.keys() & healer_options.keys()
    policy = resolve(policy, {name: healer_options.pop(name) for name in names})
    Healer(policy, state={}, **healer_options)  # raises if an option is invalid
    return policy, healer_options


class TrainerCheckpoints(MemoryStore):
    """A store that holds nothing, for a run without rollbacks whose checkpoints the trainer saves.

    `save_now` is called if the policy orders a checkpoint.
    """

    def __init__(self, save_now: Callable[[], None]) -> None:
        super().__init__()
        self.trainer_save = save_now

    def replace_record(self, step: int, record: Mapping[str, Any]) -> None:
        """Does nothing: the trainer's checkpoint has the state of the policy."""

    def nonfinite_in(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """An empty tuple, because the check would copy the state."""
        return ()


def newest_step(store: Any) -> int | None:
    """Step of the newest complete checkpoint in a store, a directory or a list, or None."""
    if isinstance(store, list | tuple):
        return max((at for each in store if (at := newest_step(each)) is not None), default=None)
    if isinstance(store, CheckpointStore):
        return max((each.step for each in store.checkpoints()), default=None)
    is_folder = isinstance(store, str | os.PathLike) and Path(store).is_dir()
    return max(scan(Path(store)).complete, default=None) if is_folder else None


def newest_settings(store: Any) -> Mapping[str, Any]:
    """`RunRecord.settings` of the newest complete checkpoint in a directory; empty without one.

    For a list, of the directory with the newest checkpoint.
    """
    if isinstance(store, list | tuple):
        store = max(store, key=lambda each: -1 if (at := newest_step(each)) is None else at)
    root = store.root if isinstance(store, CheckpointStore) else store
    if not isinstance(root, str | os.PathLike) or not Path(root).is_dir():
        return {}
    found = scan(Path(root))
    newest = max(found.complete, default=None)
    return {} if newest is None else found.records.get(newest, {}).get("settings", {})


def healings_of(healer: Healer[Any] | None) -> Mapping[str, Healing]:
    """The handles of the optimizers by name; empty before the Healer is open."""
    return {} if healer is None else cast(TorchDriver, hooks_of(healer).driver).healings


def adopt_trainer_checkpoint(
    healer: Healer[Any], engines: Mapping[str, Any], *, step: int | None = None
) -> None:
    """Continues a run from the checkpoint that the trainer itself has loaded.

    Without usable states of the policy, warns and keeps the initial baselines: the training can
    continue without them.

    Args:
        healer: the open Healer, before its first batch.
        engines: name of an optimizer -> state of its engine. Unknown names are ignored.
        step: number of optimizer steps that the trainer has taken, or None if the Healer counts
            from 0.
    """
    known = {name: state for name, state in engines.items() if name in healings_of(healer)}
    problem = "" if known else "it has none"
    try:
        hooks_of(healer).adopt_trainer_checkpoint(known, step=step)
    except StateError as error:
        problem = str(error)
    if problem:
        console.warning(
            "the policy's state in the trainer's checkpoint was not loaded, so baselines, budgets "
            f"and the learning-rate multiplier are reset: {problem}"
        )


@contextmanager
def patched(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Sets an attribute for the block, then restores it, unless other code has replaced it."""
    attributes = vars(owner)
    on_instance, original = name in attributes, attributes.get(name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if attributes.get(name) is new:
            if on_instance:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
