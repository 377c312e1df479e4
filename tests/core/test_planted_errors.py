"""The oracle sees errors: each part of the core is broken on purpose, and the comparison fails.

In `make test` a tenth of the errors in each file, at least four, drawn again from each version of
the file; all of them under the marker `stress`. Some errors change nothing (a comparison that is
never equal, a count that feeds nothing), so not all are asked for.
"""

from __future__ import annotations

import functools
import zlib
from types import ModuleType

import numpy as np
import pytest

from healcore.core import baseline, numerics
from healcore.core.clipping import adagc, global_norm
from healcore.core.detectors import limits, records, spike, trends, windows
from healcore.core.engine import incident, judge, lr
from tests.core import fuzz, mutants, oracle, policies

CLIPS = ("zclip", "adagc", "autoclip", "zclip-max", "zclip-mean", "fixed")
POLICIES = (*CLIPS, "tame", "instability", "records", *policies.PUBLISHED)
PARTS: dict[ModuleType, tuple[str, ...]] = {
    global_norm: ("zclip", "zclip-max", "zclip-mean", "autoclip", "fixed", "adagc"),
    adagc: ("adagc",),
    baseline: ("zclip", "adagc", "tame"),
    numerics: ("zclip", "adagc", "ceilings"),
    **dict.fromkeys([spike, trends], ("zclip", "tame")),
    records: ("records", "instability"),
    limits: ("zclip", "tame", "limits", "ceilings"),
    windows: ("limits", "windows", "averages"),
    **dict.fromkeys([judge, incident, lr], ("zclip", "adagc")),
}
"""The modules to break, and the policies that must notice."""

STOPS, LANES = (15, 40, 100, 160), 16
"""Steps after which a run is compared with the reference: most errors show early; and runs."""


@functools.cache
def trial(clip: str):
    """A policy, its trace, and the reference's decisions on it."""
    groups = policies.GROUPS if clip == "adagc" else 0
    if clip in ("instability", "records"):
        config = policies.growing(clip)
    elif clip in policies.PUBLISHED:
        config = policies.published(clip)
    elif clip == "tame":
        config = policies.full()
    else:
        # Other clipping rules do not see the detectors.
        config = policies.full(clip) if clip in ("zclip", "adagc") else policies.clip_only(clip)
    config = oracle.known_to_reference(config)
    rng = np.random.default_rng(3)
    if clip in ("instability", "records"):
        trace = fuzz.growths(rng, STOPS[-1], 2 * LANES)
    else:  # far-out numbers hide small differences
        trace = fuzz.signals(rng, STOPS[-1], LANES, groups=groups, wild=clip != "tame")
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


def unnoticed(module: ModuleType, errors: list[mutants.Mutant]) -> list[str]:
    """The errors that no policy detects."""
    left = []
    for mutant in errors:
        with mutants.planted(mutant):
            if not any(complaint(clip) for clip in PARTS[module]):
                left.append(str(mutant))
    return left


def name(module: ModuleType) -> str:
    return module.__name__.removeprefix("healcore.core.")


def test_the_core_as_it_is_gives_no_complaint():
    assert {clip: complaint(clip) for clip in POLICIES} == dict.fromkeys(POLICIES)


@pytest.mark.parametrize("module", PARTS, ids=name)
def test_some_errors_in_each_file_are_noticed(module):
    every = list(mutants.mutants(module))
    order = np.random.default_rng(zlib.crc32(name(module).encode())).permutation(len(every))
    some = [every[i] for i in order[: max(4, len(every) // 10)]]
    left = unnoticed(module, some)
    assert len(left) <= len(some) // 2, left


@pytest.mark.stress
@pytest.mark.parametrize("module", PARTS, ids=name)
def test_nearly_all_errors_in_each_file_are_noticed(module):
    every = list(mutants.mutants(module))
    left = unnoticed(module, every)
    print(f"{name(module)}: {len(every) - len(left)} of {len(every)} noticed; not: {left}")
    assert len(left) <= max(2, len(every) // 5), left


def test_the_core_is_whole_again():
    """Planting an error leaves no trace."""
    assert complaint("zclip") is None
