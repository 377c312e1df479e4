"""An iterator that cannot go back: a restart reads the earlier batches and drops them."""

import torch

from healcore import Healer
from tests.pins.programs.interruptions import POLICY, RUN, Run, main
from tests.pins.programs.small_torch import Training, rows


def train(run: Run) -> None:
    training = Training()
    table = rows(192)
    order = torch.randperm(192).tolist()
    batches = (list(table[order[start : start + 4]]) for start in range(0, 192, 4))
    with Healer(
        POLICY, state=training.state, store=run.store, loss_fn=training.loss_fn, **RUN
    ) as healer:
        for batch in healer.batches(batches):
            if training.step(run, healer, batch):
                return
    training.end(run, healer)


if __name__ == "__main__":
    main(train)
