"""The variants that are compared."""

from __future__ import annotations

from benchmarks.clip_ablation.rules import Variant

FIXED = Variant("fixed", {"max_norm": 1.0})

CANDIDATES = [
    FIXED,
    Variant("default", {}),
    Variant("zclip-paper", {}),
    *(
        Variant("deviations", {"k": k, "r": r})
        for k, r in (
            (2.5, 0.01),
            (2.5, 0.5),
            (2.5, 1.0),
            (2.5, 2.0),
            (5.0, 1.0),
            (5.0, 2.0),
            (10.0, 1.0),
        )
    ),
    *(
        Variant("logarithm", {"k": k, "r": r})
        for k, r in ((2.5, 0.5), (2.5, 1.0), (4.0, 0.5), (4.0, 1.0))
    ),
    *(Variant("rms", {"k": k}) for k in (3.0, 5.0, 10.0, 20.0)),
    *(Variant("rms", {"k": k, "decay": 0.99}) for k in (5.0, 10.0, 20.0)),
    *(
        Variant("recent_max", {"k": k, "decay": d})
        for k in (2.0, 3.0, 5.0)
        for d in (0.97, 0.99, 0.999)
    ),
]

NUMBERS = [
    *(
        Variant("recent_max", {"k": k, "decay": d})
        for k in (1.5, 2.0, 2.5, 3.0, 4.0)
        for d in (0.98, 0.99, 0.995)
    ),
    *(
        Variant("recent_max", {"k": k, "decay": 0.99, "growth": g})
        for k, g in ((2.0, 1.5), (3.0, 1.5), (3.0, 2.0), (4.0, 2.0))
    ),
]

WIDE = [
    *(
        Variant("recent_max", {"k": k, "decay": d})
        for k, d in ((5.0, 0.98), (10.0, 0.97), (10.0, 0.98), (20.0, 0.95), (20.0, 0.97))
    ),
    Variant("rms", {"k": 20.0}),
]
"""Larger ratios, for rare batches."""

CHOSEN = [
    Variant("recent_max", {"k": k, "decay": d, "warmup": w})
    for k, d, w in (
        (10.0, 0.97, 10),
        (7.5, 0.97, 10),
        (12.5, 0.97, 10),
        (10.0, 0.96, 10),
        (10.0, 0.976, 10),
        (10.0, 0.97, 8),
        (10.0, 0.97, 12),
    )
]
"""The chosen numbers, and each of ratio, memory and warm-up x 0.75 and x 1.25."""

GRIDS = {"candidates": CANDIDATES, "numbers": NUMBERS, "wide": WIDE, "chosen": CHOSEN}
