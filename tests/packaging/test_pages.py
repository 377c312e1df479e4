"""The programs of README.md and of the pages run, and what the pages name exists."""

import ast
import itertools
import re
import runpy
import signal
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import healcore.torch
from healcore.jax import protect
from healcore.policy import Policy, load, loads
from healcore.runtime.run.rollback.next_trial import MAX_HOLDS, Trial, TroubleFacts, next_trial
from healcore.torch.trainers import healings_of
from tests import forked_programs

DOCS = Path(__file__).parents[2] / "docs"


def text(page: str) -> str:
    return (DOCS / page).read_text()


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), flags=re.M | re.S)


def snippet(page: str, part: str) -> str:
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


@pytest.mark.slow
def test_the_jax_snippets(tmp_path, monkeypatch, capsys):
    """The first three are one program; each other snippet takes names from the first one only."""
    flax = pytest.importorskip("flax")
    monkeypatch.chdir(tmp_path)
    optimizer, skipped, loop, nnx, linen, equinox, scan, half = blocks("jax.md")
    scope: dict[str, Any] = {}
    exec(optimizer, scope)
    good = scope["loader"][0]
    bad = jnp.full((32, 8), jnp.nan)
    exec(skipped, {**scope, "loader": [bad]})
    assert capsys.readouterr().out == "1\n1\n"
    exec(loop, scope)
    healer = scope["healer"]
    assert (healer.step, healer.report().ending) == (50, "completed")

    own = dict(scope)
    exec(nnx, own)
    assert (own["healer"].step, own["healer"].report().ending) == (50, "completed")
    norm = own["norm"]
    mean = norm.mean[...]
    assert mean.any()
    own["nnx_step"](own["model"], own["optimizer"], bad)
    assert jnp.array_equal(mean, norm.mean[...])
    closed = flax.nnx.jit(lambda batch: own["loss_of"](own["model"], batch))
    with pytest.raises(flax.errors.TraceContextError):
        closed(good)

    own = dict(scope)
    exec(linen, own)
    assert (own["healer"].step, own["healer"].report().ending) == (50, "completed")
    first, second = own["train_state"], own["healer"].state
    third = own["linen_step"](second, bad)
    assert not jnp.array_equal(first.batch_stats["BatchNorm_0"]["mean"], jnp.ones(8))
    for each in jax.tree.leaves(second.batch_stats):
        assert jnp.isfinite(each).all()
    jax.tree.map(np.testing.assert_array_equal, second.batch_stats, third.batch_stats)
    assert own["trained"] is not first.params

    exec(half, scope)
    after, scale = scope["half_step"](scope["state"], good, 2.0**3)
    kept, smaller = scope["half_step"](after, bad, 2.0**3)
    assert (scale, smaller) == (2.0**3, 2.0**2)
    assert not jnp.array_equal(after[0]["w"], scope["state"][0]["w"])
    assert jnp.array_equal(kept[0]["w"], after[0]["w"])

    exec(scan, scope)
    assert (scope["healer"].step, scope["losses"].shape) == (1000, (1000,))
    assert scope["losses"][-1] < scope["losses"][0]

    if find_spec("equinox"):
        exec(equinox, scope)
        scope["train_step"](scope["state"], good)


def test_the_rate_that_the_page_names_is_that_of_the_step_also_after_a_skip():
    found = re.search(r"`(schedule\(opt_state[^`]*)`", text("jax.md"))
    assert found
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    tx = protect(optax.adamw(schedule))
    params = {"w": jnp.ones(3)}
    opt_state = tx.init(params)
    rates = []
    for grad in (1.0, jnp.nan, 1.0):
        rates.append(float(eval(found[1], {"schedule": schedule, "opt_state": opt_state})))
        grads = {"w": jnp.full(3, grad)}
        opt_state = tx.update(grads, opt_state, params, value=1.0, learning_rate=rates[-1])[1]
    assert rates == pytest.approx([1.0, 0.9, 0.9])


