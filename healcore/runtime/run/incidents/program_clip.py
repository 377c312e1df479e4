"""`ProgramClip`: notices that a program clips its gradients before healcore measures them."""

from __future__ import annotations

CLIPPED_STEPS = 5
"""Steps with the norm of a limit after which the limit is certain."""
_TOLERANCE = 1e-5
"""Relative error of a norm that two float32 sums compute of the same gradients."""
_EPSILON = 1e-6
"""What a clip adds to the norm before it divides. So the clipped norm is a little below the
limit."""
_EQUAL = 1e-3
"""Largest relative difference of norms that count as equal. It is a tenth of the smallest
difference of two numbers of two digits, so that few norms are equal to such a number by chance."""
_ADVICE = {
    "torch": "pass clip={} to healcore, which clips to the same bits",
    "jax": "pass clip={} to both protect and Healer",
}
"""Framework -> what to write instead of the clip. In JAX the last bits can differ: XLA fuses it."""


class ProgramClip:
    """Notices a clip of the program by the norms of its steps. A step costs one comparison.

    A clipped gradient has the norm of the limit, so many steps have the same norm and no step has a
    larger one. The limit is a number that a person has chosen, so it has one or two digits. And the
    last digits of the norms go up and down by rounding, unlike the norms of a gradient that is
    constant or changes slowly. All three signs together do not occur by chance.

    A limit as small as what the clip adds to the norm is not noticed: it gives the steps different
    norms, which look like the norms of a run that has converged.

    Examples:
        >>> clip = ProgramClip("torch")
        >>> lines = [clip.add(norm) for norm in (0.4, 1.0, 0.7, 0.999999, 1.0, 0.999999, 1.0)]
        >>> [line[:37] for line in lines if line]
        ['5 steps have a gradient norm of 1, an']

    Args:
        framework: the framework of the program, as `Driver.framework` names it.
    """

    def __init__(self, framework: str) -> None:
        self._framework = framework
        # Range of the norms that count as the highest norm of the run.
        self._lowest = 0.0
        self._highest = 0.0
        self._limit = 0.0
        """The limit that has this norm, or 0 if it is not the norm of a limit."""
        self._norms: list[float] = []
        """The last norms in this range, at most `CLIPPED_STEPS`."""
        self._is_found = False

    def add(self, norm: float) -> str:
        """Adds the norm of a step.

        Args:
            norm: global gradient norm of the step, as healcore measured it; may be NaN.

        Returns:
            A line for the log at the step that proves a clip, else "".
        """
        if self._is_found or not norm >= self._lowest:  # NaN is not comparable
            return ""
        if norm > self._highest:
            self._begin(norm)
            return ""
        self._norms = [*self._norms[1 - CLIPPED_STEPS :], norm]
        if not self._limit or len(self._norms) < CLIPPED_STEPS:
            return ""
        if _is_monotone(self._norms):  # a gradient that is constant or changes slowly
            return ""
        self._is_found = True
        clip = f'{{"max_norm": {self._limit:g}}}'
        return (
            f"{len(self._norms)} steps have a gradient norm of {self._limit:g}, and no step has a "
            "larger norm: the program clips its gradients before healcore measures them, so that "
            "a spike looks no larger than the limit. Remove the clip, and "
            f"{_ADVICE[self._framework].format(clip)}"
        )

    def _begin(self, norm: float) -> None:
        """Begins with a new highest norm."""
        limit = float(f"{norm:.2g}")  # rounds to two digits
        slack = _TOLERANCE * limit
        lowest = limit - slack - _EPSILON
        highest = limit + slack
        self._norms = [norm]
        if lowest <= norm <= highest and highest - lowest <= _EQUAL * limit:
            self._limit = limit
            self._lowest = lowest
            self._highest = highest
        else:
            self._limit = 0.0
            self._lowest = norm
            self._highest = norm


def _is_monotone(norms: list[float]) -> bool:
    """Whether the norms are equal, or only rise, or only fall."""
    rising = sorted(norms)
    return norms in (rising, rising[::-1])
