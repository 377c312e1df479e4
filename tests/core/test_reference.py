"""The core decides as the plain-Python reference does, step by step, on fuzzed traces."""

import ast
import copy
import functools
import inspect
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healcore.core import array_namespace, baseline, clipping, signals, trees
from healcore.core.detectors import loss_records, spikes, thresholds, trends, windows
from healcore.core.engine import engine, incident, rate, rule
from healcore.core.signals import Signals
from tests.core import fuzz, oracle, policies
from tests.core.random_policies import BOUNDED, engine_configs

pytestmark = pytest.mark.slow  # many random cases; the other tests here are examples

STEPS, LANES = 300, 12
some_lanes = pytest.mark.parametrize("lanes", [LANES, pytest.param(30, marks=pytest.mark.stress)])
plain_and_wild = pytest.mark.parametrize("wild", [False, True], ids=["plain", "wild"])


def check(config, trace, *, groups=0):
    """Both decide alike, but for a tenth of the steps after decisions too close to call."""
    steps, lanes = oracle.lanes_of(trace)
    outcome = oracle.agree(config, trace, groups=groups)
    assert outcome.wrong is None, outcome.wrong
    assert outcome.ties <= lanes // 10
    assert outcome.steps >= 0.9 * steps * lanes


@plain_and_wild
@pytest.mark.parametrize("clip", policies.CLIPS)
@pytest.mark.parametrize(
    ("policy", "lanes"),
    [(policies.covering, LANES), pytest.param(policies.full, 30, marks=pytest.mark.stress)],
    ids=["some", "all"],
)
def test_the_engine_agrees_with_its_oracle_for_every_rule(policy, lanes, clip, wild):
    groups = policies.GROUPS if clip == "adagc" else 0
    rng = np.random.default_rng(len(clip) + 100 * wild)
    trace = fuzz.signals(rng, STEPS, lanes, groups=groups, wild=wild)
    check(policy(clip), trace, groups=groups)


@plain_and_wild
@some_lanes
@pytest.mark.parametrize(
    ("which", "seed"),
    [*((name, 40) for name in policies.PUBLISHED), ("instability", 50), ("records", 50)],
)
def test_a_detector_alone_decides_as_the_reference(lanes, wild, which, seed):
    trace = fuzz.signals(np.random.default_rng(seed + wild), STEPS, lanes, wild=wild)
    check(policies.only(which), trace)


@pytest.mark.parametrize("present", ["loss", "grad_norm", "loss grad_norm", "grad_norm eval_loss"])
def test_a_detector_without_its_signal_rests(present):
    """It keeps its state: a signal that is logged now and then raises no alarm by its absence."""
    trace = fuzz.signals(np.random.default_rng(5), STEPS, LANES)
    check(policies.full("zclip"), Signals(**{k: getattr(trace, k) for k in present.split()}))


def test_the_traces_reach_everything():
    """The traces provoke every kind of decision, otherwise the oracle would prove little."""
    trace = fuzz.signals(np.random.default_rng(105), STEPS, 30)
    got = oracle.core_run(policies.full("zclip"), trace)
    assert np.bitwise_or.reduce(got["cause"], axis=None) == 1791  # all ten causes
    assert np.bitwise_or.reduce(got["action"], axis=None) == 31  # all five actions
    assert got["skip"].any()
    assert got["rollback_depth"].max() >= 3
    got = oracle.core_run(policies.full("zclip"), trace._replace(learning_rate=None))
    without_limit = np.arange(30) % 4 != 3
    assert got["lr_scale"][:, without_limit].min() == np.float32(0.2)
    assert ((got["grad_scale"] > 0) & (got["grad_scale"] < 1)).any()
    got = oracle.core_run(policies.full(None), trace)
    has_no_limit = np.arange(30) % 3 == 0
    assert (got["grad_scale"] < 1).any()
    assert (got["grad_scale"][:, has_no_limit] == 1).all()


