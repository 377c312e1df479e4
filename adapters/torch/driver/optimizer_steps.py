"""`OptimizerSteps`: which optimizers have stepped for the last batch, and which have gradients."""

from __future__ import annotations

from collections.abc import Sequence

from healcore.torch.driver.accumulation import Accumulation


class OptimizerSteps:
    """The steps of all optimizers since the Healer has looked, seen together.

    One `Accumulation` knows one optimizer. Questions about the whole run need all of them, because
    an optimizer may step in every batch, in some batches, or not any more:

        GAN           both optimizers step for each batch, one after the other
        fine-tuning   the optimizer of the first stage does not step any more

    Args:
        accumulations: the gradients of each optimizer.

    Attributes:
        accumulations: the gradients of each optimizer.
        observed: whether a loss was observed since the last step of any optimizer. The driver sets
            it.
    """

    def __init__(self, accumulations: Sequence[Accumulation]) -> None:
        self.accumulations = accumulations
        self.observed = False
        self._usual = set(accumulations)
        """The accumulations whose optimizers stepped for the last batch; at first all."""

    @property
    def in_progress(self) -> bool:
        """Whether any optimizer has gradients that it has not stepped with."""
        return any(accumulation.in_progress for accumulation in self.accumulations)

    def end_batch(self, *, judged: bool) -> None:
        """Takes note of the optimizers that have stepped since the last call.

        Once each of several optimizers has stepped, their remaining gradients and losses are
        dropped as by-products: a GAN's generator loss also has gradients in the discriminator.

        Args:
            judged: whether any step was judged since the last call.
        """
        stepped = self._stepped()
        if stepped:
            self._usual = stepped
        for accumulation in self.accumulations:
            if judged and not accumulation.stepped:
                accumulation.idle += 1
            accumulation.stepped = False
        if len(self.accumulations) > 1 and len(stepped) == len(self.accumulations):
            for accumulation in self.accumulations:
                accumulation.drop_by_products()

    @property
    def has_backward(self) -> bool:
        """Whether a backward pass has run since the last step of any optimizer.

        An evaluation reads batches too, and has no backward pass.
        """
        return any(each.reached_since_any_step for each in self.accumulations)

    def may_save(self, patience: int | None) -> bool:
        """See `TorchDriver.may_save`.

        Args:
            patience: number of steps of the other optimizers after which gradients of an optimizer
                that does not step count as abandoned, or None to wait for every optimizer.
        """
        pending: list[Accumulation] = []
        for accumulation in self.accumulations:
            if accumulation.in_progress:
                pending.append(accumulation)
        has_begun = self.observed or self.has_backward
        for accumulation in pending:
            is_abandoned = patience is not None and accumulation.idle >= patience
            if has_begun or not is_abandoned:
                return False
        return True

    def is_incomplete(self) -> bool:
        """Whether some of the optimizers that stepped for the last batch have stepped, not all.

        For example the discriminator of a GAN, and not yet its generator.
        """
        stepped = self._stepped()
        return bool(stepped) and stepped < self._usual

    def _stepped(self) -> set[Accumulation]:
        """The optimizers that have stepped since the last `end_batch`."""
        return {accumulation for accumulation in self.accumulations if accumulation.stepped}
