"""The README's snippets run, and its policy loads."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from healcore.policy import loads

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.M | re.S)


def snippet(part: str) -> str:
    (block,) = [block for block in blocks("python") if part in block]
    return block


JAX = ("tx = protect(", "healer.update(")
TORCH = ("attach(", "scheduler.step()")


def test_every_snippet_is_run():
    """Those with an ellipsis are run by `tests.packaging.trainers_ranks`."""
    whole = [block for block in blocks("python") if "(..." not in block]
    assert sorted(map(snippet, JAX + TORCH)) == sorted(whole)


def test_the_optax_snippets_one_after_the_other(tmp_path, monkeypatch):
    import jax.numpy as jnp

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"] - 1) ** 2)

    monkeypatch.chdir(tmp_path)
    good, bad = jnp.ones((4, 3)), jnp.full((4, 3), jnp.nan)
    first, params = [good, bad], {"w": jnp.ones(3)}
    scope = {"params": params, "loss_fn": loss_fn, "loader": first}
    exec(snippet(JAX[0]), scope)
    (kept, _), step = scope["state"], scope["train_step"]
    moved, _ = step((params, scope["tx"].init(params)), good)
    assert not jnp.array_equal(moved["w"], params["w"])
    assert jnp.array_equal(kept["w"], moved["w"])
    fresh = scope["state"] = params, scope["tx"].init(params)

    class Interrupted(list):
        def __getitem__(self, index):
            if index == 3:
                signal.raise_signal(signal.SIGINT)
            return super().__getitem__(index)

    batches = [good, bad, *[good] * 4]
    scope["loader"] = Interrupted(batches)
    with pytest.raises(KeyboardInterrupt):
        exec(snippet(JAX[1]), scope)
    assert scope["healer"].step in (3, 4)
    scope |= {"loader": batches, "state": fresh}  # as the same program begins again
    exec(snippet(JAX[1]), scope)
    healer = scope["healer"]
    assert (healer.step, healer.report().counts["skips"]) == (6, 1)
    assert jnp.array_equal(healer.state[0]["w"], scope["state"][0]["w"])


def test_the_torch_snippets_one_after_the_other(tmp_path, monkeypatch):
    import torch

    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    bad = torch.full((4, 3), torch.nan)
    scope = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "loss_fn": lambda model, batch: (model(batch) - 1).square().mean(),
        "loader": [torch.ones(4, 3), bad],
    }
    before = model.weight.detach().clone()
    exec(snippet(TORCH[0]), scope)
    assert torch.isfinite(model.weight).all()
    assert not torch.equal(model.weight, before)
    assert int(scope["heal"].metrics()["heal/skips"]) == 1
    scope["loader"] = [*[torch.ones(4, 3)] * 12, *[bad] * 12, torch.ones(4, 3)]
    exec(snippet(TORCH[1]), scope)
    assert torch.isfinite(model.weight).all()
    assert scope["healer"].rollbacks == 0  # the weights are finite: skipping them is enough
    assert list(tmp_path.glob("checkpoints/step-*"))


def test_torch_snippets_on_two_ranks(tmp_path):
    """Unchanged, on ranks with data of their own, one of which gets two batches that are NaN."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.packaging.readme_ranks", tmp_path],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    attached, healed, again = map(json.loads, done.stdout.splitlines())
    for found in (attached, healed):
        first, second = found["ranks"]
        assert first == second, "all ranks have the same weights and moments"
        assert first["steps"] == 16 - 2, "and have skipped both batches"
    assert (attached["saved"], healed["saved"]) == ([], [0, 16])
    assert (again["statuses"], again["ranks"]) == ([0, 0], [])
    assert "nothing to do" in again["errors"][0]


def test_policy_snippet():
    (text,) = blocks("toml")
    policy = loads(text)
    assert policy.engine().cuts_lr


def test_the_two_commands_are_targets_of_the_makefile():
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    commands = re.findall(r"^    make (\w+) ", README, flags=re.M)
    assert commands == ["demo", "test"]
    for command in commands:
        assert re.search(rf"^{command}:", makefile, flags=re.M)


def test_local_links_exist():
    root = Path(__file__).parents[2]
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert links
    assert [link for link in links if not (root / link).exists()] == []
