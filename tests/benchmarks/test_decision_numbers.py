"""docs/numbers.md lists every number that influences a decision, and the code has no others."""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.healbench.decision_numbers import (
    CONSTANTS,
    FAULTS,
    INERT,
    POLICY,
    SHARED,
    changed,
    constant,
    numbers,
)
from healcore.core.engine import Engine
from healcore.core.signals import Signals
from healcore.core.tree import map_leaves
from healcore.policy import from_dict, load, to_dict
from tests.core import fuzz
from tests.core.engine_runner import Runner

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "numbers.md").read_text()
CLASSES = ("principle", "published", "measured", "not measured")

DECIDING = (
    *(f"core/detectors/{name}" for name in ("spike", "noise", "limits")),
    "core/signals",
    *(f"core/engine/{name}" for name in ("engine", "incident", "judge", "lr", "rules")),
    *(f"runtime/dominance/{name}" for name in ("anchor", "dominance", "history")),
    "runtime/loop/saver",
    "runtime/loop/recovery",
    *(
        f"runtime/recovery/{name}"
        for name in (
            "checkpoint_choice",
            "engine_states",
            "evidence",
            "monitor",
            "restoring",
            "trials",
        )
    ),
    "runtime/incidents/ledger",
    *("runtime/checkpoints/catalog", "runtime/store/retention"),
)
"""Modules of healcore whose code decides."""
ARITHMETIC = {
    "runtime/dominance/history": {"_WINDOWS", "_NORMS"},
    "core/engine/lr": {"_MOST"},
    "core/engine/rules": {"_NEVER"},
    "runtime/incidents/ledger": {"_MAX_INCIDENTS"},
    "runtime/recovery/restoring": {"HEALING_SCHEMA", "_SHOWN"},
    "runtime/loop/saver": {"_UNSAVED_INTERVALS"},
}
"""Bounds of arithmetic and memory, the version of a file's layout, distances of warnings."""
COUNTS = {
    "runtime/loop/saver": ["self._next_warning *= 2"],
    "core/engine/lr": ["range(4)"],
    "runtime/dominance/dominance": [
        "range(2)",
        "evaluations += 2",
    ],
    "runtime/store/retention": ["(('good', 1), ('candidates', 2), ('quarantined', 0))"],
}
"""Numbers of fields, of evaluations in a line, of places in a list; the least values of options."""


def table() -> dict[str, tuple[str, str]]:
    """Where a number is -> its value and its class."""
    cells = [line.strip("| \n").split(" | ") for line in PAGE.splitlines() if line[:2] == "| "]
    found = [each for each in cells if len(each) == 5 and each[2].startswith("`")]
    assert len(found) == len({each[2] for each in found})
    return {each[2].strip("`"): (each[1], each[3]) for each in found}


def test_the_table_and_the_code_agree():
    listed = {name: float(np.prod([1 / float(v) if i else float(v) for i, v in parts(value)]))
              for name, (value, _) in table().items()}  # fmt: skip
    assert listed == pytest.approx({each.name: each.value for each in numbers()}, rel=1e-12)


def parts(value: str) -> Iterator[tuple[int, str]]:
    """A number, or numerator and divisor."""
    yield from enumerate(value.split("/"))


def test_there_are_few_and_the_page_counts_them():
    assert len(table()) <= 50
    assert f"{len(table())} numbers influence a decision" in PAGE
    kinds = Counter(each.partition(":")[0] for _, each in table().values())
    assert {*kinds} <= {*CLASSES}
    for kind, count in kinds.items():
        assert f"\n| {kind} | {count} |" in PAGE


@pytest.mark.parametrize("kind", ["measured", "published", "principle"])
def test_a_class_has_its_command_its_source_or_its_reason(kind):
    for value, why in table().values():
        if why.partition(":")[0] == kind:
            assert why.partition(":")[2].strip(), value


def test_a_number_in_several_places_has_one_value():
    values = {each.name: each.value for each in numbers()}
    data = to_dict(load(POLICY))

    def of_key(name: str) -> float:
        found: Any = data
        for part in name.split("."):
            found = found[int(part) if part.isdigit() else part]
        return found

    for name, others in SHARED.items():
        for each in others:
            assert (constant(each) if ":" in each else of_key(each)) == values[name]


def decisions(policy) -> list[np.ndarray]:
    """All decisions of lanes with trouble of all kinds, rollbacks and limits of the host."""
    steps, lanes = 250, 30
    rng = np.random.default_rng(5)
    trace = fuzz.signals(rng, steps, lanes)
    back = rng.random((steps, lanes)) < 0.01
    limits = (10.0 ** rng.uniform(-5, 0, (steps, lanes))).astype(np.float32)
    engine: Engine = policy.engine()
    state, found = engine.init(batch=(lanes,)), []
    for i in range(steps):
        signals: Signals = fuzz.at(trace, i)
        state, decision = engine.step(state, signals, xp=np)
        found += [*decision[:6], state.incident.open, state.budget.recoveries]
        rate = trace.learning_rate[i]
        with np.errstate(all="ignore"):
            rolled = engine.limit_lr(
                engine.on_rollback(state, state, xp=np), limits[i], rate, xp=np
            )
        there = back[i]
        state = map_leaves(
            lambda a, b, there=there: np.where(there.reshape(-1, *[1] * (a.ndim - 1)), a, b),
            rolled,
            state,
        )
    return found


