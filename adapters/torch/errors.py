"""The errors of `attach` and of healed steps. Each message ends with what to write instead.

SignalError (a loss that is not a number) and StateError (a saved state that does not fit) are those
of `healcore.core`, as in JAX.
"""

from __future__ import annotations

from healcore.core.errors import HealcoreError


class AttachError(HealcoreError, TypeError):
    """`attach` cannot work with what it was given; nothing was changed."""


class ObservedTooLateError(HealcoreError, RuntimeError):
    """A loss was observed after its step; the present step was not taken."""


class RanksDisagreeError(HealcoreError, RuntimeError):
    """The ranks of one run have decided different things; the present step was not taken."""


class ParametersChangedError(HealcoreError, RuntimeError):
    """The optimizer has other parameters than at `attach`; the present step was not taken."""
