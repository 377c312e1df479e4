"""`healcore policy` and `healcore events`, docs/cli.md, and the files that commands write."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import healcore
from healcore.events import Log
from healcore.policy import load, loads, preset_names, preset_text, recipe_names
from healcore.tools.cli import app
from healcore.tools.output import OutputError, check_outputs, write_output
from tests.events.sample_events import SAMPLES
from tests.packaging.page_text import text

ALL = (*preset_names(), *recipe_names())


def healcore_cli(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def mine(tmp_path):
    """A policy file: pretraining with another threshold."""
    file = tmp_path / "mine[b].toml"  # no markup of rich
    file.write_text(preset_text("pretraining").replace("z_threshold = 2.5 ", "z_threshold = 3.5 "))
    return str(file)


FINITE_TESTS = {
    "default",
    "observe",
    "fixed-clip",
    "palm-rollback",
    "axolotl-watchdog",
    "lightning-spike-detection",
    "llm-foundry-kill-loss-spike",
}
"""Policies that neither clip by statistics nor skip spikes nor cut the learning rate."""


def test_every_policy_is_listed_shown_as_its_file_and_checked(mine):
    lines = healcore_cli("policy", "list").output.splitlines()
    assert max(map(len, lines)) <= 80
    for name in ALL:
        assert any(line.startswith(f"{name} ") for line in lines)
        done = healcore_cli("policy", "show", name)
        assert (done.exit_code, done.output.startswith(preset_text(name))) == (0, True)
        rest = done.output.removeprefix(preset_text(name)).strip()
        late = name in FINITE_TESTS
        assert rest.startswith("# What stands in the optimizer's step on an accelerator: ")
        assert rest.endswith("a finite test and a fixed clip." if late else "the whole policy.")
    done = healcore_cli("policy", "check", *ALL, mine)
    assert (done.exit_code, len(done.output.splitlines())) == (0, len(ALL) + 1)
    assert "mine[b].toml: ok (heal, clip zclip, watches nonfinite, loss_spike" in done.output
    assert healcore_cli("--version").output == f"healcore {healcore.__version__}\n"


def test_check_of_a_wrong_one_goes_on_to_the_others(tmp_path):
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('schema = 1\nname = "wrong"\n[clip]\nkind = "zclip"\nz_threshold = nan\n')
    done = healcore_cli("policy", "check", str(wrong), "default")
    assert done.exit_code == 1
    for part in ("clip.z_threshold = NaN", "wrong.toml: 1 problem", "write: z_threshold = 2.5"):
        assert part in done.stderr
    assert done.stdout.startswith("default: ok")


def test_policy_diff_prints_changed_values_and_exits_with_1(mine):
    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["policy", "diff", "pretraining", mine])
    (line,) = [line for line in done.output.splitlines() if line.startswith("clip.")]
    assert (done.exit_code, line.split()) == (1, ["clip.z_threshold", "2.5", "3.5"])
    assert mine in done.output


def test_show_with_a_value_replaced_is_a_policy_to_keep():
    replaced = "--set clip.max_norm=1 --set mode=observe --set detect.plateau={}"
    done = healcore_cli("policy", "show", "default", *replaced.split())
    policy = load("default", clip={"max_norm": 1}, mode="observe", detect={"plateau": {}})
    assert (done.exit_code, loads(done.output)) == (0, policy)


def test_events_show_prints_one_line_for_each_event(tmp_path):
    log = Log(tmp_path / "healcore.events.jsonl")
    for step, kind in enumerate(SAMPLES):
        log.write(kind, step=step, **SAMPLES[kind])
    done = healcore_cli("events", "show", str(tmp_path))  # the folder of a run
    first, *lines = done.stdout.splitlines()
    assert (done.exit_code, first) == (0, f"run {log.process_id}")
    assert [line.split()[2] for line in lines] == list(SAMPLES)
    assert max(map(len, lines)) < 1000
    assert "rolled back to checkpoint 300" in done.stdout
    (tmp_path / "healcore.events.jsonl").rename(tmp_path / "run.events.jsonl")
    assert healcore_cli("events", "show", str(tmp_path)).stdout == done.stdout
    (tmp_path / "empty").mkdir()
    without = healcore_cli("events", "show", str(tmp_path / "empty"))
    assert "must have one events file (*events.jsonl) and has none" in without.stderr
    other = healcore_cli("events", "show", __file__)
    assert (other.exit_code, other.stderr.count("\n")) == (2, 1)


def test_events_show_has_a_sentence_for_each_kind(tmp_path):
    log = Log(tmp_path / "healcore.events.jsonl")
    weights = {"onset": 351, "cause": [], "by": "earlier_weights", "checkpoint": 300}
    happened = [
        ("save", 0, {"why": "first", "seconds": 0.00343}),
        ("save", 100, {"why": "regular", "seconds": 12.34}),
        ("save", 150, {"why": "of another version"}),
        ("good", 100, {}),
        ("note", 100, {"why": "data: continues forward: no position"}),
        ("assessment", 370, {**weights, "verdict": "worse", "why": "it has until step 402"}),
        ("assessment", 421, {**weights, "verdict": "damage"}),
        ("assessment", 430, {**weights, "verdict": "recovered"}),
        ("assessment", 440, {**weights, "verdict": "damage", "checkpoint": None}),
        ("assessment", 450, {"onset": 3, "cause": [], "by": "weights", "verdict": "damage"}),
    ]
    for kind, step, fields in happened:
        log.write(kind, step=step, **fields)
    lines = healcore_cli("events", "show", str(tmp_path)).stdout.splitlines()[1:]
    better = "are better on the same batches, since step 351"
    assert [line[48:].strip() for line in lines] == [
        "checkpoint 0 is copied (first)",
        "checkpoint 100 is copied (regular)",
        "checkpoint 150 is copied (of another version)",
        "checkpoint 100 is known-good",
        "data: continues forward: no position",
        f"the weights of step 300 {better}; it has until step 402",
        f"the weights of step 300 {better}",
        "the run has recovered from the damage of step 351",
        f"earlier weights {better}",
        "the weights are not finite, since step 3",
    ]


def test_an_events_file_without_an_event_is_refused(tmp_path):
    (tmp_path / "run.events.jsonl").write_bytes(b"")
    done = healcore_cli("events", "show", str(tmp_path))
    assert done.exit_code == 2
    assert "run.events.jsonl is no events file: it is empty" in done.stderr


@pytest.mark.parametrize("command", [("events", "show"), ("report",)])
def test_a_folder_of_several_runs_says_which_folders_have_the_runs(tmp_path, command):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        Log(tmp_path / name / "healcore.events.jsonl").write("over", step=1, **SAMPLES["over"])
    done = healcore_cli(*command, str(tmp_path))
    assert done.exit_code == 2
    runs = f"{tmp_path / 'a'}, {tmp_path / 'b'}"
    text = done.stderr.replace("\n", " ")
    assert f"has no events file; pass a folder that has one: {runs}" in text


def following(*arguments: object) -> subprocess.Popen[str]:
    """`healcore events show --follow`, running."""
    code = "from healcore.tools.cli import main; main()"
    command = [sys.executable, "-c", code, "events", "show", "--follow", *map(str, arguments)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
def test_a_live_run_is_followed_to_its_end(tmp_path):
    """The file does not exist at first; it is torn, and rotated."""
    process: Any = following(tmp_path)
    assert "does not exist yet" in process.stderr.readline()
    path = tmp_path / "healcore.events.jsonl"
    log = Log(path)
    log.write("start", step=None, policy="default", mode="heal", framework="torch")
    assert process.stdout.readline() == f"run {log.process_id}\n"
    assert " start " in process.stdout.readline()
    with path.open("ab") as file:
        file.write(b'{"torn\n')
    assert "damaged" in process.stderr.readline()
    path.rename(tmp_path / "old")
    log.write("good", step=40)
    assert " 40  good" in process.stdout.readline()
    log.write("end", step=60, ending="stopped", incidents=0, rollbacks=0)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (1, "")
    assert " 60  end" in out


def test_a_run_that_was_killed_ends_it(tmp_path):
    path = tmp_path / "run.events.jsonl"
    log = Log(path)
    log.write("start", step=None, policy="default", mode="heal", framework="torch")
    path.write_text(re.sub(r'"boot":\s*"[^"]*"', '"boot":"another"', path.read_text()))
    out, errors = following(path).communicate(timeout=60)
    assert " start " in out
    assert "was killed" in errors


PAGES = [
    text(f"{name}.md") for name in ("cli", "lost-run", "replay", "recipes", "reports", "tutorial")
]


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """All commands without subcommands, with their names."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, each in command.commands.items():
        yield from commands(each, f"{name} {word}")


