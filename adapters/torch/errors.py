"""The errors of `attach` and of healed steps. Each message ends with what to write instead.

SignalError (a loss that is not a number) and StateError (a saved state that does not fit) are in
`healcore.core`, for JAX too.
"""

from __future__ import annotations

from healcore.core.errors import HealcoreError


class AttachError(HealcoreError, TypeError):
    """`attach` cannot work with its arguments. Nothing was changed."""


class RanksDisagreeError(HealcoreError, RuntimeError):
    """The ranks of one run have decided differently. The current step was not taken."""


class ParametersChangedError(HealcoreError, RuntimeError):
    """The optimizer has fewer parameters than before. The current step was not taken."""