def test_keys_that_are_called_inert_change_no_decision():
    usual = decisions(load(POLICY))
    for name in INERT:
        for factor in (0.3, 1.25):
            varied = decisions(with_key(name, factor))
            # The limit is divided by the ceiling, and multiplied by it: to rounding the same.
            assert all(np.allclose(a, b, rtol=1e-5) for a, b in zip(usual, varied, strict=True)), (
                name
            )


def test_a_key_that_decides_changes_a_decision():
    usual = decisions(load(POLICY))
    for name in ("detect.loss_spike.z_threshold", "incident.patience", "budget.recoveries"):
        varied = decisions(with_key(name, 0.5))
        pairs = zip(usual, varied, strict=True)
        assert not all(np.allclose(a, b) for a, b in pairs), name


def test_hold_and_ramp_change_no_limit_and_the_factor_raises_it_after_health():
    def scales(name: str, factor: float) -> list[float]:
        runner = Runner(with_key(name, factor, refund_after=310).config())
        rates = [*[0.5] * 20, *np.linspace(0.5, 0.2, 400), *np.linspace(0.2, 0.6, 400)]
        runner.feed(loss=np.ones(20), learning_rate=rates[:20])
        state = runner.engine.on_rollback(runner.state, runner.state, xp=np)
        at = np.float32(0.5)
        runner.state = runner.engine.limit_lr(state, np.float32(0.05), at, xp=np)
        return [float(d.lr_scale) for d in runner.feed(loss=np.ones(800), learning_rate=rates[20:])]

    usual = scales("lr.floor", 1.0)
    assert min(usual) < 0.15
    assert max(usual) > 0.3, "it has risen"
    for name in ("lr.hold_steps", "lr.ramp_steps", "lr.ceiling"):
        for factor in (0.5, 1.01):
            assert scales(name, factor) == pytest.approx(usual, rel=1e-5), name
    assert scales("lr.factor", 0.5) != pytest.approx(usual, rel=0.1)


def with_key(name: str, factor: float, **budget: int):
    data = to_dict(load(POLICY))
    data["budget"] |= budget
    *path, key = name.split(".")
    inner = data
    for part in path:
        inner = inner[part]
    inner[key] = changed(inner[key], factor)
    return from_dict(data)


def test_every_number_of_the_policy_is_listed_or_has_a_reason():
    def all_leaves(tree, path=()):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if isinstance(value, dict | list):
                yield from all_leaves(value, (*path, key))
            elif isinstance(value, int | float) and not isinstance(value, bool):
                yield ".".join(map(str, (*path, key))), value

    shared = {each for others in SHARED.values() for each in others}
    for name, value in all_leaves(to_dict(load(POLICY))):
        known = name in table() or name in shared or name in INERT or name.startswith(FAULTS)
        off = value == 0 or (name.endswith("consecutive") and value == 1)
        assert known or off, name


@pytest.mark.parametrize("module", sorted({*DECIDING}))
def test_no_number_of_a_deciding_module_is_missing(module):
    path = ROOT / "healcore" / f"{module}.py"
    tree = ast.parse(path.read_text())
    listed = {name.partition(":")[2] for name in CONSTANTS if places(name) == module}
    listed |= ARITHMETIC.get(module, set())
    found = {target for node in tree.body for target in assigned(node) if plain_number(node)}
    shared = {each.partition(":")[2] for others in SHARED.values() for each in others}
    assert found <= listed | shared | {"WINDOW"}
    source = ast.unparse(tree)
    for allowed in COUNTS.get(module, []):
        assert allowed in source
        tree = ast.parse(ast.unparse(tree).replace(allowed, "allowed"))
    unnamed = [
        f"{ast.unparse(node)} in {module}"
        for top in tree.body
        if not (assigned(top) and plain_number(top))
        for node in literals(top)
    ]
    assert not unnamed


def places(name: str) -> str:
    return name.partition(":")[0].removeprefix("healcore.").replace(".", "/")


def assigned(node: ast.stmt) -> list[str]:
    """The names that a statement of a module gives a value."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [each.id for each in targets if isinstance(each, ast.Name)]


def plain_number(node: ast.stmt) -> bool:
    """Whether it gives a number a name."""
    return isinstance(node, ast.Assign) and any(literals(node.value))


def literals(node: ast.AST) -> Iterator[ast.AST]:
    """Numbers besides 0 and 1; not in a text, nor in what shortens one, nor a default of a field.

    Fields are keys of the policy, or of `Keep`.
    """
    if isinstance(node, ast.JoinedStr | ast.Slice):
        return
    if isinstance(node, ast.ClassDef):
        for child in node.body:
            yield from () if isinstance(child, ast.AnnAssign) else literals(child)
        return
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        if node.value not in (0, 1):
            yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from literals(child)


def test_the_constants_are_where_they_are_said_to_be():
    for name in CONSTANTS:
        assert importlib.import_module(name.partition(":")[0])
        assert constant(name) > 0
