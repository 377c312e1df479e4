"""The snippets of the pages run, and the policies and presets that the pages name exist."""

from __future__ import annotations

import re
import runpy
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from healcore.policy import Policy, load, loads
from tests import forked_programs

DOCS = Path(__file__).parents[2] / "docs"


def text(page: str) -> str:
    return (DOCS / page).read_text()


def blocks(page: str, language: str = "python") -> list[str]:
    """The snippets of a page, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), flags=re.M | re.S)


def snippet(page: str, part: str) -> str:
    """The only snippet of a page that contains a text."""
    (found,) = [block for block in blocks(page) if part in block]
    return found


@pytest.mark.parametrize("page", ["choose-a-policy.md", "recipes.md", "evidence.md"])
def test_every_policy_loads_and_every_preset_exists(page):
    for block in blocks(page, "toml"):
        assert isinstance(loads(block, source=f"docs/{page}"), Policy)
    for name in re.findall(r"(?:attach|protect|Callback)\([^()]*?\"([\w.-]+)\"", text(page)):
        assert name == "mine.toml" or load(name)


def test_the_torch_snippets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    healers, reports, one = {}, [], "optimizer"
    for block in blocks("torch.md"):
        scope: dict[str, Any] = {"print": lambda *values: reports.extend(values)}
        exec(block, scope)  # each snippet has all that it needs
        if "healer" in scope:
            healer = scope["healer"]
            healers[healer.step] = sorted(healer._loop.driver.healings)
            assert healer.report().ending == "completed"
        else:
            assert scope["heal"].metrics()["heal/loss"].isfinite()
    assert healers == {50: [one], 10: [one], 20: ["of_D", "of_G"], 30: [one]}
    assert [each.engine for each in reports] == ["host"]


def test_the_jax_snippets(tmp_path, monkeypatch):
    """The first two are one program; each other snippet takes names from the first one only."""
    import jax.numpy as jnp

    monkeypatch.chdir(tmp_path)
    optimizer, loop, nnx, linen, equinox, half = blocks("jax.md")
    scope: dict[str, Any] = {}
    exec(optimizer, scope)
    exec(loop, scope)
    healer = scope["healer"]
    assert (healer.step, healer.report().ending) == (50, "completed")
    good, bad = scope["loader"][0], jnp.full((32, 8), jnp.nan)

    exec(nnx, scope)
    model, means = scope["model"], []
    for batch in (good, bad):
        scope["nnx_step"](model, scope["optimizer"], batch)
        means.append(model.mean[...])
    assert means[0].any()
    assert jnp.array_equal(*means)

    exec(linen, scope)
    states = [scope["train_state"]]
    for batch in (good, bad):
        states.append(scope["linen_step"](states[-1], batch))
    first, second, third = (each.batch_stats["mean"] for each in states)
    assert not jnp.array_equal(first, second)
    assert jnp.array_equal(second, third)

    assert "tx.init(params)" in equinox  # run by tests/jax/test_modules_with_functions.py

    exec(half, scope)
    before = scope["state"]
    after, scale = scope["half_step"](before, good, 2.0**3)
    assert scale == 2.0**3
    assert not jnp.array_equal(after[0]["w"], before[0]["w"])
    kept, scale = scope["half_step"](after, bad, 2.0**3)
    assert scale == 2.0**2
    assert jnp.array_equal(kept[0]["w"], after[0]["w"])


def test_the_diagrams_are_those_of_the_script():
    drawn = runpy.run_path(str(DOCS / "diagrams.py"))["pictures"]()
    assert sorted(drawn) == ["rollback.svg", "step.svg"]
    for name, content in drawn.items():
        assert (DOCS / name).read_text() == content, "run python docs/diagrams.py"
        assert f"]({name})" in (DOCS / "how-it-decides.md").read_text()


def test_the_snippets_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for block in blocks("data-and-resume.md"):
        exec(block, scope)


def test_the_lines_after_a_kill(tmp_path):
    """The page quotes the lines of the second start."""
    program = blocks("data-and-resume.md")[0]
    killed = f"import os\n{program}        if healer.step == 151:\n"
    killed += "            healer._loop.saver.store.wait()\n            os.kill(os.getpid(), 9)\n"
    for code, status in ((killed, -signal.SIGKILL), (program, 0)):
        run = forked_programs.run("-c", code, cwd=tmp_path, timeout=120)
        assert run.returncode == status, run.stderr
    found = re.findall(r"^healcore: .*$", run.stderr, flags=re.M)
    quoted = re.findall(r"^    (healcore: .*)$", text("data-and-resume.md"), flags=re.M)
    assert [line.replace(str(tmp_path), "/home/me") for line in found] == quoted


def test_the_ranks_snippet_on_one_rank(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (block,) = blocks("ranks.md")
    exec(block, {})
    assert not torch.distributed.is_initialized()
    assert list((tmp_path / "checkpoints").glob("step-*"))
