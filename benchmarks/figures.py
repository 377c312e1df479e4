"""Writes the measured figures of README.md and docs/ from the results in benchmarks/results.

    python -m benchmarks.figures            # writes every marked figure
    python -m benchmarks.figures --check    # writes nothing; status 1 if a page is stale

A page marks a figure with two comments, `<!--=NAME-->1.43<!--/-->`; NAME is a key of `FIGURES`. A
table stands between such comments on lines of their own, a sentence has them within a line.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from healcore.runtime.dominance.dominance import STEP_COST

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COMMIT = "81f07582"
"""Commit whose code has made all results. Whoever makes a result again makes all of them again."""

MARKED = re.compile(r"<!--=([\w.-]+)-->(.*?)<!--/-->", re.S)


@functools.cache
def read_result(name: str) -> dict[str, Any]:
    """The content of a result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


# -- healbench -------------------------------------------------------------------------------------

ARMS = {
    "nothing": "no protection",
    "attach_default": "`attach` or `protect`",
    "healer": "`Healer`",
    "healer_ask": "`Healer` with a `loss_fn`",
}
"""The arms of the promise, with the names that the pages use."""


@functools.cache
def _cells() -> list[Any]:
    from benchmarks.healbench.__main__ import RESULTS, all_tasks
    from benchmarks.healbench.comparing import compare
    from benchmarks.healbench.running import read_results

    return compare([run for run in read_results(RESULTS) if run.arm in ARMS], all_tasks())


def _healthy(*arms: str) -> list[Any]:
    return [c for c in _cells() if c.task.kind == "healthy" and c.arm in arms]


def _on() -> tuple[str, ...]:
    return tuple(ARMS)[1:]


def promise() -> str:
    """One row for each entry point: healthy tasks that hold, and the cure of each kind of fault."""
    from benchmarks.healbench.comparing import geometric_mean
    from benchmarks.healbench.peers import FAMILIES

    rows = [["", "healthy tasks kept", *FAMILIES.values()]]
    for arm, title in ARMS.items():
        kept = _kept(arm) if arm in _on() else ""
        cures = []
        for family in FAMILIES:
            some = [c for c in _cells() if c.arm == arm and c.task.family == family and c.ratios]
            cures.append(_short(geometric_mean(c.ratio for c in some)))
        rows.append([title, kept, *cures])
    return _table(rows)


def rolled_back() -> str:
    """Healthy runs that were rolled back, with their metrics and those without healcore."""
    off = {c.name: c for c in _healthy("nothing")}
    rows = [["task", "", "seed", "with healcore", "without"]]
    for cell, run in _rolled_back():
        plain = off[cell.name].metrics[run.seed]
        rows.append(
            [f"`{cell.name}`", ARMS[cell.arm], str(run.seed), f"{run.value:.3g}", f"{plain:.3g}"]
        )
    return _table(rows)


def _rolled_back() -> list[tuple[Any, Any]]:
    return [(cell, run) for cell in _healthy(*_on()) for run in cell.runs if run.rollbacks]


def not_kept() -> str:
    """The healthy tasks that do not hold, with the mean difference of each entry point."""
    from benchmarks.healbench.comparing import shown

    rows = [["task", "", "difference", "runs that end at a lower learning rate"]]
    for cell in _healthy(*_on()):
        if not cell.holds:
            low = f"{cell.rate_left_low} of {len(cell.runs)}" if cell.rate_left_low else ""
            rows.append([f"`{cell.name}`", ARMS[cell.arm], shown(cell.against), low])
    return _table(rows)


def _worse_sick(*arms: str) -> list[tuple[Any, list[int]]]:
    """Sick tasks with seeds whose metric is more than 2 % above the metric without healcore."""
    from benchmarks.healbench.comparing import MARGIN

    plain = {c.name: c.metrics for c in _cells() if c.arm == "nothing"}
    found = []
    for cell in _cells():
        if cell.task.kind == "sick" and cell.arm in arms:
            off = plain[cell.name]
            limit = 1 + MARGIN / 100
            seeds = [s for s in off if not cell.metrics.get(s, float("inf")) <= limit * off[s]]
            seeds = [s for s in seeds if off[s] == off[s]]
            if seeds:
                found.append((cell, seeds))
    return found


