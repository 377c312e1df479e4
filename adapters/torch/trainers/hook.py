"""`TrainerHook`: what the callbacks of all trainers share, from their arguments to the run's end.

    __init__ ─► (the trainer begins) ─► open ─► (steps) ─► close

A callback opens its Healer when the trainer has made model and optimizer. It puts what it has
replaced in the trainer on the stack `_changes`, which `_close` undoes before it ends the Healer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from healcore import console
from healcore.core.engine import StateError
from healcore.policy import Overrides, PolicyLike
from healcore.policy.loader import resolve
from healcore.runtime.healer import Healer
from healcore.runtime.run.incidents.metrics import changed_since
from healcore.runtime.store.manifest import scan
from healcore.runtime.store.store import CheckpointStore
from healcore.runtime.trainer_access import TrainerAccess, open_healer, trainer_access_of
from healcore.torch.attachment import Healing
from healcore.torch.driver import TorchDriver


class TrainerHook:
    """The Healer of a trainer's callback.

    A wrong option raises where the program writes it, and not when the training begins.

    Args:
        policy: as for `healcore.Healer`.
        options: `run_options.TrainerOptions`, and further arguments of `healcore.Healer`.

    Attributes:
        healer: the Healer of the current or last training, or None before the first.

    Raises:
        healcore.policy.PolicyError: the policy does not exist or is invalid.
        ValueError, TypeError: an option is out of range or unknown.
    """

    def __init__(self, policy: PolicyLike, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        overrides: dict[str, Any] = {}
        for name in Overrides.__annotations__.keys() & options.keys():
            overrides[name] = self._options.pop(name)
        self._policy = resolve(policy, overrides)
        Healer(self._policy, state={}, **self._options)  # raises if an option is invalid
        self.healer: Healer[Any] | None = None
        self._changes = ExitStack()
        """Restores the trainer."""
        self._logged: dict[str, float] = {}
        """The metrics of the last row of the trainer's log."""

    @property
    def healings(self) -> Mapping[str, Healing]:
        """Handles of the optimizers of the last training, as `healcore.torch.attach` returns them.

        Use them to read the newest decision, or to announce a change of the training.

        Returns:
            Name -> handle: "optimizer", or "optimizer0", "optimizer1", ... for several optimizers.
            Empty before the first training.
        """
        if self.healer is None:
            return {}
        return healings_of(self.healer)

    def _open(self, policy: Any, state: dict[str, Any], **options: Any) -> TrainerAccess:
        """Opens the Healer of one training with the options of the callback and further ones."""
        healer = Healer(policy, state=state, **{**self._options, **options})
        access = open_healer(healer)
        self.healer = healer
        self._logged = {}
        return access

    def _close(self, error: BaseException | None = None) -> None:
        """Restores the trainer, and ends the Healer. A second call does nothing."""
        self._changes.close()
        if self.healer is not None:
            self.healer.close(error)

    def _engines(self) -> dict[str, Any]:
        """Name of an optimizer -> state of the policy, for the trainer's own checkpoints."""
        return {name: healing.state_dict() for name, healing in self.healings.items()}

    def _adopt(self, engines: Mapping[str, Any], *, step: int | None = None) -> None:
        """Continues the run from the checkpoint that the trainer itself has loaded.

        Without usable states of the policy, warns and keeps the initial baselines: the training can
        continue without them.

        Args:
            engines: a result of `_engines`.
            step: number of optimizer steps of the checkpoint, or None if the run counts from 0.
        """
        assert self.healer is not None
        obstacle = "" if engines else "it has none"
        try:
            trainer_access_of(self.healer).adopt_trainer_checkpoint(engines, step=step)
        except StateError as error:
            obstacle = str(error)
        if obstacle:
            console.warning(
                "the policy's state in the trainer's checkpoint was not loaded, so baselines, "
                f"budgets and the learning-rate multiplier are reset: {obstacle}"
            )

    def _new_metrics(self) -> dict[str, float]:
        """The counts of the policy that have changed since the last row of the trainer's log."""
        if self.healer is None:
            return {}
        return changed_since(self._logged, self.healer.metrics())


def healings_of(healer: Healer[Any]) -> Mapping[str, Healing]:
    """The handles of the optimizers of an open run, by the name of the optimizer in the state."""
    return cast(TorchDriver, trainer_access_of(healer).driver).healings


def newest_step(store: Any) -> int | None:
    """Step of the newest complete checkpoint in the argument `store` of a callback.

    Trainers ask before the Healer is open, because they load their own checkpoint earlier.

    Args:
        store: a store, a directory or a list of directories.

    Returns:
        The number of optimizer steps, or None without a complete checkpoint.
    """
    if isinstance(store, CheckpointStore):
        return max((each.step for each in store.checkpoints()), default=None)
    places = store if isinstance(store, list | tuple) else (store,)
    paths = [Path(each) for each in places if isinstance(each, str | os.PathLike)]
    found, _ = scan(*(each for each in paths if each.is_dir()))
    return max(found, default=None)


@contextmanager
def patched(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Sets an attribute for the block, then restores it, unless other code has replaced it.

    The integrations replace attributes of single objects, so that other objects of the same class
    keep theirs. A method of the class is restored by deleting the attribute of the object. One
    class does change, and stays changed: `huggingface/callback.py` replaces the method `train` of
    `transformers.Trainer` when it is imported.

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