def test_the_remedies_by_rollback_are_those_of_the_page():
    """Under `default`, with something unusual each time."""
    wanted = {}
    known, unknown = [{"": 0.1}], []
    for column, first, later in (
        ("the rate was too high", [{"": 1.0}], known),
        ("the rate was healthy", known, known),
        ("the rate is unknown", unknown, unknown),
    ):
        tried: list[Trial] = []
        while Trial.ACCEPT not in tried:
            rates = later if tried else first
            most = load("default").config().budget.lr_cuts
            facts = TroubleFacts(rates, {"": 0.1}, False, unusual=True, max_rate_limits=most)
            tried.append(next_trial(tried, facts))
        wanted[column] = [each for each, _ in itertools.groupby(tried)]
    words = {"limit": Trial.LIMIT_RATE, "change": Trial.REPEAT, "hold": Trial.HOLD}
    words |= {"accept": Trial.ACCEPT}
    table = re.search(r"^rollback \| .*\n(?:.+\n)+", text("how-it-decides.md"), re.M)
    assert table
    head, _, *rows = table[0].splitlines()
    columns = zip(*([cell.strip() for cell in row.split("|")] for row in rows), strict=True)
    found = dict(zip(head.split(" | "), columns, strict=True))
    for column, trials in wanted.items():
        said = [words[cell.split()[0]] for cell in found[column] if cell]
        assert [each for each, _ in itertools.groupby(said)] == trials, column
        assert said.count(Trial.HOLD) == MAX_HOLDS


def test_the_diagrams_are_those_of_the_script():
    drawn = runpy.run_path(str(DOCS / "diagrams.py"))["pictures"]()
    assert sorted(drawn) == ["rollback.svg", "step.svg"]
    for name, content in drawn.items():
        assert (DOCS / name).read_text() == content, "run python docs/diagrams.py"
        assert f"]({name})" in (DOCS / "how-it-decides.md").read_text()


@pytest.mark.slow
def test_the_snippets_one_after_the_other_and_the_lines_after_a_kill(tmp_path, monkeypatch):
    """The page quotes the lines of the second start."""
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    scope: dict[str, object] = {}
    for block in blocks("data-and-resume.md") + blocks("checkpoints.md"):
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
    assert [line.replace(str(tmp_path), "/home/me") for line in found] == quoted


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
def test_the_off_policy_loop_and_its_buffers(tmp_path, monkeypatch):
    """The loop trains, its environment is named, and both other buffers can be in a state."""
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


def test_the_ranks_snippet_on_one_rank(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (block,) = blocks("ranks.md")
    exec(block, {})
    assert not torch.distributed.is_initialized()
    assert list((tmp_path / "checkpoints").glob("step-*"))


HOLE = "…"
"""Stands for a value, in the page and in the collected f-strings."""


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


PAGE = "../README.md"
ROOT = DOCS.parent


def whole_change(page: str) -> tuple[str, str]:
    """The program of a page before and after the change that its first diff shows."""
    diff = blocks(page, "diff")[0]
    lines = diff.splitlines(keepends=True)
    assert {line[0] for line in lines} == {" ", "+", "-"}
    before = [line[1:] for line in lines if line[0] != "+"]
    after = [line[1:] for line in lines if line[0] != "-"]
    return "".join(before), "".join(after)


def test_the_names_links_and_quoted_lines_of_the_readme_exist():
    """Of the lines with trainers the names exist; `tests/examples` runs such programs."""
    assert blocks(PAGE) == []
    named = re.findall(r"healcore\.torch\.(\w+)\(", text(PAGE))
    assert {"heal_trainer"} < set(named) <= set(healcore.torch.__all__)
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text(PAGE))
    links += re.findall(r"src(?:set)?=\"([^\"]+)", text(PAGE))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
    quoted = re.findall(r"`(healcore: [^`]+)`$", text(PAGE), flags=re.M)
    assert len(quoted) == 3
    printed = text("tutorial.md").splitlines()
    assert [line for line in quoted if line not in printed] == []


def test_the_clone_line_has_the_url_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (commands,) = blocks(PAGE, "bash")
    assert f"git clone {project['urls']['Repository']}\n" in commands


NUMBER = re.compile(r"(?<![\w.#-])\d[\d,]*(?:\.\d+)?(?!\w)")


def prose(page: str) -> str:
    """A page without code, links and pictures."""
    kept = re.sub(r"^```.*?^```", "", text(page), flags=re.M | re.S)
    return re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]*>", " ", kept)


def numbers_in_results() -> list[float]:
    """Every number of the files in benchmarks/results, from which the tables are made."""
    found: list[float] = []
    for file in (ROOT / "benchmarks" / "results").glob("*.json"):
        found += [float(each) for each in re.findall(r"(?<=: )-?\d+(?:\.\d+)?", file.read_text())]
    return found


def test_each_number_of_the_readme_stands_in_a_results_file_or_on_another_page():
    """Home is made from README.md, so that Home has the same numbers."""
    pages = [each.relative_to(DOCS) for each in DOCS.rglob("*.md") if each.name != "index.md"]
    elsewhere = {each for page in pages for each in NUMBER.findall(text(str(page)))}
    results = numbers_in_results()
    unknown = []
    for number in NUMBER.findall(prose(PAGE)):
        decimals = len(number.partition(".")[2])
        value = float(number.replace(",", ""))
        measured = decimals > 0 and value in {round(each, decimals) for each in results}
        if number not in elsewhere and not measured:
            unknown.append(number)
    assert unknown == []


