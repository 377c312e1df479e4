"""Log files that several tests sweep over."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tools.sweep import sample_series


@pytest.fixture(scope="session")
def logs(tmp_path_factory) -> list[str]:
    """Runs of four recipes, two seeds each; two of the recipes have spikes."""
    folder = tmp_path_factory.mktemp("logs")
    rng = np.random.default_rng(0)
    paths = []
    for recipe, spikes in (("wild", (150, 260)), ("mild", (200,)), ("calm", ()), ("even", ())):
        (folder / recipe).mkdir()
        for seed in range(2):
            path = folder / recipe / f"seed_{seed}.csv"
            paths.append(sample_series.write_csv(path, sample_series.losses(rng, 340, spikes)))
    return paths
