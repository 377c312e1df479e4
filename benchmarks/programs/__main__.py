"""Trains public programs without and with healcore: python -m benchmarks.programs [NAME ...].

Fetches the files of programs.toml at their pinned commits into a folder that git ignores, inserts
healcore by the edits there, and compares short runs: healthy, with a NaN in the gradients, with a
learning rate that is 30 times too high, and killed. Prints the tables of docs/programs.md.

    --mirror FOLDER    bare repositories FOLDER/OWNER+NAME/repo instead of GitHub
    --rounds N         trains the healthy runs N times in turn: the CPU time is the least of N
    --table            runs nothing: prints the tables of benchmarks/results/programs.json
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

from benchmarks.programs import data
from benchmarks.programs.faults import WARMUP
from benchmarks.side_by_side import arguments, write_json

ROOT = Path(__file__).resolve().parents[2]
FETCHED = ROOT / ".programs"
FAULTS = ("none", "nan:60", "rate:120:20", "kill")


class Run(NamedTuple):
    """How a program ended."""

    status: int
    digest: str
    metric: float | None
    passes: int
    seconds: float | None = None
    """CPU time of the passes after the first `faults.WARMUP`, or None if it was not measured."""


def fetch(program: dict[str, Any], folder: Path, mirror: str | None) -> None:
    """Writes the program's files, with the edits that make it small."""
    for path in program["files"]:
        if mirror:
            repository = Path(mirror) / program["repo"].replace("/", "+") / "repo"
            command = ["git", "-C", repository, "show", f"{program['commit']}:{path}"]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        else:
            url = f"https://raw.githubusercontent.com/{program['repo']}/{program['commit']}/{path}"
            text = urlopen(url).read().decode()
        if path.endswith(".ipynb"):
            cells = json.loads(text)["cells"]
            text = "\n".join("".join(c["source"]) + "\n" for c in cells if c["cell_type"] == "code")
        place = (folder / path).with_suffix(".py")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    for name, text in program.get("write", {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    edited(folder, program, program.get("small", []))


def edited(folder: Path, program: dict[str, Any], edits: list[list[str]]) -> None:
    """Makes edits in the program's first file, or in the file that an edit names first."""
    for *name, old, new in edits:
        path = (folder / (*name, program["files"][0])[0]).with_suffix(".py")
        text = path.read_text()
        assert text.count(old) == 1, f"{path} has {text.count(old)} places like {old!r}"
        path.write_text(text.replace(old, new.removeprefix("\n")))


def healed(folder: Path, program: dict[str, Any]) -> int:
    """Inserts healcore; returns the number of lines added or changed, without imports."""
    paths = [(folder / each).with_suffix(".py") for each in program["files"]]
    before = [path.read_text() for path in paths]
    edited(folder, program, program["edits"])
    if "indent" in program:
        text = paths[0].read_text()
        first, last = program["indent"]
        begin = text.index(first)
        end = text.index(last, begin) if last else len(text)
        lines = text[begin:end].splitlines(keepends=True)
        lines = ["    " + each if each.strip() else each for each in lines]
        paths[0].write_text(text[:begin] + "".join(lines) + text[end:])
    return sum(map(_added, before, (path.read_text() for path in paths)))


def _added(before: str, after: str) -> int:
    """The number of lines that are added or changed, without imports and indentation."""
    old, new = ([line.strip() for line in each.splitlines()] for each in (before, after))
    added = [line[2:] for line in difflib.ndiff(old, new) if line.startswith("+ ")]
    return sum("import " not in line and bool(line) for line in added)


def trained(program: dict[str, Any], folder: Path, packages: str, fault: str) -> Run:
    """Runs the program in its folder."""
    script, *arguments = shlex.split(program["run"])
    # The folders of the program's packages come before those of ours.
    path = os.pathsep.join([str(folder), str(ROOT), packages])
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}
    weights = program.get("weights", "")
    environment = {**os.environ, **quiet, "PYTHONPATH": path, "WEIGHTS": weights}
    command = [sys.executable, "-m", "benchmarks.programs.faults", folder / "result.json", fault]
    command += [folder / script, *arguments]
    (folder / "result.json").unlink(missing_ok=True)
    where: Any = {"cwd": (folder / script).parent, "env": environment, "text": True}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **where)
    (folder / "output.txt").write_text(done.stdout)
    metrics = re.findall(program["metric"], done.stdout) if "metric" in program else []
    found = json.loads((folder / "result.json").read_text()) if done.returncode == 0 else {}
    metric = float(metrics[-1]) if metrics else None
    digest, passes, seconds = (found.get(key) for key in ("digest", "passes", "seconds"))
    return Run(done.returncode, digest or "", metric, passes or 0, seconds)


