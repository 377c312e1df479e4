"""Two optimizers, which take their steps one after the other on each batch, as in a GAN."""

import torch
from torch.utils.data import DataLoader

from healcore import Healer
from tests.pins.programs.interruptions import POLICY, RUN, Run, main
from tests.pins.programs.small_torch import arrays_of, damage, rows


def train(run: Run) -> None:
    torch.manual_seed(0)
    maker = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 4))
    judge = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    both = torch.nn.ModuleDict({"maker": maker, "judge": judge})
    of_maker = torch.optim.AdamW(maker.parameters(), lr=1e-3)
    of_judge = torch.optim.SGD(judge.parameters(), lr=1e-2, momentum=0.9)
    loader = DataLoader(rows(64), batch_size=4, shuffle=True)
    state = {"both": both, "maker": of_maker, "judge": of_judge}

    def act(kind: str | None) -> bool:
        if kind == "damage":
            damage(judge)
        return kind == "break"

    with Healer(POLICY, state=state, store=run.store, **RUN) as healer:
        for batch in healer.batches(loader, epochs=3):
            step = healer.step
            made = maker(torch.randn(4, 4))
            loss = judge(made.detach()).sigmoid().mean() - judge(batch[1]).sigmoid().mean()
            healer.observe(loss, "judge")
            loss.backward()
            of_judge.step()
            of_judge.zero_grad()
            if act(run.interrupt("before", step)):
                return
            loss_of_maker = -judge(made).sigmoid().mean()
            healer.observe(loss_of_maker, "maker")
            loss_of_maker.backward()
            of_maker.step()
            of_maker.zero_grad()
            of_judge.zero_grad()
            run.trained(step, batch[0].tolist(), loss.item() + loss_of_maker.item())
            if act(run.interrupt("after", step)):
                return
    run.ended(healer.step, arrays_of(both, of_maker, of_judge))


if __name__ == "__main__":
    main(train)
