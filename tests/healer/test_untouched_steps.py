"""The console line of an alarm says what was done in the step, also if nothing was done."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from healcore import Healer
from healcore import policy as policies
from healcore.core.step_record import StepRecord
from healcore.core.verdict import Action
from healcore.runtime.incidents.step_lines import enforced_text


@pytest.mark.parametrize("preset", ["default", "observe"])
def test_the_line_of_a_spike_says_that_nothing_is_changed(tmp_path, caplog, preset):
    caplog.set_level(logging.WARNING, logger="healcore")
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    noise = np.random.default_rng(0).normal(size=140)
    state = {"model": model, "optimizer": optimizer}
    with Healer(preset, state=state, store=tmp_path) as healer:
        for step in healer.batches(range(140)):
            optimizer.zero_grad()
            height = 50.0 if 120 <= step < 126 else 3.0 + 0.1 * noise[step]
            loss = model.weight.square().sum() * 1e-2 + height
            healer.observe(loss)
            loss.backward()
            optimizer.step()
    (line,) = [text for text in caplog.messages if text.startswith("step 120: loss spike; ")]
    assert "; nothing is changed" in line


@pytest.mark.parametrize(
    ("clip", "fields", "text"),
    [
        ("zclip", {}, "; nothing is changed"),
        ("zclip", {"skip": True}, "; skipped"),
        ("zclip", {"grad_scale": 0.25}, "; gradients × 0.25"),
        ("zclip", {"action": Action.ROLLBACK | Action.ALERT}, ""),
        ("zclip", {"action": Action.ALERT}, "; nothing is changed"),
        ("adagc", {}, ""),  # the record does not have the factors of the tensors
    ],
)
def test_what_was_done_in_a_step(clip, fields, text):
    engine = policies.loads(f'schema = 1\nname = "p"\n[clip]\nkind = "{clip}"\n').engine()
    zeros: Any = [0] * 15
    record = StepRecord(*zeros)._replace(**{"grad_scale": 1.0, **fields})
    assert enforced_text(record, engine) == text
