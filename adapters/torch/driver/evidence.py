"""Which tensors' gradients were not finite or stood out, from norms that were computed anyway.

On healthy steps this keeps one reference to a list of 0-d tensors; only a step with a cause is
read, and that waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from healcore.core import numerics
from healcore.runtime.driver import Evidence
from healcore.torch.measurement import Judged

MOST = 10
"""Tensors named at most."""

STANDS_OUT = 4.0
"""Times its norm at the last calm step. From one calm step of the demo's transformer to the next a
tensor's norm grows to 2.1 times (99th percentile of 4,116), 3.5 at most."""

Names = Callable[[Sequence[object]], list[str]]
"""Parameters -> their names."""


class Witness:
    """Remembers the last calm step of one optimizer, and compares with it.

    Args:
        names: how parameters are called.
    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self._calm: Judged | None = None

    def calm(self, step: Judged) -> None:
        """Takes a step without a cause as what is usual."""
        self._calm = step if step.params else self._calm

    def evidence(self, step: Judged) -> tuple[Evidence, ...]:
        """What was unusual in a step: non-finite first, then by how many times its usual norm.

        Sharded norms are put together, so every rank has to ask about the same steps.
        """
        if not step.params:
            return ()  # only other ranks had gradients
        found = step.on_host()
        usual: dict[int, float] = {}
        if self._calm is not None:
            values = self._calm.on_host().tolist()
            usual = dict(zip(map(id, self._calm.params), values, strict=True))
        scores = [
            _score(norm, usual.get(id(p), 0.0))
            for p, norm in zip(step.params, found.tolist(), strict=True)
        ]
        worst = sorted(range(len(scores)), key=lambda i: -scores[i])[:MOST]
        worst = [i for i in worst if scores[i] >= STANDS_OUT]
        names = self._names([step.params[i] for i in worst])
        return tuple(Evidence(n, float(found[i])) for n, i in zip(names, worst, strict=True))


def _score(norm: float, usual: float) -> float:
    """Times the usual norm; infinite for what no step may have, 0 where nothing is usual."""
    if not norm <= numerics.HUGE:
        return float("inf")
    return norm / usual if usual > 0 else 0.0
