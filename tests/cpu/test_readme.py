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
    documented = re.findall(r"^\| `(?!cute-dash)(\w+)", section, re.MULTILINE)
    assert sorted(documented) == sorted(parser_commands)


@pytest.mark.parametrize("line", re.findall(r"^    cute-dash (.*?)\s*(?:#.*)?$", README, re.MULTILINE))
def test_command_lines_are_accepted_by_the_parser(line):
    command, *options = line.split()
    if command == "bench":
        assert options == ["--help"]  # runs nothing; its options are the bench's own
    else:
        assert cli._parser().parse_args([command, *options]).command == command


def test_table_place_for_measured_figures_is_there():
    assert re.search(r"<!-- h200-table:begin -->\n.*<!-- h200-table:end -->", README, re.DOTALL)


def test_files_that_are_linked_exist():
    for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
