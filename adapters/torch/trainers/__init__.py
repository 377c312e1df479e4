"""Integrations with the trainers of other libraries, each imported on first use.

Each integration opens a `Healer` inside the training loop of a library. This file has the parts
that several integrations use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from healcore import console
from healcore.core.engine import Engine, StateError
from healcore.policy import Overrides, Policy, PolicyLike
from healcore.policy.loader import resolve
from healcore.runtime.healer import Healer
from healcore.runtime.store.manifest import scan
from healcore.runtime.store.store import CheckpointStore
from healcore.runtime.trainer_access import trainer_access_of
from healcore.torch.attachment import Healing
from healcore.torch.driver import TorchDriver
from healcore.torch.store import MemoryStore


def resolve_options(
    policy: PolicyLike, options: Mapping[str, Any]
) -> tuple[Policy | Engine, dict[str, Any]]:
    """Separates `healer_options.TrainerOptions`: the policy with its overrides, and the rest.

    A wrong option raises where the program writes it, and not when the training begins.

    Args:
        policy: as for `healcore.Healer`.
        options: `TrainerOptions`, and further arguments of `healcore.Healer`.

    Returns:
        The policy, and the arguments for `healcore.Healer` besides policy and state.

    Raises:
        healcore.policy.PolicyError: the policy does not exist or is invalid.
        ValueError, TypeError: an option is out of range or unknown.
    """
    healer_options = dict(options)
    overrides: dict[str, Any] = {}
    for name in Overrides.__annotations__.keys() & options.keys():
        overrides[name] = healer_options.pop(name)
    resolved = resolve(policy, overrides)
    Healer(resolved, state={}, **healer_options)  # raises if an option is invalid
    return resolved, healer_options


class TrainerCheckpoints(MemoryStore):
    """A store that holds nothing, for a run without rollbacks whose checkpoints the trainer saves.

    The Healer needs a store. In such a run it has nothing to restore, and the trainer's own
    checkpoints have the state of the policy.

    Args:
        save_now: called if the policy orders a checkpoint. Makes the trainer save.
    """

    def __init__(self, save_now: Callable[[], None]) -> None:
        super().__init__()
        self.trainer_save = save_now

    def replace_record(self, step: int, record: Mapping[str, Any]) -> None:
        """Does nothing: the trainer's checkpoint has the state of the policy.

        Args:
            step: ignored.
            record: ignored.
        """

    def nonfinite_in(
        self, state: Mapping[str, Any], names: Collection[str] | None = None
    ) -> tuple[str, ...]:
        """An empty tuple, because the check would copy the state.

        Args:
            state: ignored.
            names: ignored.
        """
        return ()


def newest_step(store: Any) -> int | None:
    """Step of the newest complete checkpoint in a store, a directory or a list.

    Trainers ask before the Healer is open, because they load their own checkpoint earlier.

    Args:
        store: the argument `store` of a trainer's callback.

    Returns:
        The number of optimizer steps, or None without a complete checkpoint.
    """
    if isinstance(store, list | tuple):
        steps = [newest_step(each) for each in store]
        return max((step for step in steps if step is not None), default=None)
    if isinstance(store, CheckpointStore):
        return max((each.step for each in store.checkpoints()), default=None)
    if isinstance(store, str | os.PathLike) and Path(store).is_dir():
        return max(scan(Path(store)).complete, default=None)
    return None


def newest_settings(store: Any) -> Mapping[str, Any]:
    """The settings of the run in a store: `RunRecord.settings` of its newest complete checkpoint.

    Args:
        store: the argument `store` of a trainer's callback. From a list, the place with the newest
            checkpoint is read.

    Returns:
        Name -> value; empty without a complete checkpoint in a directory.
    """
    if isinstance(store, list | tuple):
        store = max(store, key=_newest_step_or_before)
    root = store
    if isinstance(store, CheckpointStore):
        root = store.root
    if not isinstance(root, str | os.PathLike) or not Path(root).is_dir():
        return {}
    found = scan(Path(root))
    newest = max(found.complete, default=None)
    if newest is None:
        return {}
    return found.records.get(newest, {}).get("settings", {})


def _newest_step_or_before(store: Any) -> int:
    """The result of `newest_step`, with -1 for None."""
    step = newest_step(store)
    if step is None:
        return -1
    return step


def healings_of(healer: Healer[Any] | None) -> Mapping[str, Healing]:
    """The handles of the optimizers of a run, as `healcore.torch.attach` returns them.

    Args:
        healer: the Healer of the trainer, or None before it is open.

    Returns:
        Name of the optimizer in the state -> its handle; empty for None.
    """
    if healer is None:
        return {}
    return cast(TorchDriver, trainer_access_of(healer).driver).healings


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
    healings = healings_of(healer)
    known = {name: state for name, state in engines.items() if name in healings}
    obstacle = ""
    if not known:
        obstacle = "it has none"
    try:
        trainer_access_of(healer).adopt_trainer_checkpoint(known, step=step)
    except StateError as error:
        obstacle = str(error)
    if obstacle:
        console.warning(
            "the policy's state in the trainer's checkpoint was not loaded, so baselines, budgets "
            f"and the learning-rate multiplier are reset: {obstacle}"
        )


@contextmanager
def patched(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Sets an attribute for the block, then restores it, unless other code has replaced it.

    Trainers are healed by replaced attributes of single objects, so that other objects of the same
    class keep theirs. A method of the class is restored by deleting the attribute of the object.
    One class does change, and stays changed: `huggingface/callback.py` replaces the method
    `add_callback` of `transformers.Trainer` when it is imported.

    Args:
        owner: the object, or a module.
        name: the attribute.
        new: its value within the block.
    """
    attributes = vars(owner)
    on_instance = name in attributes
    original = attributes.get(name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if attributes.get(name) is new:
            if on_instance:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