def worse_sick() -> str:
    """Sick tasks that end worse with a `loss_fn` than without healcore, with their seeds."""
    rows = [["task", "", "seeds", "largest: with healcore", "without"]]
    plain = {c.name: c.metrics for c in _cells() if c.arm == "nothing"}
    for cell, seeds in _worse_sick("healer_ask"):
        off = plain[cell.name]
        worst = max(seeds, key=lambda s: cell.metrics.get(s, float("inf")) / off[s])
        ours = f"{cell.metrics[worst]:.3g}" if worst in cell.metrics else "stopped, no result"
        many = f"{len(seeds)} of {len(cell.runs)}"
        rows.append([f"`{cell.name}`", ARMS[cell.arm], many, ours, f"{off[worst]:.3g}"])
    return _table(rows)


@functools.cache
def peers() -> str:
    """The table of `benchmarks.healbench.peers`."""
    from benchmarks.healbench import peers as module
    from benchmarks.healbench.table import markdown

    return markdown(list(module.figures()))


# -- cost ------------------------------------------------------------------------------------------

TORCH_STEPS = {
    "clip_grad_norm_ + adamw": "`clip_grad_norm_` + AdamW",
    "adamw": "AdamW without a clip",
    "healcore zclip": "`attach`, policy `zclip`",
    "healcore default": "`attach`, policy `default`",
    "Healer default": "`Healer`, policy `default`",
    "zclip 1.0.0 + adamw": "package `zclip` 1.0.0",
    "smartclip + adamw": "package `smartclip`",
}
JAX_STEPS = {
    "clip_by_global_norm + adamw": "`clip_by_global_norm` + AdamW",
    "adamw": "AdamW without a clip",
    "heal_zclip + adamw": "`heal_zclip`",
    "protect(adamw), default": "`protect`, policy `default`",
}


