"""The README's code runs, and what it names exists."""

import re
from pathlib import Path

import pytest
import torch

from cute_dash import cli, registry

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_usage_example_runs_on_the_cpu():
    (code,) = re.findall(r"## Use\n\n```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(code.replace('"cuda"', '"cpu"'), names)
    for name in ("q", "k", "v"):
        gradient = names[name].grad
        assert gradient.shape == names[name].shape
        assert torch.isfinite(gradient).all() and gradient.abs().max() > 0


def test_named_schedules_exist():
    named = set(re.findall(r'schedule="(\w+)"', README)) | {"auto", "auto_invariant", "unordered"}
    assert named <= set(registry.available())


def test_command_table_lists_every_command():
    parser_commands = cli._parser()._subparsers._group_actions[0].choices
    section = README.split("## Command line")[1].split("\n## ")[0]
    documented = re.findall(r"^\| `(?!cute-dash|CUTE_DASH)([\w-]+)", section, re.MULTILINE)
    assert sorted(documented) == sorted(parser_commands)


@pytest.mark.parametrize("line", re.findall(r"^    cute-dash (.*?)\s*(?:#.*)?$", README, re.MULTILINE))
def test_command_lines_are_accepted_by_the_parser(line):
    command, *options = line.split()
    if command == "bench":
        assert options == ["--help"]  # runs nothing; its options are the bench's own
    else:
        assert cli._parser().parse_args([command, *options]).command == command


def test_files_that_are_linked_exist():
    for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_quoted_speed_is_that_of_the_table():
    """The range over the column that compares `auto` with the best non-deterministic peer."""
    table = README.split("headline:begin -->")[1].split("<!-- headline:end")[0]
    header, _, *rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    column = [name.strip() for name in header].index("auto / best nondet peer")
    ratios = [float(row[column]) for row in rows]
    assert len(ratios) > 10
    assert f"at {min(ratios):.2f} to {max(ratios):.2f} times the speed" in README


def test_environment_variables_are_those_that_the_sources_read():
    sources = "".join(path.read_text() for path in (ROOT / "cute_dash").rglob("*.py"))
    read = set(re.findall(r"environ(?:\.get\(|\[)\"(CUTE_DASH_\w+)", sources))
    section = README.split("## Command line")[1].split("\n## ")[0]
    assert read and set(re.findall(r"^\| `(CUTE_DASH_\w+)", section, re.MULTILINE)) == read


def test_extras_that_are_named_exist():
    section = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    named = set(re.findall(r"pip install (?:-e )?'\.\[(\w+)\]'", README))
    assert {"plot", "bench"} <= named <= set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))
