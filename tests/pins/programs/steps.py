"""A loop over the numbers of the steps, which makes its batches from them."""

import torch

from healcore import Healer
from tests.pins.programs.interruptions import POLICY, RUN, Run, main
from tests.pins.programs.small_torch import Training


def batch_of(step: int) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(step)
    inputs = torch.randn(4, 4, generator=make)
    return [torch.tensor([step]), inputs, inputs.sum(1, keepdim=True).tanh()]


def train(run: Run) -> None:
    training = Training()
    with Healer(
        POLICY, state=training.state, store=run.store, loss_fn=training.loss_fn, **RUN
    ) as healer:
        for step in healer.steps(48):
            if training.step(run, healer, batch_of(step)):
                return
    training.end(run, healer)


if __name__ == "__main__":
    main(train)
