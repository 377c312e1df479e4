"""The list of packages, the pins, and the wheel, built by way of the sdist from a copy."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Where each dotted prefix lies in the checkout. The symlinks in healcore/ are for tools only.
SOURCES = {
    "healcore": "healcore",
    "healcore.jax": "adapters/jax",
    "healcore.torch": "adapters/torch",
    "healcore.policies": "policies",
}
LOCK = (ROOT / "requirements" / "lock.txt").read_text().splitlines()
PINS = [line.replace("_", "-") for line in LOCK if line and not line.startswith("#")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_versions_of_the_evidence_are_the_pinned_ones():
    page = (ROOT / "docs" / "evidence.md").read_text()
    table = re.findall(r"^([\w-]+) \| ([\d.]+) \| ([\d.]+)$", page, flags=re.M)
    (others,) = re.findall(r"^Tests use these packages too: (.*)\.$", page, flags=re.M)
    pins = {}
    for file in ("requirements/lock.txt", ".ci/deepspeed.txt"):
        pins |= dict(re.findall(r"^([\w-]+)==([^\s\\;]+)", (ROOT / file).read_text(), flags=re.M))
    stated = {name: version for name, version, _ in table}
    stated |= dict(each.split() for each in others.split(", "))
    assert len(stated) > 15
    assert stated == {name: pins[name] for name in stated}
    extras = PROJECT["project"]["optional-dependencies"]
    named = [extras[name] for name in extras if name not in ("dev", "all", "report")]
    bounds = dict(line.split(">=") for lines in named for line in lines if ">=" in line)
    assert {name: lowest for name, _, lowest in table} == bounds


def test_package_list_equals_the_folders():
    """Without the symlinks, which stand for the mapped folders: pytest and pyright need them."""
    found = set()
    for prefix, folder in SOURCES.items():
        if (link := ROOT / prefix.replace(".", "/")) != ROOT / folder:
            assert link.is_symlink()
            assert link.resolve() == ROOT / folder
        for base, _, names in os.walk(ROOT / folder):  # does not follow symlinks
            if any(name.endswith(".py") for name in names):
                found.add(".".join((prefix, *Path(base).relative_to(ROOT / folder).parts)))
    lines = "\n".join(f'    "{name}",' for name in sorted(found))
    message = f"write in [tool.setuptools] packages:\n{lines}"
    assert PROJECT["tool"]["setuptools"]["packages"] == sorted(found), message


def name_of(requirement: str) -> str:
    """The normalized name of a requirement such as `torch>=2.4; python_version < "3.13"`."""
    name = re.split(r"[\s<>=!~\[;]", requirement)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def names_of_tools() -> set[str]:
    """The distributions that the files of requirements name."""
    names: set[str] = set()
    for tools in ("lint", "bench", "docs", "release"):
        for line in (ROOT / "requirements" / f"{tools}.txt").read_text().splitlines():
            requirement = line.split("#")[0].strip()
            if requirement and not requirement.startswith("-"):
                names.add(name_of(requirement))
    return names


def test_dependencies_are_pinned_for_the_makefile():
    """Whatever the Makefile installs has its version in the lock file."""
    project = PROJECT["project"]
    installed = {name_of(requirement) for requirement in project["dependencies"]}
    for extra, requirements in project["optional-dependencies"].items():
        if extra != "deepspeed":  # make test-deepspeed installs it, by its own hashes
            installed |= {name_of(requirement) for requirement in requirements}
    installed |= names_of_tools()
    installed.remove("healcore")  # an extra that names other extras

    assert all("==" in pin for pin in PINS)
    assert PINS[0].startswith("torch==")
    assert installed <= {name_of(pin) for pin in PINS}


def test_the_lowest_versions_are_those_of_pyproject():
    """`make test-lowest` runs with each lower bound, but for patch releases that are withdrawn."""
    text = (ROOT / "requirements" / "lowest.txt").read_text()
    lowest = dict(re.findall(r"^(?:# )?([\w-]+)==(\S+)", text, re.M))
    project = PROJECT["project"]
    wanted = list(project["dependencies"])
    for extra, lines in project["optional-dependencies"].items():
        wanted += lines if extra not in ("dev", "deepspeed", "all") else []
    for line in wanted:
        name, _, bound = line.partition(">=")
        if bound:
            found = lowest[name]
            assert f"{found}.".startswith(f"{bound}."), f"{name} {found}: make lock"


def test_every_pin_but_torch_has_a_hash():
    """The packages that `make` installs are pinned by hash, not only by version."""
    hashed = set()
    for path in sorted((ROOT / "requirements" / "hashed").glob("*.txt")):
        for line in path.read_text().replace("\\\n", "").splitlines():
            if not line.startswith("#"):
                pin, *hashes = line.split()
                assert hashes, f"{path.name}: {pin} has no hash"
                assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes)
                hashed.add(pin)
    assert {*PINS} - hashed == {PINS[0]}
    assert hashed <= {*PINS}


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Built from a checkout without links, as git makes it on Windows.

    There each link is a small text file with its target. `make release-check` builds from a
    checkout with links. Without isolation, so that nothing is downloaded, and in a copy, because a
    build litters its tree.
    """
    copy = tmp_path_factory.mktemp("checkout")
    for part in ("healcore", "adapters", "policies"):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / part, copy / part, symlinks=True, ignore=ignore)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy / file)
    for name in ("jax", "torch", "policies"):
        link = copy / "healcore" / name
        target = os.readlink(link)
        link.unlink()
        link.write_text(target)
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    environment = {**os.environ, "PIP_NO_INDEX": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_source_file_is_in_the_wheel_and_no_other_top_level_name(dist):
    wanted = set()
    for prefix, source in SOURCES.items():
        target = Path(*prefix.split("."))
        shipped = (".py", ".toml", ".html", "py.typed")
        for base, _, names in os.walk(ROOT / source):  # does not follow symlinks
            place = target / Path(base).relative_to(ROOT / source)
            wanted |= {str(place / name) for name in names if name.endswith(shipped)}
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    infos = {name.split("/")[0] for name in names if ".dist-info/" in name}
    assert len(infos) == 1
    assert {name for name in names if ".dist-info/" not in name} == wanted


def test_sdist_carries_the_licence_and_no_tests(dist):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md"} <= names
    assert not any(name.startswith("tests/") for name in names)


def test_both_adapters_import_from_the_installed_wheel(dist, tmp_path):
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:  # a pure wheel is installed by unpacking it
        archive.extractall(tmp_path)
    program = (
        "import healcore, healcore.jax, healcore.torch\n"
        "from healcore import policy\n"
        "print(policy.load('default').name, healcore.torch.attach, healcore.jax.protect)\n"
        "print(healcore.__file__, healcore.jax.__file__, healcore.torch.__file__)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    names, paths = done.stdout.splitlines()
    assert names.startswith("default ")
    assert all(path.startswith(str(tmp_path)) for path in paths.split())
