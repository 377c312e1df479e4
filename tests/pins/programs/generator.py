"""A stream that a function makes for each epoch, shuffled by the number of the epoch."""

import random
from collections.abc import Iterator
from typing import Any

from healcore import Healer
from tests.pins.programs.interruptions import POLICY, RUN, Run, main
from tests.pins.programs.small_torch import Training, rows


def stream(epoch: int) -> Iterator[Any]:
    table = rows(64)
    order = random.Random(epoch).sample(range(64), 64)
    for start in range(0, 64, 4):
        yield list(table[order[start : start + 4]])


def train(run: Run) -> None:
    training = Training()
    with Healer(
        POLICY, state=training.state, store=run.store, loss_fn=training.loss_fn, **RUN
    ) as healer:
        for batch in healer.batches(lambda: stream(healer.epoch), epochs=3):
            if training.step(run, healer, batch):
                return
    training.end(run, healer)


if __name__ == "__main__":
    main(train)
