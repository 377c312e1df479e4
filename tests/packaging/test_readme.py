"""What README.md says and shows: names, links, numbers, tables and programs."""

import re
import signal
import textwrap
import tomllib

import jax.numpy as jnp
import optax
import pytest
import torch

import healcore.torch
import mkdocs_hooks
from tests.packaging.page_text import DOCS, blocks, text, whole_change

PAGE = "../README.md"
ROOT = DOCS.parent


def test_the_names_links_and_quoted_lines_of_the_readme_exist():
    """Of the lines with trainers the names exist; `tests/examples` runs such programs."""
    assert blocks(PAGE) == []
    named = re.findall(r"healcore\.torch\.(\w+)\(", text(PAGE))
    assert {"heal_trainer"} < set(named) <= set(healcore.torch.__all__)
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text(PAGE))
    links += re.findall(r"src(?:set)?=\"([^\"]+)", text(PAGE))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
    quoted = [" ".join(block.split()) for block in blocks(PAGE, "text")]  # wrapped as in a terminal
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


def rows_of(page: str) -> dict[str, list[str]]:
    """The rows of all tables of a page: first cell -> other cells."""
    rows: dict[str, list[str]] = {}
    for line in text(page).splitlines():
        first, *others = re.split(r" *\| *", line.strip("| "))
        rows[first] = others
    return rows


def test_the_table_of_programs_is_that_of_their_page():
    of_programs: dict[str, list[str]] = {}
    for name, cells in rows_of(PAGE).items():
        is_heading = "program" in name or set(name) <= set("-|")
        if len(cells) == 3 and not is_heading:
            of_programs[name] = cells
    assert len(of_programs) > 4

    for name, cells in of_programs.items():
        # Both begin with the program's name: `nanoGPT, 124 M` and nanoGPT `train.py`, 124 M.
        words = re.findall(r"[\w.]{3,}", name)
        on_their_page = []
        for title, row in rows_of("programs.md").items():
            if len(row) == 8 and all(word in title for word in words):
                healthy, fault, healed = row[2], row[5], row[6]
                on_their_page.append([healthy, fault, healed])
        assert cells in on_their_page, name


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


def test_home_has_the_whole_change_for_torch_and_jax():
    """README.md itself has the change for torch, and a link to the change for JAX."""
    assert len(blocks(PAGE, "diff")) == 1
    assert "(docs/jax.md#the-whole-change)" in text(PAGE)
    page = mkdocs_hooks.home()
    for name, source in (("torch", PAGE), ("JAX", "jax.md")):
        assert f'=== "{name}"\n' in page
        assert textwrap.indent(blocks(source, "diff")[0], "    ") in page


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