def test_the_table_of_programs_is_that_of_their_page():
    def rows(page: str) -> dict[str, list[str]]:
        cells = [re.split(r" *\| *", line.strip("| ")) for line in text(page).splitlines()]
        return {row[0]: row[1:] for row in cells}

    on_their_page = list(rows("programs.md").items())
    own = [row for row in rows(PAGE).items() if len(row[1]) == 3 and "program" not in row[0]]
    own = [(name, row) for name, row in own if not set(name) <= set("-|")]
    assert len(own) > 4
    for name, (healthy, fault, healed) in own:
        # Both begin with the program's name: `nanoGPT, 124 M` and nanoGPT `train.py`, 124 M.
        words = re.findall(r"[\w.]{3,}", name)
        same = [row for title, row in on_their_page if all(word in title for word in words)]
        wanted = [(row[2], row[5], row[6]) for row in same if len(row) == 9]
        assert (healthy, fault, healed) in wanted, name


def test_the_lines_that_skip_only():
    weight = torch.nn.Parameter(torch.ones(3))
    params = {"w": jnp.ones(3)}
    scope = {
        "optimizer": torch.optim.AdamW([weight]),
        "loss": weight.square().sum(),
        "optax_optimizer": optax.adamw(1e-3),
        "params": params,
        "grads": {"w": jnp.full(3, jnp.nan)},
    }
    cells = re.findall(r"`([^`\n]+)`", text(PAGE))
    attach, observe, protect, update = (
        next(cell for cell in cells if part in cell)
        for part in ("torch.attach", "heal.observe", "jax.protect", "tx.update")
    )
    exec(f"import healcore; {attach}; {observe}; {protect}", scope)
    scope |= {"opt_state": scope["tx"].init(params), "loss": jnp.float32(1.0)}
    exec(update, scope)
    assert not scope["updates"]["w"].any(), "a NaN step changes nothing"
    weight.grad = torch.full((3,), torch.nan)
    scope["optimizer"].step()
    assert torch.equal(weight.detach(), torch.ones(3))
    assert int(scope["heal"].metrics()["heal/skips"]) == 1


def test_the_diff_for_jax_is_the_same_on_both_pages():
    _, in_jax = blocks(PAGE, "diff")
    assert [in_jax] == blocks("jax.md", "diff")


def test_the_whole_change_in_jax(tmp_path, monkeypatch):
    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"] - 1) ** 2)

    class Interrupted(list):
        def __getitem__(self, index):
            if index == 3:
                signal.raise_signal(signal.SIGINT)
            return super().__getitem__(index)

    monkeypatch.chdir(tmp_path)
    good = jnp.ones((4, 3))
    bad = jnp.full((4, 3), jnp.nan)
    params = {"w": jnp.ones(3)}
    batches = [good, bad, *[good] * 4]
    before, after = whole_change("jax.md")
    scope = {"params": params, "loss_fn": loss_fn, "loader": [good]}
    exec(before, scope)
    assert not jnp.array_equal(scope["state"][0]["w"], params["w"])
    scope = {"params": params, "loss_fn": loss_fn, "loader": Interrupted(batches)}
    with pytest.raises(KeyboardInterrupt):
        exec(after, scope)
    assert scope["healer"].step in (3, 4)
    scope = {"params": params, "loss_fn": loss_fn, "loader": batches}
    exec(after, scope)  # the same program resumes
    healer = scope["healer"]
    healer.close()
    assert (healer.step, healer.report().counts["skips"]) == (6, 1)
    trained = healer.state[0]["w"]
    assert jnp.isfinite(trained).all()
    assert not jnp.array_equal(trained, params["w"])
    assert jnp.array_equal(trained, scope["state"][0]["w"])


def test_the_whole_change_in_torch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    good, bad = ((torch.full((4, 3), x), torch.ones(4, 1)) for x in (1.0, torch.nan))
    initial = model.weight.detach().clone()
    before, after = whole_change(PAGE)
    scope = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "loader": [*[good] * 12, *[bad] * 12, good],
    }
    exec(before, {**scope, "loader": [good]})
    assert not torch.equal(model.weight, initial)
    exec(after, scope)
    healer = scope["healer"]
    healer.close()
    assert torch.isfinite(model.weight).all()
    assert healer.rollbacks == 0  # the weights are finite: skipping them is enough
    assert healer.report().counts["skips"] == 12
    assert list(tmp_path.glob("run-1/step-*"))
