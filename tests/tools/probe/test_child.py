"""Checkpoints are read in a process with limits; what ends it costs one path its verdict."""

import os
import resource

from healcore.tools.probe.checkpoint_files import probe_paths
from healcore.tools.probe.checks import CheckpointInputs, ProbeResult


def killed(path, inputs):
    """A probe that crashes or never ends for some paths, and reports its limits for others."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_CPU)]
    if path.name == "crashes":
        os.abort()
    if path.name == "endless":
        resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
    while path.name == "endless":
        pass
    return ProbeResult(path.name, str(path), (), {"limits": limits})


def test_a_process_that_ends_is_replaced(tmp_path):
    paths = [tmp_path / name for name in ("small", "crashes", "endless", "large")]
    for path in paths:
        path.touch()
    os.truncate(paths[3], 1 << 30)
    results = probe_paths("x", killed, paths, CheckpointInputs())
    assert [result.verdict.value for result in results] == ["SKIP", "ERROR", "ERROR", "SKIP"]
    assert "Aborted" in results[1].checks[0].message
    assert "ended" in results[2].checks[0].message
    small, large = results[0].facts["limits"], results[3].facts["limits"]
    assert large[0] - small[0] == 4 << 30
    assert large[1] > small[1] + 200
