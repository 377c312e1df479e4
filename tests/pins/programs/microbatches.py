"""A loop with `healer.microbatches`. Out of memory splits its batches instead of ending it.

A batch has two rows, and its model adds in no order of its own, so that the gradient of two halves
has the bits of the whole batch's.
"""

import torch
from torch.utils.data import DataLoader

from healcore import Healer
from tests.pins.programs.interruptions import POLICY, RUN, Run, main
from tests.pins.programs.small_torch import arrays_of, damage, rows


class Elementwise(torch.nn.Module):
    """A regression without matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), 0.25))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth = (inputs * self.weight).unbind(1)
        return (first + second + third + fourth).tanh()[:, None]


def train(run: Run) -> None:
    torch.manual_seed(0)
    model = Elementwise()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(rows(96), batch_size=2, shuffle=True)

    def loss_fn(batch: list[torch.Tensor]) -> torch.Tensor:
        return (model(batch[1]) - batch[2]).square().mean()

    state = {"model": model, "optimizer": optimizer}
    with Healer(POLICY, state=state, store=run.store, loss_fn=loss_fn, **RUN) as healer:
        for batch in healer.batches(loader):
            step, losses = healer.step, torch.zeros(())
            for part in healer.microbatches(batch):
                with part:
                    kind = run.interrupt("before", step)
                    if kind == "damage":
                        damage(model)
                    loss = healer.loss(part.batch)
                    (loss * part.weight).backward()
                    losses += loss.detach() * part.weight
            optimizer.step()
            optimizer.zero_grad()
            run.trained(step, batch[0].tolist(), losses.item())
            kind = run.interrupt("after", step)
            if kind == "damage":
                damage(model)
            if kind == "break":
                return
    run.ended(healer.step, arrays_of(model, optimizer))


if __name__ == "__main__":
    main(train)
