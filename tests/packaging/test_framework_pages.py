"""Snippets of docs/torch.md and docs/jax.md run; the diagrams are those of docs/diagrams.py."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str) -> list[str]:
    """The Python snippets of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.M | re.S)


def test_the_torch_snippets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    healers, reports = {}, []
    for block in blocks("torch.md"):
        scope: dict[str, Any] = {"print": lambda *values: reports.extend(values)}
        exec(block, scope)  # each snippet has all that it needs
        if "healer" in scope:
            healer = scope["healer"]
            healers[healer.step] = sorted(healer.driver.healings)
            assert healer.report().ending == "completed"
        else:
            assert scope["heal"].metrics()["heal/loss"].isfinite()
    assert healers == {50: ["optimizer"], 10: ["optimizer"], 20: ["of_D", "of_G"]}
    assert [each.mode for each in reports] == ["heal"]


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
