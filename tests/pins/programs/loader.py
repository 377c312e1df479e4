"""A shuffled DataLoader, read for three epochs by one loop."""

from torch.utils.data import DataLoader

from healcore import Healer
from tests.pins.programs.interruptions import POLICY, RUN, Run, main
from tests.pins.programs.small_torch import Training, rows


def train(run: Run) -> None:
    training = Training()
    loader = DataLoader(rows(64), batch_size=4, shuffle=True)
    with Healer(
        POLICY, state=training.state, store=run.store, loss_fn=training.loss_fn, **RUN
    ) as healer:
        for batch in healer.batches(loader, epochs=3):
            if training.step(run, healer, batch):
                return
    training.end(run, healer)


if __name__ == "__main__":
    main(train)
