"""`AnchorLosses`: evaluates the current weights and earlier weights on the same steps."""

from __future__ import annotations

from collections.abc import Sequence

from healcore.runtime.run.compare.comparison_state import ComparisonState
from healcore.runtime.run.compare.credit import Credit
from healcore.runtime.run.compare.evidence import Anchor
from healcore.runtime.run.compare.loss_function import Losses, LossFunction
from healcore.runtime.run.compare.trained_step import TrainedStep


class AnchorLosses:
    """Evaluates steps with the current weights and with the weights of an anchor.

    Weights that cannot be compared are dropped here, whoever asks for their losses: a comparison,
    the search for unusual batches, or the decision at the end of a run.

    Args:
        state: the state of the comparisons, with the anchors.
        credit: refilled if an anchor is dropped for which a verdict was pending.

    Attributes:
        loss_function: evaluates the `loss_fn`.
    """

    def __init__(
        self, *, loss_function: LossFunction, state: ComparisonState, credit: Credit
    ) -> None:
        self.loss_function = loss_function
        self._state = state
        self._credit = credit

    @property
    def is_enabled(self) -> bool:
        """Whether weights are compared, which requires a `loss_fn`.

        A `loss_fn` that fails is dropped, so the value may become False during a run. Then nothing
        is compared or held any more.
        """
        return self.loss_function.is_usable

    def losses_of(
        self, steps: Sequence[TrainedStep], anchor: Anchor, known: list[float] | None = None
    ) -> Losses | None:
        """`LossFunction.losses` of the current weights and an anchor's weights. Collective.

        Args:
            steps: the steps whose batches are evaluated.
            anchor: the earlier weights. It is dropped if the parameters have changed since.
            known: losses of the steps with the current weights, or None to evaluate these.

        Returns:
            Two lists with one loss per step, current and earlier weights; or None if the weights
            cannot be compared.
        """
        state = self._state
        losses = self.loss_function.losses(steps, anchor.weights, known)
        if not self.is_enabled:
            state.anchors.clear()
        elif losses is None:  # the parameters have changed: the next checkpoint makes an anchor
            state.anchors.remove(anchor)
            if state.verdict is not None:
                state.forget_trouble(self._credit)
        return losses