COMMANDS = dict(commands(typer.main.get_command(app), "healcore"))


def test_the_pages_name_every_command_and_options_that_exist():
    for name in COMMANDS:
        *group, word = name.split()
        row = rf"`{' '.join(group)} (\w+`, `)?[^`]*\b{word}\b|`{word}`|`{word} "
        assert re.search(row, PAGES[0]), name
    params = [param for each in COMMANDS.values() for param in each.params]
    known = {flag for param in params for flag in param.opts} | {"--help", "--version"}
    assert not re.search(r"\[[a-z]", " ".join(param.help or "" for param in params)), "rich markup"
    for line in "\n".join(PAGES).splitlines():
        if line.lstrip("|` ").startswith("healcore "):
            assert set(re.findall(r"(?<= )--[a-z-]+", line)) <= known, line
    in_tables = set(re.findall(r"`(--[a-z-]+)", PAGES[0]))
    assert len(in_tables) > 5
    assert in_tables <= known


def test_an_output_may_not_be_an_input(tmp_path):
    log = tmp_path / "runs" / "log.csv"
    log.parent.mkdir()
    log.write_text("step,loss\n")
    link = tmp_path / "link"
    link.symlink_to(log)
    for output in (log, link):
        for given in (log, log.parent):
            with pytest.raises(OutputError, match="is an input"):
                check_outputs([output], [given])
    check_outputs([tmp_path / "runs" / "new.html"], [log.parent, tmp_path / "not there"])


def test_an_output_replaces_a_link_and_leaves_no_other_file(tmp_path):
    path, linked = tmp_path / "out.jsonl", tmp_path / "linked"
    linked.write_text("old")
    path.symlink_to(linked)
    write_output(path, "new \udc80\n")
    assert not path.is_symlink()
    assert (path.read_text(), linked.read_text()) == ("new \\udc80\n", "old")
    with pytest.raises(OutputError, match="name another file"):
        write_output(path / "below a file", "new")
    assert sorted(os.listdir(tmp_path)) == ["linked", "out.jsonl"]
