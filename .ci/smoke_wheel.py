"""Smoke test of the installed wheel, run by CI in a clean environment, outside the checkout.

Usage: python -I smoke_wheel.py CHECKOUT   (CHECKOUT: the folder that must not be imported from)
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path

FRAMEWORKS = ("jax", "torch", "optax", "flax", "tensorflow")


def healcore_cli(*arguments: str) -> str:
    """Run the installed command; fail with its output when it fails."""
    command = str(Path(sysconfig.get_path("scripts")) / "healcore")
    done = subprocess.run([command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    return done.stdout


def main() -> None:
    """Check the import, the installed names, the command line, the missing-extra error."""
    checkout = Path(sys.argv[1]).resolve()
    import healcore

    where = Path(healcore.__file__).resolve()
    assert checkout not in where.parents, f"imported from the checkout: {where}"
    assert healcore.__version__ == importlib.metadata.version("healcore")
    assert (where.parent / "py.typed").is_file()

    files = importlib.metadata.files("healcore") or []
    top = {f.parts[0] for f in files if f.parts[0] != ".."}
    expected = {"healcore", f"healcore-{healcore.__version__}.dist-info"}
    assert top == expected, f"top-level names {sorted(top)}, expected {sorted(expected)}"

    policy = healcore.policy.load("default")
    engine = policy.engine()
    import numpy as np

    from healcore.core.signals import Signals

    state = engine.init()
    signals = Signals(loss=np.float32(2.0), grad_norm=np.float32("nan"))
    _, decision = engine.step(state, signals)
    assert bool(decision.skip), f"a NaN gradient was not skipped: {decision}"

    for preset in ("default", "aggressive", "conservative", "observe", "zclip"):
        assert preset in healcore_cli("policy", "list")
        healcore_cli("policy", "check", preset)
    assert healcore.__version__ in healcore_cli("--version")

    for extra in ("jax", "torch"):
        message = ""
        try:
            getattr(healcore, extra)
        except ImportError as error:
            message = str(error)
        assert f"pip install '.[{extra}]'" in message, (extra, message)
    loaded = [name for name in FRAMEWORKS if name in sys.modules]
    assert not loaded, f"imported: {loaded}"
    print(f"wheel: ok, healcore {healcore.__version__} from {where.parent}")


if __name__ == "__main__":
    main()