def _steps(part: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {each["name"].strip(): each for each in part}


def _torch_ratio(name: str) -> str:
    return f"{_steps(read_result('step_overhead')['torch']['steps'])[name]['ratio']:.2f}"


def torch_steps() -> str:
    """The ratios of a torch step to the clipped step, and the host syncs."""
    measured = read_result("step_overhead")["torch"]
    found = _steps(measured["steps"])
    rows = [
        [f"torch {measured['version'].partition('+')[0]}, fused AdamW, CPU", "ratio", "host syncs"]
    ]
    for name, title in TORCH_STEPS.items():
        if name in found:
            rows.append([title, f"{found[name]['ratio']:.2f}", str(found[name]["syncs"])])
    return _table(rows)


def jax_steps() -> str:
    """The ratios of a JAX step to the clipped step."""
    measured = read_result("step_overhead")["jax"]
    found = _steps(measured["steps"])
    rows = [[f"JAX {measured['version']}, jitted, donated, CPU", "ratio"]]
    rows += [[title, f"{found[name]['ratio']:.2f}"] for name, title in JAX_STEPS.items()]
    return _table(rows)


def short_steps() -> str:
    """The ratios of both frameworks in one table."""
    measured = read_result("step_overhead")
    torch, jax = (_steps(measured[name]["steps"]) for name in ("torch", "jax"))
    rows = [["", "torch", "JAX"]]
    for title, in_torch, in_jax in (
        ("optimizer with a fixed clip", "clip_grad_norm_ + adamw", "clip_by_global_norm + adamw"),
        ("`attach`, `protect`", "healcore default", "protect(adamw), default"),
        ("`Healer`, between two saves", "Healer default", ""),
        ("optimizer without a clip", "adamw", "adamw"),
    ):
        cells = [f"{torch[in_torch]['ratio']:.2f}"]
        cells.append(f"{jax[in_jax]['ratio']:.2f}" if in_jax else "not measured")
        rows.append([title, *cells])
    return _table(rows)


def small_steps() -> str:
    """The same where the fixed cost of a step shows."""
    measured = read_result("step_overhead")
    tiny, jitted = _steps(measured["torch"]["tiny"]), _steps(measured["jax_tiny"]["steps"])
    clip, ours = jitted["clip_by_global_norm + adamw"], jitted["protect(adamw), default"]
    rows = [["small model", "ratio"]]
    rows.append(
        [
            "torch, `attach`: a whole step, 10,000 parameters",
            f"{tiny['healcore default']['ratio']:.2f}",
        ]
    )
    rows.append(["JAX, `protect`: an optimizer step, 1,000 parameters", f"{ours['ratio']:.2f}"])
    rows.append(
        [
            f"JAX, `protect`: compile time, {ours['compile_s']:.1f} s with, "
            f"{clip['compile_s']:.1f} s without",
            f"{ours['compile_s'] / clip['compile_s']:.1f}",
        ]
    )
    return _table(rows)


def saves() -> str:
    """The ratios of saves and restores to the same work without healcore."""
    measured = read_result("rollback")

    def ratio(framework: str, what: str, name: str) -> str:
        part = measured[framework].get(what)
        return f"{_steps(part)[name]['ratio']:.2f}" if part else ""

    rows = [["", "compared with", "torch", "JAX"]]
    for title, other, what, name in (
        (
            "`MemoryStore.save`, until training continues",
            "a plain copy",
            "memory, save",
            "MemoryStore.save",
        ),
        (
            "`MemoryStore.save`, until the copy is verified",
            "a plain copy",
            "memory, save",
            "and inspected",
        ),
        (
            "`MemoryStore.restore`, verified",
            "a plain copy",
            "memory, restore",
            "MemoryStore.restore",
        ),
    ):
        rows.append([title, other, ratio("torch", what, name), ratio("jax", what, name)])
    rows.append(
        [
            "`DCPStore`, until it is on disk",
            "`dcp.async_save`",
            ratio("torch", "disk", "DCPStore"),
            "",
        ]
    )
    rows.append(
        [
            "`OrbaxStore`, until it is on disk",
            "Orbax, asynchronous, without compression",
            "",
            ratio("jax", "disk, not compressed", "OrbaxStore"),
        ]
    )
    return _table(rows)


# -- detectors, goodput, demo ----------------------------------------------------------------------


def detectors() -> str:
    """Found events and false incidents of healcore's policies and of published rules."""
    rows = [["rule", "Llama 8B, found", "AlgoPerf, found", "false per 10,000 rows"]]
    for rule, families in read_result("detectors")["scores"].items():
        found = []
        for family in ("llama_8b", "algoperf/spiky"):
            one = families.get(family)
            found.append(f"{one['found']} of {one['events']}" if one and one["events"] else "")
        total = sum(one["rows"] for one in families.values())
        false = sum(one["false_incidents"] for one in families.values())
        rows.append([rule, *found, f"{1e4 * false / total:.2f}"])
    return _table(rows)


@functools.cache
def _zclip(part: str) -> str:
    from benchmarks import zclip_table

    runs = read_result("zclip_table")["runs"]
    rows = (
        zclip_table.claim_table(runs) if part == "claims" else zclip_table.sweep_table(runs, part)
    )
    return _table(rows)


def _goodput(part: str) -> str:
    from benchmarks.goodput.__main__ import tables

    return _table(tables(read_result("goodput"))[part])


def _person_minutes() -> str:
    """Minutes until a person repairs, from which on `default` with a `loss_fn` gains."""
    from benchmarks.goodput.__main__ import person_break_even

    return f"{person_break_even(read_result('goodput')) / 60:.0f} minutes"


def _pauses() -> str:
    """Seconds of a save and of a restore."""
    from benchmarks.goodput.__main__ import pauses

    return "a save {:.2f} s, a restore {:.2f} s".format(*pauses(read_result("goodput")))


def demo_short() -> str:
    """Three rows: the loss on unseen text at the end, by framework."""
    measured = read_result("demo")
    rows = [["300 steps, the same data and faults", "torch: final loss", "JAX: final loss"]]
    titles = {
        "unprotected": "unprotected",
        "fixed clip": "gradient norm clipped to 1.0",
        "healed": "**healcore**",
    }
    for arm, title in titles.items():
        cells = [_demo_loss(measured["runs"], framework, arm) for framework in ("torch", "jax")]
        rows.append([title, *cells])
    return _table(rows)


def _demo_loss(runs: Iterable[dict[str, Any]], framework: str, arm: str) -> str:
    (run,) = [r for r in runs if (r["framework"], r["arm"]) == (framework, arm)]
    loss = run["held_out_loss"]
    text = f"{loss:.2f}" if isinstance(loss, float) else "NaN"
    back = run["rollbacks"]
    said = f", after {len(back)} rollback{'s' * (len(back) != 1)}" if back else ""
    return f"**{text}**{said}" if arm == "healed" else text


def demo_table() -> str:
    """One row for each run of the demo."""
    rows = [
        ["run", "loss before the empty batch", "loss on unseen text", "skips", "clips", "rollbacks"]
    ]
    for run in read_result("demo")["runs"]:
        back = ", ".join(f"{r['onset']} → {r['checkpoint']}" for r in run["rollbacks"])
        name = f"{run['framework']} {run['arm']}"
        numbers = [run["loss_before"], run["held_out_loss"]]
        losses = [f"{x:.2f}" if abs(x) < 1000 else f"{x:.0e}" for x in map(float, numbers)]
        losses = [each.replace("nan", "NaN") for each in losses]
        rows.append([name, *losses, str(run["skips"]), str(run["clips"]), back])
    return _table(rows)


def demo_claims() -> str:
    """The claims of the torch runs, as the demo prints them."""
    lines = [
        f"{'ok' if claim['holds'] else 'BROKEN':6} {claim['text']}"
        for claim in read_result("demo")["claims"]
        if claim["text"].startswith("torch")
    ]
    return "```text\n" + "\n".join(lines) + "\n```"


# -- GPU -------------------------------------------------------------------------------------------

NEVER_ON_GPU = "**healcore has never been run on a GPU.**"
"""The only place that says so; the first results replace it."""


def gpu(file: Path = RESULTS / "gpu.json") -> str:
    """What `make gpu` has found on which device, or that there is no result.

    Only a GPU can renew the results, so they name their commit.
    """
    if not file.exists():
        return NEVER_ON_GPU
    result = json.loads(file.read_text())
    made = f"healcore {result['healcore']}, commit {result.get('commit') or 'unknown'}"
    rows = [["check", "outcome", "found"]]
    for name, found in result["checks"].items():
        rows.append([f"`{name}`", found["outcome"], _found_on_gpu(found)])
    return f"Run on {result['device']}, {result['date']}, with {made}:\n\n{_table(rows)}"


def _found_on_gpu(found: dict[str, Any]) -> str:
    """The result of a check in one cell: ratios of a step, or names and values."""
    if "torch" in found:
        steps = {each["name"]: f"{each['ratio']:.2f}" for each in found["torch"]["steps"]}
        shown = {title: steps[name] for name, title in TORCH_STEPS.items() if name in steps}
    else:
        hidden = ("outcome", "seconds", "log")
        shown = {name: value for name, value in found.items() if name not in hidden}
    cells = (f"{name}: {_value(value)}" for name, value in shown.items())
    return "; ".join(cells).replace("|", "/").replace("\n", " ")


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_value(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


# -- pages -----------------------------------------------------------------------------------------


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 2 else f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines)


def _machine(name: str) -> Callable[[], str]:
    return lambda: read_result(name)["machine"].partition(", Linux")[0]


FIGURES: dict[str, Callable[[], str]] = {
    "promise": promise,
    "promise.not-kept": not_kept,
    "promise.rolled-back": rolled_back,
    "promise.worse-sick": worse_sick,
    "promise.runs": lambda: f"{sum(len(c.runs) for c in _cells()):,}",
    "promise.healthy-runs": lambda: f"{sum(len(c.runs) for c in _healthy(*_on())):,}",
    "commit": lambda: f"`{COMMIT}`",
    "promise.rollbacks": lambda: str(len(_rolled_back())),
    "promise.attach": lambda: _kept("attach_default"),
    "promise.healer": lambda: _kept("healer"),
    "promise.loss-fn": lambda: _kept("healer_ask"),
    "promise.lr": lambda: _cure("healer_ask", "learning rate"),
    "promise.lr-nothing": lambda: _cure("nothing", "learning rate"),
    "promise.worse-runs": lambda: str(sum(len(s) for _, s in _worse_sick("healer_ask"))),
    "promise.sick-runs": lambda: str(
        sum(len(c.runs) for c in _cells() if c.task.kind == "sick" and c.arm == "healer_ask")
    ),
    "peers": peers,
    "step.short": short_steps,
    "step.torch": torch_steps,
    "step.jax": jax_steps,
    "step.small": small_steps,
    "step.machine": _machine("step_overhead"),
    "step.parameters": lambda: f"{read_result('step_overhead')['parameters'] / 1e6:.1f} M",
    "step.rounds": lambda: str(read_result("step_overhead")["rounds"]),
    "step.device-engine": lambda: _torch_ratio("healcore default, device engine"),
    "step.heartbeat": lambda: f"{read_result('step_overhead')['heartbeat_ns'] / 1e3:.1f} µs",
    "comparisons": lambda: f"{_passes(''):.0f}",
    "comparisons.later": lambda: f"{_passes('later_'):.0f}",
    "comparisons.share": lambda: f"{_passes('later_') / 1e3 / STEP_COST:.1%}",
    "comparisons.share-whole": lambda: f"{_passes('') / 1e3 / STEP_COST:.1%}",
    "saves": saves,
    "saves.machine": _machine("rollback"),
    "detectors": detectors,
    "zclip.torch": lambda: _zclip("torch"),
    "zclip.jax": lambda: _zclip("jax"),
    "zclip.claims": lambda: _zclip("claims"),
    "zclip.machine": _machine("zclip_table"),
    "goodput.care": lambda: _goodput("care"),
    "goodput.ranks": lambda: _goodput("ranks"),
    "goodput.person": _person_minutes,
    "goodput.pauses": _pauses,
    "gpu": gpu,
    "goodput.varied": lambda: _goodput("varied"),
    "demo": demo_short,
    "demo.table": demo_table,
    "demo.claims": demo_claims,
    "demo.machine": _machine("demo"),
}


def _passes(part: str) -> float:
    """Forward passes for comparisons per 1,000 steps of healbench's healthy tasks.

    `part` is "" for whole runs, or "later_" for the steps after the start.
    """
    runs = [run for cell in _healthy("healer_ask") for run in cell.runs if run.evidence]
    passes = sum(run.evidence[f"{part}passes"] for run in runs)
    return 1e3 * passes / sum(run.evidence[f"{part}steps"] for run in runs)


def _kept(arm: str) -> str:
    healthy = _healthy(arm)
    return f"{sum(c.holds for c in healthy)} of {len(healthy)}"


def _cure(arm: str, family: str) -> str:
    from benchmarks.healbench.comparing import geometric_mean

    some = [c for c in _cells() if c.arm == arm and c.task.family == family and c.ratios]
    return _short(geometric_mean(c.ratio for c in some))


def pages(root: Path = ROOT) -> list[Path]:
    """README.md and the pages of docs/, without the API reference."""
    docs = [page for page in sorted((root / "docs").rglob("*.md")) if page.parent.name != "api"]
    return [root / "README.md", *docs]


def rendered(text: str) -> str:
    """A page's text with every marked figure written again.

    Raises:
        KeyError: there is no figure of a name.
    """

    def again(found: re.Match[str]) -> str:
        name, old = found.groups()
        around = (old[: len(old) - len(old.lstrip("\n"))])[:2] if old.startswith("\n") else ""
        return f"<!--={name}-->{around}{FIGURES[name]()}{around}<!--/-->"

    return MARKED.sub(again, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    check = "--check" in (sys.argv[1:] if arguments is None else arguments)
    problems: list[str] = []
    for page in pages():
        text = page.read_text()
        new = rendered(text)
        if new != text:
            problems.append(
                f"{page.relative_to(ROOT)}: figures {'are stale' if check else 'written'}"
            )
            if not check:
                page.write_text(new)
    print("\n".join(problems) or "every page is of the results")
    return int(check and bool(problems))


if __name__ == "__main__":
    sys.exit(main())
