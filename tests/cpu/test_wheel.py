"""The wheel, unpacked away from the checkout: it has every source, its schedules are found and its commands run."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("cute_dash", "schedules")


def run_or_fail(*command, **options):
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path_factory.mktemp("source")  # a build leaves files beside its sources
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = (sys.executable, "-c", "from setuptools import build_meta; build_meta.build_wheel('dist')")
    run_or_fail(*build, cwd=source)
    (path,) = (source / "dist").glob("cute_dash-*-py3-none-any.whl")
    return path


@pytest.fixture(scope="module")
def run_installed(wheel, tmp_path_factory):
    """Runs Python in an empty folder where only the unpacked wheel and the environment's packages can be imported."""
    site = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(site)
    empty = tmp_path_factory.mktemp("empty")
    environment = {**os.environ, "PYTHONPATH": str(site), "CUTE_DASH_CACHE": "0", "CUDA_VISIBLE_DEVICES": ""}

    def run(*arguments):
        return run_or_fail(sys.executable, *arguments, cwd=empty, env=environment)

    run.site = site
    return run


def test_every_source_and_marker_of_types_is_in_it(wheel):
    contents = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    markers = {f"{package}/py.typed" for package in PACKAGES}
    assert sources | markers <= contents
    rest = {name for name in contents - sources - markers if ".dist-info/" not in name}
    assert not rest
    assert any(name.endswith("licenses/LICENSE") for name in contents)


def test_the_command_is_an_entry_point(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "cute-dash = cute_dash.cli:main" in archive.read(name).decode()


def test_it_is_imported_from_there_and_finds_its_schedules(run_installed):
    program = "import cute_dash; from cute_dash import registry; print(cute_dash.__file__, *registry.available())"
    path, *names = run_installed("-c", program).split()
    assert Path(path).parent == run_installed.site / "cute_dash"
    assert names == sorted(path.stem for path in (ROOT / "schedules").glob("[!_]*.py"))


def test_its_commands_and_its_op_run(run_installed):
    cli = "import sys; from cute_dash.cli import main; sys.exit(main(sys.argv[1:]))"
    assert "keeps every rule" in run_installed("-c", cli, "check", "hybrid", "--mask", "causal", "--seqlen-q", "512")
    assert "longest_first" in run_installed("-c", cli, "analyze", "--mask", "causal", "--seqlen-q", "512")
    program = (
        "import torch\n"
        "from cute_dash.flash_attn_interface import flash_attn_func\n"
        "q, k, v = (torch.randn(1, 40, 2, 64, requires_grad=True) for _ in range(3))\n"
        "flash_attn_func(q, k, v, causal=True).sum().backward()\n"
        "print(q.grad.isfinite().all().item() and q.grad.abs().max().item() > 0)\n"
    )
    assert run_installed("-c", program).strip() == "True"


def test_the_demo_runs(run_installed):
    output = run_installed("-c", "import sys; from cute_dash.cli import main; sys.exit(main(['demo']))")
    assert output.splitlines()[-1] == "All gradients right; every ordered schedule repeats its bits."
