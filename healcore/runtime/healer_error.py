"""`HealerError`: a method of the Healer was called where it cannot work."""

from __future__ import annotations

from healcore.core.errors import HealcoreError


class HealerError(HealcoreError, RuntimeError):
    """A method was called outside the Healer's block, or for the other framework.

    The message says what to call instead, such as `tx.update(..., value=loss)` in JAX.
    """

    __module__ = "healcore.errors"


def wrong_framework(method: str, wanted: str, framework: str, advice: str) -> HealerError:
    """The error of a method that the framework of the Healer's state does not have.

    Args:
        method: the method, as in "healer.update".
        wanted: the framework of the method, "torch" or "JAX".
        framework: the framework of the state, as `Driver.framework` names it.
        advice: what to write instead, and the reason if it is not obvious, as a clause.
    """
    if framework == "jax":
        framework = "JAX"
    return HealerError(
        f"{method} is for {wanted}, and the state of this Healer is of {framework}: {advice}"
    )
