"""The programs of the pages run, and what the pages name exists."""

import ast
import re
import runpy
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest
import torch

import healcore.torch
from benchmarks.programs import __main__ as programs
from healcore.policy import Policy, load, loads
from healcore.torch.trainers.hook import healings_of
from tests import forked_programs
from tests.packaging.page_text import DOCS, HOLE, blocks, snippet, text


@pytest.mark.parametrize("page", ["choose-a-policy.md", "recipes.md", "evidence.md"])
def test_every_policy_loads_and_every_preset_exists(page):
    for block in blocks(page, "toml"):
        assert isinstance(loads(block, source=f"docs/{page}"), Policy)
    for name in re.findall(r"(?:attach|protect|Callback)\([^()]*?\"([\w.-]+)\"", text(page)):
        assert name == "mine.toml" or load(name)


def test_the_torch_snippets_run_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    healers = {}
    reports = []
    one = "optimizer"
    for block in blocks("torch.md"):
        scope: dict[str, Any] = {"print": lambda *values: reports.extend(values)}
        exec(block, scope)  # each snippet has all that it needs
        if "healer" in scope:
            healer = scope["healer"]
            healers[healer.step] = sorted(healings_of(healer))
            assert healer.report().ending == "completed"
        else:
            assert scope["heal"].metrics()["heal/loss"].isfinite()
    assert healers == {50: [one], 10: [one], 20: ["of_D", "of_G"], 30: [one]}
    assert [each.skip for each in reports] == [False]


def test_the_diagrams_are_those_of_the_script():
    drawn = runpy.run_path(str(DOCS / "diagrams.py"))["pictures"]()
    assert sorted(drawn) == ["rollback.svg", "step.svg"]
    for name, content in drawn.items():
        assert (DOCS / name).read_text() == content, "run python docs/diagrams.py"
        assert f"]({name})" in (DOCS / "how-it-decides.md").read_text()


def test_the_tables_of_programs_are_those_of_the_results():
    written = programs.tables(programs.saved_results())
    for table in written.split("\n\n"):
        assert f"\n{table}\n" in text("programs.md"), "python -m benchmarks.programs --table"


@pytest.mark.slow
def test_the_snippets_run_one_after_the_other_and_print_the_lines_after_a_kill(
    tmp_path, monkeypatch
):
    """The page quotes the lines of the second start."""
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    scope: dict[str, object] = {}
    for block in (
        blocks("data-and-resume.md") + blocks("changing-models.md") + blocks("checkpoints.md")
    ):
        if "import jax" in block:
            in_jax: dict[str, Any] = {}
            exec(block, in_jax)
            assert in_jax["healer"].step == 240
        else:
            exec(block, scope)
    program = blocks("data-and-resume.md")[0]
    imports = "import os\nfrom tests.open_run import run_of\n"
    killed = f"{imports}{program}        if healer.step == 151:\n"
    killed += "            run_of(healer).store.wait()\n            os.kill(os.getpid(), 9)\n"
    for code, status in ((killed, -signal.SIGKILL), (program, 0)):
        run = forked_programs.run("-c", code, cwd=tmp_path, timeout=120)
        assert run.returncode == status, run.stderr
    found = re.findall(r"^healcore: .*$", run.stderr, flags=re.M)
    quoted = re.findall(r"^    (healcore: .*)$", text("data-and-resume.md"), flags=re.M)
    shown = [line.replace(str(tmp_path), "/home/me") for line in found]
    assert without_kill(shown) == without_kill(quoted)


def without_kill(lines: list[str]) -> list[str]:
    """Lines without what differs in each kill: the last step on disk, and the file's name."""
    number = r"killed after step \d+ or later"
    file = r"healcore\.postmortem\.\S+\.json"
    return [re.sub(file, "FILE", re.sub(number, "killed", line)) for line in lines]


