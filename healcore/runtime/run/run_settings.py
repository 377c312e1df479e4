"""Compares the settings of a program with the settings at the run's first start.

A checkpoint restores the optimizer's hyperparameters and the schedule, so a changed learning rate
has no effect, and a run that had completed returns the old model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healcore.console import first_of
from healcore.policy import diff, load, loads, preset_names, recipe_names
from healcore.runtime.driver import WEIGHTS, Driver
from healcore.runtime.run_options import HostPolicy
from healcore.runtime.store.values import attribute

_POLICY, _WORLD = "policy", "number of ranks"
_HARMLESS = {_POLICY, _WORLD, "max_steps", "max_epochs", "num_train_epochs"}
"""Settings that do not change the model of a completed run."""


def settings_of(driver: Driver, policy: HostPolicy, state: Any, world: int) -> dict[str, Any]:
    """The settings of a program, by which a later start notices that it is another program.

    Called before a checkpoint is restored: a restore would overwrite the optimizer's own settings.

    Args:
        driver: gives the settings of the optimizers and the model.
        policy: the policy of the run.
        state: the user's state. A trainer's parts in it have settings too.
        world: number of ranks.

    Returns:
        Name -> a JSON-safe value.
    """
    settings = dict(driver.settings())
    for each in trainer_settings(state):
        settings |= each
    settings[_POLICY] = _policy_setting(policy)
    return {**settings, _WORLD: world}


def _policy_setting(policy: HostPolicy) -> str:
    """The name of the policy, what differs from the preset of this name, and the fingerprint."""
    text = policy.name
    if policy.text is not None and text in (*preset_names(), *recipe_names()):
        changed = [f"{key} = {value!r}" for key, _, value in diff(load(text), loads(policy.text))]
        if changed:
            text += f" with {first_of(changed)}"
    return f"{text} ({(policy.engine.fingerprint or 'unnamed')[:8]})"


def changes_since(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """The settings that differ from the saved settings.

    Names that only one of the two has do not count. If the number of ranks has changed, the weights
    are not compared, because each rank has another part of them.

    Args:
        before: the settings of the checkpoint.
        now: the settings of this program.

    Returns:
        Name -> `saved -> given`, each value cut to 100 characters.
    """
    changed = [name for name in now if name in before and before[name] != now[name]]
    if _WORLD in changed:  # the ranks shard the weights
        changed = [name for name in changed if name != WEIGHTS]
    return {name: f"{before[name]!r:.100} -> {now[name]!r:.100}" for name in changed}


def changes_text(changes: Mapping[str, str]) -> str:
    """The changes of `changes_since` in one line, for the log of a resumed run.

    At most six are named. The weights are not named: their setting is a digest, which means nothing
    to a reader.

    Args:
        changes: name -> `saved -> given`.

    Returns:
        The line, or an empty string without a change.
    """
    return first_of([f"{name}: {each}" for name, each in changes.items() if name != WEIGHTS], 6)


def why_other_run(changes: Mapping[str, str]) -> str:
    """Reason why this program trains another model than the completed run in its directory.

    A directory that another program has used would otherwise be taken for the result of this
    program.

    Args:
        changes: the result of `changes_since`.

    Returns:
        A clause for the exception, or an empty string if only harmless settings differ.
    """
    changed: dict[str, str] = {}
    for name, each in changes.items():
        if name not in _HARMLESS and "hparams." not in name:
            changed[name] = each
    if not changed:
        return ""
    if changed.keys() != {WEIGHTS}:
        return f"that completed with other settings (saved -> given): {changes_text(changed)}"
    return (
        "that completed and began with other weights than this program (a program that loads its "
        "own snapshot passes resume=True)"
    )


def settings_for_events(settings: Mapping[str, Any], rate: float | None) -> dict[str, Any]:
    """The settings for events, with common names for the rate and the batch, without `hparams`.

    Each trainer has its own name for the same setting, and a reader of events should not need to
    know them.

    Args:
        settings: the result of `settings_of`.
        rate: learning rate at the start, or None if it is unknown.

    Returns:
        Name -> value, with `learning_rate`, `batch_size` and `accumulation` where they are known.
    """
    size = settings.get("per_device_train_batch_size", settings.get("batch_size"))
    parts = settings.get("gradient_accumulation_steps", settings.get("accumulate_grad_batches"))
    common = {"learning_rate": rate, "batch_size": size, "accumulation": parts}
    shown: dict[str, Any] = {}
    for name, value in {**settings, **common}.items():
        if value is not None and name != WEIGHTS and not name.startswith("hparams."):
            shown[name] = value
    return shown


def trainer_settings(state: Any) -> list[dict[str, Any]]:
    """The attribute `run_settings` of each part of the state that a trainer has made.

    A trainer that owns the loop decides when its run is complete.
    """
    if isinstance(state, Mapping):
        parts = state.values()
    else:
        parts = ()
    found = [attribute(part, "run_settings") for part in parts]
    return [each for each in found if isinstance(each, dict)]


def trainer_ends_by_steps(settings: list[dict[str, Any]]) -> bool:
    """Whether the settings of a trainer limit its steps (`max_steps`).

    Such a trainer takes this number of steps from as many batches as they need. Skipped batches
    then do not shorten the run.

    Args:
        settings: the result of `trainer_settings`.
    """
    limits = [each.get("max_steps") for each in settings]
    return any(isinstance(limit, int) and limit > 0 for limit in limits)
