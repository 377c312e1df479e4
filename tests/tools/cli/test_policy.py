"""`healcore policy ...`, through the real command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import healcore
from healcore.policy import load, loads, preset_names, preset_text, recipe_names
from healcore.tools.cli import app

ROOT = Path(__file__).parents[3]
ALL = (*preset_names(), *recipe_names())


def healcore_cli(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def mine(tmp_path):
    """A policy file: pretraining with another threshold."""
    file = tmp_path / "mine.toml"
    file.write_text(preset_text("pretraining").replace("z_threshold = 2.5 ", "z_threshold = 3.5 "))
    return str(file)


def test_list():
    done = healcore_cli("policy", "list")
    assert done.exit_code == 0
    lines = done.output.splitlines()
    for name in ALL:
        assert any(line.startswith(f"{name} ") for line in lines)
    assert max(map(len, lines)) <= 80


def test_show_a_preset_is_its_file():
    for name in ALL:
        done = healcore_cli("policy", "show", name)
        assert (done.exit_code, done.output) == (0, preset_text(name))


def test_check_of_good_ones(mine):
    done = healcore_cli("policy", "check", *ALL, mine)
    assert done.exit_code == 0
    assert len(done.output.splitlines()) == len(ALL) + 1
    assert "mine.toml: ok (heal, clip zclip, watches nonfinite, loss_spike" in done.output


def test_check_of_a_wrong_one_goes_on_to_the_others(tmp_path):
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('schema = 1\nname = "wrong"\n[clip]\nkind = "zclip"\nz_threshold = nan\n')
    done = healcore_cli("policy", "check", str(wrong), "default")
    assert done.exit_code == 1
    assert "clip.z_threshold = nan" in done.stderr
    assert "wrong.toml: 1 problem" in done.stderr
    assert "write: z_threshold = 2.5" in done.stderr
    assert done.stdout.startswith("default: ok")


def test_diff(mine):
    done = healcore_cli("policy", "diff", "pretraining", mine)
    assert done.exit_code == 1
    (line,) = [line for line in done.output.splitlines() if line.startswith("clip.")]
    assert line.split() == ["clip.z_threshold", "2.5", "3.5"]


def test_version():
    done = healcore_cli("--version")
    assert (done.exit_code, done.output) == (0, f"healcore {healcore.__version__}\n")


def test_show_with_a_value_replaced_is_a_policy_to_keep():
    done = healcore_cli(
        "policy", "show", "default", "--set", "clip.max_norm=1", "--set", "mode=observe",
        "--set", "detect.plateau={}",
    )  # fmt: skip
    assert done.exit_code == 0
    policy = load("default", clip={"max_norm": 1}, mode="observe", detect={"plateau": {}})
    assert loads(done.output) == policy


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("clip.max_norm=", "KEY=VALUE"),
        ("respond[0].do=skip", "rules can be changed only in a file"),
        ("clip.max_norm=-1", "above 0"),
        ("clip.max_nrom=1", "did you mean 'max_norm'"),
    ],
)
def test_a_value_that_cannot_be_set(given, message):
    done = healcore_cli("policy", "show", "default", "--set", given)
    assert done.exit_code == 2
    assert message in done.output