def test_a_lost_run_in_torch_continues_from_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = snippet("lost-run.md", 'torch.load("ckpt').replace("14_000 - 11_000", "20")
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    Path("ckpt").mkdir()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, "ckpt/11000.pt")
    new = torch.nn.Linear(3, 1)
    scope: dict[str, Any] = {
        "model": new,
        "optimizer": torch.optim.AdamW(new.parameters()),
        "loader": [torch.ones(4, 3)] * 8,
        "loss_fn": lambda batch: new(batch).square().mean(),
    }
    exec(program, scope)
    assert scope["healer"].step == 20
    steps = [each["step"] for each in scope["optimizer"].state_dict()["state"].values()]
    assert steps == [21, 21], "1 before the run was lost"


@pytest.mark.slow
def test_a_lost_run_in_jax_continues_from_its_orbax_folder(tmp_path, monkeypatch):
    orbax = pytest.importorskip("orbax.checkpoint")
    monkeypatch.chdir(tmp_path)
    program = snippet("lost-run.md", "StandardCheckpointer").replace("14_000 - 11_000", "20")
    program = program.replace("/home/me/ckpt", str(tmp_path / "ckpt"))
    optimizer = optax.adamw(1e-3)
    params = {"w": jnp.full(3, 2.0)}
    _, opt_state = optimizer.update({"w": jnp.ones(3)}, optimizer.init(params), params)
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "ckpt/11000", {"params": params, "opt_state": opt_state})
    scope: dict[str, Any] = {
        "params": {"w": jnp.zeros(3)},
        "rate": 1e-3,
        "loader": [jnp.ones((4, 3))] * 8,
        "loss_fn": lambda params, batch: jnp.mean((batch @ params["w"]) ** 2),
    }
    exec(program, scope)
    assert scope["healer"].step == 20
    assert scope["opt_state"].inner_state[0].count == 21, "1 before the run was lost"
    assert float(scope["params"]["w"][0]) == pytest.approx(2.0, abs=0.1)


@pytest.mark.slow
def test_the_off_policy_loop_trains_and_saves_its_buffers(tmp_path, monkeypatch):
    """The loop trains, and both other buffers can be in a state."""
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    for block in blocks("off-policy.md"):
        exec(block, scope)
    assert scope["healer"].step == scope["UPDATES"]
    ring, again = scope["Ring"](50), scope["Ring"](50)
    ring.seen[:3], ring.added = 7.0, 3
    store = healcore.torch.DCPStore(tmp_path / "ring")
    store.save(1, {"ring": ring})
    again.load_state_dict(store.restore(1, {"ring": again}).state["ring"])
    assert (again.added, again.seen[:3].tolist()) == (3, [[7.0]] * 3)
    written = sum(each.stat().st_size for each in (tmp_path / "ring").rglob("*.safetensors"))
    assert written < 50 * 4 + 3000, "the written part"
    assert (tmp_path / "replay-seen.npy").exists()


def test_the_ranks_snippet_runs_on_one_rank(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (block,) = blocks("ranks.md")
    exec(block, {})
    assert not torch.distributed.is_initialized()
    assert list((tmp_path / "checkpoints").glob("step-*"))


def strings(tree: ast.AST) -> Iterator[str]:
    """The string constants of a file without docstrings. A value in an f-string is a HOLE."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.JoinedStr):
            constants = [isinstance(part, ast.Constant) for part in node.values]
            parts = zip(node.values, constants, strict=True)
            yield "".join(str(part.value) if constant else HOLE for part, constant in parts)  # type: ignore
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        yield from strings(node)


@pytest.mark.slow
def test_each_message_that_the_faq_quotes_occurs_in_the_source():
    # healcore/torch and healcore/jax are links to adapters.
    files = [
        path for part in ("healcore", "adapters") for path in (DOCS.parent / part).rglob("*.py")
    ]
    source = "\n".join({each for path in files for each in strings(ast.parse(path.read_text()))})
    section = text("faq.md").partition("## By message")[2].partition("\n## ")[0]
    quoted = re.findall(r"^`([^`]+)`", section, re.M)
    assert len(quoted) > 10
    assert [each for each in quoted if each not in source or len(each.replace(HOLE, "")) < 12] == []
