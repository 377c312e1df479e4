"""The policy of a healing state, by its fingerprint: `check_policy` compares it with an engine.

A state holds the fingerprint only. This process remembers the policies of the states that it has
made, so that the error names what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from healcore.console import first_of
from healcore.core.engine import Engine
from healcore.core.engine.config import EngineConfig, config_differences
from healcore.core.errors import HealcoreError, exported_by
from healcore.jax import engine_rows
from healcore.jax.engine_rows import RowLayout
from healcore.policy.loader import engine_of, name_of


@exported_by("healcore.jax")
class HealStateError(HealcoreError, ValueError):
    """An optimizer state has no healing state, several, or one of another policy.

    The usual reasons are an optimizer that was made without healcore, a policy of `Healer` that
    differs from the policy of `protect`, and a step that returned a part of its state. The message
    says which, and what to write instead.
    """

    differences: str = ""
    """What differs between a new state and the first state, for the run's line about a changed
    model. Empty if something else is wrong."""


_NO_FINGERPRINT = "0" * 16
"""Fingerprint in the state of a policy whose numbers are arrays."""

_policies: dict[str, EngineConfig] = {}
"""Fingerprint -> policy, of each state that this process has made."""


def remember_policy(engine: Engine) -> None:
    """Remembers the policy of a state that is made, for the error of `check_policy`."""
    if engine.fingerprint is not None:
        _policies[engine.fingerprint] = engine.config


def fingerprint_columns(engine: Engine) -> np.ndarray:
    """The fingerprint of a policy as int32 (2,), for the columns `engine_rows.FINGERPRINT`."""
    digits = engine.fingerprint or _NO_FINGERPRINT
    return np.frombuffer(bytes.fromhex(digits), ">i4").astype(np.int32)


def check_policy(engine: Engine, layout: RowLayout, rows: Any, windows: Sequence[Any]) -> None:
    """Compares the shapes of a state, and the fingerprint unless the state is traced.

    Args:
        engine: the engine of the policy.
        layout: the layout of its states.
        rows: `HealState.heal_engine`.
        windows: `HealState.heal_windows`.

    Raises:
        HealStateError: the state belongs to another policy.
    """
    sizes = [layout.width]
    for i in layout.windows:
        sizes.append(layout.leaves[i].shape[-1])
    given = []
    for array in (rows, *windows):
        given.append(jnp.shape(array)[-1])
    made_with = None  # unknown within `jit`
    if not isinstance(rows, Tracer):
        columns = np.asarray(rows)[..., 0, engine_rows.FINGERPRINT]
        made_with = columns.astype(">i4").tobytes().hex()[:16]
    known = made_with not in (None, _NO_FINGERPRINT) and engine.fingerprint is not None
    if given != sizes or (known and made_with != engine.fingerprint):
        raise HealStateError(
            "this healing state belongs to another policy or release: "
            f"{_difference(made_with, engine)}. "
            "Pass the same policy, clip= and other keywords to protect and to the Healer, as in "
            "protect(tx, policy, clip=...) and Healer(policy, clip=...); for heal_zclip() write "
            'Healer("zclip"). To continue with another policy and reset its '
            "detectors: with_heal_state(without_heal_state(old), like=tx.init(params))"
        )


def no_heal_state_error(state: Any) -> HealStateError:
    """Makes the error for a state without a healing state, which `update` cannot judge with.

    Args:
        state: what the program has passed to `update`, usually a state of the bare optimizer.
    """
    return HealStateError(
        f"this optimizer state ({type(state).__name__}) belongs to an optimizer without healcore, "
        "or to another chain: an optimizer with protect(), heal() or heal_zclip() starts with its "
        "own tx.init(params). To continue from the moments of a bare or clipped optimizer: "
        "opt_state = with_heal_state(old_opt_state, like=tx.init(params))"
    )


def _difference(made_with: str | None, engine: Engine) -> str:
    """What differs between the policy of a state, by its fingerprint, and the engine's policy."""
    here = _policy_text(engine.fingerprint)
    if made_with == engine.fingerprint:
        return f"its policy has the same numbers as the one passed here, {here}"
    theirs = _policies.get(made_with or "")
    name = name_of(made_with)
    if theirs is None and name is not None:
        theirs = engine_of(name).config
    text = f"the policy that made it is {_policy_text(made_with)}, the policy passed here is {here}"
    if theirs is None or (name is not None and name_of(engine.fingerprint) is not None):
        return text  # both are presets, whose names say enough
    differences = config_differences(theirs, engine.config)
    if not differences:
        return text
    return f"{text}; they differ in {first_of(differences, 5, '; ')}"


def _policy_text(fingerprint: str | None) -> str:
    """The name of a preset, or what else is known of a policy."""
    if fingerprint in (None, _NO_FINGERPRINT):
        return "an unknown one"
    name = name_of(fingerprint)
    if name:
        return f'"{name}"'
    return f"your own or a changed one (fingerprint {fingerprint[:8]})"
