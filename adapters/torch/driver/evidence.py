"""Evidence from norms that were computed anyway.

On healthy steps this keeps one reference to a list of 0-d tensors; only a step with a cause is
read, and that waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from healcore.core.evidence import Evidence, standouts
from healcore.torch.measurement import Judged

Names = Callable[[Sequence[object]], list[str]]
"""Parameters -> their names."""


class EvidenceReader:
    """Remembers the last step of one optimizer without an alarm, and compares with it.

    Args:
        names: how parameters are called.
    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self._usual: Judged | None = None

    def healthy(self, step: Judged) -> None:
        """Takes a step without an alarm as what is usual."""
        self._usual = step if step.params else self._usual

    def of(self, step: Judged) -> tuple[Evidence, ...]:
        """What stood out in a step with an alarm, see `standouts`.

        Sharded norms are put together, so every rank has to ask about the same steps.
        """
        if not step.params:
            return ()  # only other ranks had gradients
        found, usual = step.on_host(), None
        if self._usual is not None:
            known = dict(zip(map(id, self._usual.params), self._usual.on_host(), strict=True))
            usual = np.array([known.get(id(p), 0.0) for p in step.params], np.float32)
        worst = standouts(found, usual)
        names = self._names([step.params[i] for i in worst])
        return tuple(Evidence(n, float(found[i])) for n, i in zip(names, worst, strict=True))
