"""One run with two optimizers, each with an engine of its own."""

import pytest
import torch

from healcore import Checkpoints, Healer
from tests.healer.run_directory import events
from tests.healer.training_loops import Faults, rules


def test_two_optimizers_are_one_run(tmp_path):
    torch.manual_seed(0)
    models = [torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in models]
    state = {"a": models[0], "b": models[1], "opt_a": optimizers[0], "opt_b": optimizers[1]}
    faults = Faults(always=[23])
    with Healer(rules(), state=state, store=tmp_path, checkpoints=Checkpoints(every=5)) as healer:
        for number in healer.batches(range(40)):
            inputs, targets = map(torch.from_numpy, faults.batch(number))
            for name, model in zip(("opt_a", "opt_b"), models, strict=True):
                loss = (model(inputs) - (targets if name == "opt_b" else inputs[:, :1])).square()
                healer.observe(loss.mean(), name)
                loss.mean().backward()
                state[name].step()
                state[name].zero_grad()
        assert healer.step == 39
        assert healer.rollbacks == 1
    (alarm,) = events(tmp_path, "alarm")
    assert alarm["engine"] == "opt_b"


@pytest.mark.slow
def test_gradients_of_an_optimizer_that_no_longer_steps_do_not_prevent_comparisons():
    torch.manual_seed(0)
    body, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (body, head)]
    state = {"a": body, "b": head, "opt_a": optimizers[0], "opt_b": optimizers[1]}
    calls = []

    def loss_fn(inputs):
        calls.append(healer.step)
        return head(body(inputs)).square().mean()

    with Healer("default", state=state, loss_fn=loss_fn) as healer:
        for inputs in healer.batches(list(torch.randn(400, 8, 4))):
            healer.loss(inputs * 50 if healer.step == 360 else inputs).backward()
            for optimizer in optimizers[healer.step > 20 :]:
                optimizer.step()
            optimizers[1].zero_grad()
    assert sum(step >= 360 for step in calls) > 40, "the loop's own calls alone"
