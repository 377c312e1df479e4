"""A loop over epochs, with an evaluation after each that draws random numbers."""

import torch
from torch.utils.data import DataLoader

from healcore import Healer
from tests.pins.programs.interruptions import POLICY, RUN, Run, main
from tests.pins.programs.small_torch import Training, rows


def train(run: Run) -> None:
    training = Training()
    loader = DataLoader(rows(64), batch_size=4, shuffle=True)
    validation = DataLoader(rows(8), batch_size=4, shuffle=True)
    with Healer(
        POLICY, state=training.state, store=run.store, loss_fn=training.loss_fn, **RUN
    ) as healer:
        for epoch in healer.epochs(3):
            for batch in healer.batches(loader, epoch=epoch):
                if training.step(run, healer, batch):
                    return
            if healer.will_repeat_epoch:
                continue
            healer.save()
            with torch.no_grad():
                losses = [training.loss_fn(batch).item() for batch in validation]
            healer.observe(eval_loss=sum(losses))
    training.end(run, healer)


if __name__ == "__main__":
    main(train)