def compared(
    name: str, program: dict[str, Any], mirror: str | None, packages: str, rounds: int
) -> dict[str, Any]:
    """All runs of one program."""
    runs: dict[str, Run] = {}
    lines = 0
    faults = program.get("faults", FAULTS)
    plan = [
        (arm, fault) for arm in ("off", "on") for fault in faults if (arm, fault) != ("off", "kill")
    ]
    plan += [("off", "none"), ("on", "none")] * (rounds - 1)
    for arm, fault in plan:
        kill = fault == "kill"
        if kill and "kill" not in program:
            continue
        folder = FETCHED / name / f"{arm} {fault.partition(':')[0]}" / "program"
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.mkdir(parents=True)
        fetch(program, folder, mirror)
        script = Path(program["run"].split()[0])
        if "data" in program:
            getattr(data, program["data"])((folder / script).parent)
        if arm == "on":
            lines = healed(folder, program)
        if kill:
            killed = trained(program, folder, packages, f"kill:{program['kill']}")
            assert killed.status == -signal.SIGKILL, f"{name} ended before it was killed"
        run = trained(program, folder, packages, "none" if kill else fault)
        print(name, folder.parent.name, run, flush=True)
        if kill and run.status == 0:
            resumed = run.passes < runs["on none"].passes
            assert resumed, f"{name} was killed before its first checkpoint: choose a later pass"
        before = runs.get(folder.parent.name, run)
        runs[folder.parent.name] = min(run, before, key=lambda each: each.seconds or 0.0)
    found = {run: each._asdict() for run, each in runs.items()}
    return {"title": program["title"], "lines": lines, "runs": found}


def table(results: dict[str, Any]) -> str:
    """The results as a table in Markdown."""
    head = ("program", "lines", "same bits", "no fault", "NaN, without", "NaN, with")
    head += ("rate × 30, without", "rate × 30, with", "killed")
    rows = [head, ("---",) * len(head)]
    for each in (each for each in results.values() if isinstance(each, dict)):
        runs = {name: Run(**run) for name, run in each["runs"].items()}
        off, on, killed = runs["off none"], runs["on none"], runs.get("on kill")
        wanted = ("off nan", "on nan", "off rate", "on rate")
        faults = [_end(runs[name]) if name in runs else "not tried" for name in wanted]
        lines, same = str(each["lines"]), _same(on, off)
        ends = (*faults, _same(killed, on))
        rows.append((each["title"], lines, same, _end(off), *ends))
    return "\n".join(" | ".join(row) for row in rows)


def table_of_times(results: dict[str, Any]) -> str:
    """The CPU time of a step of each program that was timed, as a table in Markdown."""
    rows = [("program", "without healcore, ms", "with healcore, ms"), ("---",) * 3]
    for each in results.values():
        if not isinstance(each, dict):
            continue
        runs = {name: Run(**run) for name, run in each["runs"].items()}
        off, on = _milliseconds(runs["off none"]), _milliseconds(runs["on none"])
        if off is not None and on is not None:
            rows.append((each["title"], f"{off:.3g}", f"{on:.3g}"))
    return "\n".join(" | ".join(row) for row in rows)


def saved_results() -> dict[str, Any]:
    """The results of all programs, as docs/programs.md shows them."""
    saved = json.loads((ROOT / "benchmarks/results/programs.json").read_text())
    return {name: each for part in saved.values() for name, each in part.items()}


def tables(results: dict[str, Any]) -> str:
    """All tables of docs/programs.md."""
    return f"{table(results)}\n\n{table_of_times(results)}"


def _end(run: Run) -> str:
    if run.status:
        return "fails"
    return "no metric" if run.metric is None else f"{run.metric:.4g}"


def _same(run: Run | None, other: Run) -> str:
    if run is None:
        return "not tried"
    return "yes" if (run.digest, run.metric) == (other.digest, other.metric) else "no"


def _milliseconds(run: Run) -> float | None:
    """The CPU time of one backward pass in milliseconds, or None if the run was not timed."""
    if run.seconds is None:
        return None
    return 1e3 * run.seconds / (run.passes - WARMUP)


def main() -> None:
    parser = arguments("Public programs without and with healcore.")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--mirror")
    parser.add_argument("--packages", default="", help="a folder with what they import")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(tables(saved_results()))
        return
    programs = tomllib.loads((Path(__file__).parent / "programs.toml").read_text())
    results = {
        name: compared(name, programs[name], options.mirror, options.packages, options.rounds)
        for name in options.names or programs
    }
    print(tables(results))
    write_json(options.json, results)


if __name__ == "__main__":
    main()
