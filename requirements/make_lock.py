"""Writes lock.txt: one resolve of all that the Makefile installs (`make lock`)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LOCK = HERE / "lock.txt"


def main() -> None:
    """Resolve, keep the header and the torch pin, replace the rest."""
    header, torch_pin, _ = re.split(r"^(torch==\S+)$", LOCK.read_text(), flags=re.M)
    wanted = [torch_pin, "pip", "setuptools", "wheel"]
    for tools in sorted(HERE.glob("*.txt")):
        if tools != LOCK:
            lines = (line.split("#")[0].strip() for line in tools.read_text().splitlines())
            wanted += [line for line in lines if line and not line.startswith("-")]
    wanted.append(f"{HERE.parent}[jax,torch,report,dev]")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    report = subprocess.run(
        [*command, "--report", "-", *wanted], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    pins = {}
    for item in json.loads(report)["install"]:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        pins[name] = item["metadata"]["version"].partition("+")[0]
    del pins["healcore"], pins["torch"]
    LOCK.write_text(f"{header}{torch_pin}\n\n" + "".join(f"{n}=={pins[n]}\n" for n in sorted(pins)))


if __name__ == "__main__":
    main()
