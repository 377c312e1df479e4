"""`HealerError`: a method of the Healer was called where it cannot work."""

from __future__ import annotations

from healcore.core.errors import HealcoreError


class HealerError(HealcoreError, RuntimeError):
    """A method was called outside the Healer's block, or for the other framework.

    The message says what to call instead, such as `tx.update(..., value=loss)` in JAX.
    """

    __module__ = "healcore.errors"


_LOSS_IN_JAX = (
    "pass the loss to the optimizer, as in tx.update(grads, opt_state, params, value=loss), and "
    "the new state to healer.update(state)"
)
_ADVICE = {
    "healer.loss(batch)": _LOSS_IN_JAX,
    "healer.observe(loss)": _LOSS_IN_JAX,
    "healer.update(state)": (
        "a step changes the state in place, so only call optimizer.step(), in a loop over "
        "healer.batches or healer.steps, or before healer.after_step()"
    ),
    "healer.scan(...)": (
        "no loop is compiled as a whole, so write `for step in healer.steps(n)` around the "
        "training step"
    ),
}
"""Method of the Healer for one framework -> what to write in the other one."""


def check_framework(wanted: str, method: str, framework: str) -> None:
    """Raises HealerError if a method is for another framework than that of the Healer's state.

    Args:
        wanted: the framework of the method, "torch" or "JAX".
        method: the method, a key of `_ADVICE`.
        framework: the framework of the state, as `Driver.framework` names it.
    """
    framework = framework.replace("jax", "JAX")
    if framework != wanted:
        raise HealerError(
            f"{method} is for {wanted}, and the state of this Healer is of {framework}: "
            f"{_ADVICE[method]}"
        )