@pytest.mark.parametrize(
    "examples", [15, pytest.param(300, marks=pytest.mark.stress)], ids=["some", "many"]
)
def test_random_policies_decide_as_the_reference(examples):
    @settings(max_examples=examples, **BOUNDED)
    @given(config=engine_configs(), seed=st.integers(0, 1 << 20), wild=st.booleans())
    def decides_as_the_reference(config, seed, wild):
        groups = policies.GROUPS if config.clip and config.clip.kind == "adagc" else 0
        trace = fuzz.signals(np.random.default_rng(seed), 150, 6, groups=groups, wild=wild)
        outcome = oracle.agree(config, trace, groups=groups)
        assert outcome.wrong is None, outcome.wrong
        assert outcome.ties <= 3

    decides_as_the_reference()


# -- errors planted in the core: one comparison reversed or one sign changed ----------------------
# By position in the syntax tree, not by a text to replace, so that an edit to the core cannot make
# this stale.

_FLIPPED: dict[type, type] = {
    ast.Gt: ast.Lt,
    ast.GtE: ast.Lt,
    ast.Lt: ast.Gt,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


class Mutant(NamedTuple):
    """One planted error."""

    module: ModuleType
    function: Any
    line: int
    before: str
    after: str
    tree: ast.Module
    """The function's syntax tree with the error in it."""

    def __str__(self) -> str:
        name = self.module.__name__.removeprefix("healcore.core.")
        return f"{name}:{self.line}: {self.before}  ->  {self.after}"


def mutants(module: ModuleType) -> Iterator[Mutant]:
    """All errors that can be planted into the functions and methods of `module`."""
    whole = ast.parse(inspect.getsource(module))
    places: list[tuple[Any, list[ast.stmt]]] = [(module, whole.body)]
    classes = (node for node in whole.body if isinstance(node, ast.ClassDef))
    places += [(getattr(module, node.name), node.body) for node in classes]
    for owner, body in places:
        for function in body:
            if isinstance(function, ast.FunctionDef) and _judges(module, function.name):
                yield from _mutants_of(module, getattr(owner, function.name), function)


def _judges(module: ModuleType, function: str) -> bool:
    """Whether the oracle compares what a function computes: not what is for the host alone."""
    if module is engine:
        return function in ("_judge", "_detect", "_ask", "_limit_skips", "_scales")
    if module is trees:
        return function in ("zeros", "map_leaves", "select")
    return function not in ("__init__", "__getattr__", "check_scalar")


def _mutants_of(module: ModuleType, original: Any, function: ast.FunctionDef) -> Iterator[Mutant]:
    types = _annotations(function)
    for index, node in enumerate(ast.walk(function)):
        kind = _operator(node)
        if kind not in _FLIPPED or node in types:
            continue
        changed = copy.deepcopy(function)
        target: Any = list(ast.walk(changed))[index]
        if isinstance(target, ast.Compare):
            target.ops[0] = _FLIPPED[kind]()
        else:
            target.op = _FLIPPED[kind]()
        tree = ast.fix_missing_locations(ast.Module([changed], []))
        line = node.lineno  # type: ignore[attr-defined]
        yield Mutant(module, original, line, ast.unparse(node), ast.unparse(target), tree)


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The core with the error in it."""
    original = mutant.function
    found = {}
    exec(compile(mutant.tree, f"<{mutant}>", "exec"), mutant.module.__dict__, found)
    code = original.__code__
    try:
        # Others may hold the function itself (`from x import f`): change it from the inside.
        original.__code__ = found[original.__name__].__code__
        yield
    finally:
        original.__code__ = code


def _operator(node: ast.AST) -> Any:
    """The kind of its only operator."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return type(node.ops[0])
    return type(node.op) if isinstance(node, ast.BinOp) else None


def _annotations(function: ast.FunctionDef) -> set[ast.AST]:
    """`int | None` is no disjunction."""
    roots = [function.returns]
    roots += [n.annotation for n in ast.walk(function) if isinstance(n, ast.arg | ast.AnnAssign)]
    return {each for root in roots if root is not None for each in ast.walk(root)}


# -- the oracle sees errors: the core is broken on purpose, and the comparison fails --------------
# In `make test-slow` an eighth of the errors in each file, at least four, drawn again from each
# version of the file; all of them under `stress`. Some change nothing (a comparison that is never
# equal, a count that feeds nothing), so not all are asked for.

CLIPS = ("zclip", "adagc", "autoclip", "zclip-max", "zclip-mean", "fixed")
POLICIES = (*CLIPS, "tame", "instability", "records", *policies.PUBLISHED)
PARTS: dict[ModuleType, tuple[str, ...]] = {
    clipping: CLIPS,
    baseline: ("zclip", "adagc", "tame"),
    array_namespace: ("zclip", "adagc", "ceilings"),
    signals: ("zclip", "adagc"),
    trees: ("zclip", "adagc"),
    trends: ("zclip", "tame"),
    loss_records: ("records", "instability"),
    thresholds: ("zclip", "tame", "limits", "ceilings"),
    spikes: ("zclip", "tame"),
    windows: ("limits", "windows", "averages"),
    **dict.fromkeys([engine, incident, rate, rule], ("zclip", "adagc")),
}
"""The modules to break, and the policies that must notice."""

STOPS = (15, 40, 100, 160)
FEW_LANES = 16
"""Steps after which a run is compared with the reference: most errors show early; and runs."""


@functools.cache
def trial(clip: str):
    """A policy, its trace, and the reference's decisions on it."""
    groups = policies.GROUPS if clip == "adagc" else 0
    if clip in ("instability", "records", *policies.PUBLISHED):
        config = policies.only(clip)
    elif clip in ("tame", "zclip", "adagc"):
        config = policies.full("zclip" if clip == "tame" else clip)
    else:  # other clipping rules do not see the detectors
        config = policies.clip_only(clip)
    rng = np.random.default_rng(3)
    if clip in ("instability", "records"):
        trace = fuzz.growths(rng, STOPS[-1], 2 * FEW_LANES)
    else:  # far-out numbers hide small differences
        trace = fuzz.signals(rng, STOPS[-1], FEW_LANES, groups=groups, wild=clip != "tame")
    return config, trace, groups, oracle.reference_run(config, trace, groups=groups)


def complaint(clip: str) -> str | None:
    """The first disagreement that the oracle finds in the core as it is now; None without one."""
    config, trace, groups, expected = trial(clip)
    try:
        with np.errstate(all="ignore"):
            for got in oracle.growing_run(config, trace, STOPS, groups=groups):
                steps = len(got["skip"])
                outcome = oracle.compare(expected.until(steps), got)
                if outcome.wrong or outcome.ties > 4:
                    return outcome.wrong or f"{outcome.ties} ties"
    except Exception as error:
        return f"raised {error!r}"
    return None


def name(module: ModuleType) -> str:
    return module.__name__.removeprefix("healcore.core.")


@pytest.mark.parametrize("share", [0.125, pytest.param(1.0, marks=pytest.mark.stress)])
@pytest.mark.parametrize("module", PARTS, ids=name)
def test_nearly_all_errors_in_each_file_are_noticed(module, share):
    every = list(mutants(module))
    order = np.random.default_rng(zlib.crc32(name(module).encode())).permutation(len(every))
    some = [every[i] for i in order[: max(4, int(share * len(every)))]]
    left = []
    for mutant in some:
        with planted(mutant):
            if not any(complaint(clip) for clip in PARTS[module]):
                left.append(str(mutant))
    print(f"{name(module)}: {len(some) - len(left)} of {len(some)} noticed; not: {left}")
    assert len(left) <= (len(some) // 2 if share < 1 else max(2, len(some) // 5)), left


def test_the_core_as_it_is_gives_no_complaint():
    """Also after errors were planted."""
    assert {clip: complaint(clip) for clip in POLICIES} == dict.fromkeys(POLICIES)
