"""A loop of its own accumulation: an optimizer step for each two batches.

The interruption comes after the first batch of a window, or after the window.
"""

from torch.utils.data import DataLoader

from healcore import Healer
from tests.pins.programs.interruptions import POLICY, RUN, Run, main
from tests.pins.programs.small_torch import Training, rows


def train(run: Run) -> None:
    training = Training()
    loader = DataLoader(rows(192), batch_size=2, shuffle=True)
    numbers: list[int] = []
    losses: list[float] = []
    with Healer(
        POLICY, state=training.state, store=run.store, loss_fn=training.loss_fn, **RUN
    ) as healer:
        for batch in healer.batches(loader):
            step = healer.step
            loss = healer.loss(batch)
            (loss / 2).backward()
            numbers += batch[0].tolist()
            losses.append(loss.item())
            if len(losses) == 1:
                if training.act(run.interrupt("before", step)):
                    return
                continue
            training.optimizer.step()
            training.scheduler.step()
            training.optimizer.zero_grad()
            run.trained(step, numbers, sum(losses))
            numbers, losses = [], []
            if training.act(run.interrupt("after", step)):
                return
    training.end(run, healer)


if __name__ == "__main__":
    main(train)
