"""A script with `healcore.start`, whose run ends with its loop."""

from torch.utils.data import DataLoader

import healcore
from tests.pins.programs.interruptions import POLICY, RUN, Run, main
from tests.pins.programs.small_torch import Training, rows


def train(run: Run) -> None:
    training = Training()
    loader = DataLoader(rows(192), batch_size=4, shuffle=True)
    healer = healcore.start(
        POLICY, state=training.state, store=run.store, loss_fn=training.loss_fn, **RUN
    )
    for batch in healer.batches(loader):
        if training.step(run, healer, batch):
            return
    healer.close()
    training.end(run, healer)


if __name__ == "__main__":
    main(train)
