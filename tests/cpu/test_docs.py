"""The documents say what is true: code blocks run, generated parts are today's, links, names and commands exist."""

import configparser
import contextlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from bench import __main__ as bench
from cute_dash import cli, registry
from cute_dash.config import TUNED_HEAD_DIMS, get_config
from docs import (
    make_architecture,
    make_determinism,
    make_gallery,
    make_performance,
    make_training,
    regions,
    tutorial,
)
from docs.figures import cta, memory
from tests import fuzz, sanitize
from tests.sanitizer_output import read_output

ROOT = Path(__file__).parents[2]
DOCUMENTS = {path.name: path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
FOLDERS = tuple(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
WRITTEN_BY_THE_READER = {f"schedules/{make_gallery.EXAMPLE}.py"}
every_document = pytest.mark.parametrize("name", DOCUMENTS)


def read(name):
    return DOCUMENTS[name].read_text()


def list_commands(text, program):
    """Command lines of a document: indented, after a prompt, in a shell block, or in backticks; without comments."""
    lines = re.findall(rf"^(?:    |\$ |)({program} .*)$", text, re.MULTILINE)
    lines += re.findall(rf"`({program} [^`\n]+)`", text)
    commands = [shlex.split(line.partition(" > ")[0], comments=True) for line in lines]  # without redirections
    return [command[len(program.split()) :] for command in commands if "..." not in command]


# Generated parts


@pytest.fixture(scope="module")
def gallery():
    """schedules.md as it would be written today; running it runs the tutorial."""
    pytest.importorskip("matplotlib", reason="matplotlib, the `plot` extra, is not installed")
    return make_gallery.render(read("schedules.md"), make_gallery.list_entries())


def test_gallery_and_tutorial_are_up_to_date(gallery):
    assert gallery == read("schedules.md"), "run: python -m docs.make_gallery"


def test_architecture_is_up_to_date():
    assert make_architecture.render(read("architecture.md")) == read("architecture.md"), (
        "run: python -m docs.make_architecture"
    )


@pytest.mark.parametrize("document", make_performance.TABLES, ids=lambda document: document.name)
def test_measured_tables_are_those_of_the_recorded_runs(document):
    assert make_performance.render(document) == document.read_text(), "run: python -m docs.make_performance"


@pytest.mark.parametrize("document", sorted(regions.FOLDER.glob("*.md")), ids=lambda document: document.name)
def test_every_row_of_a_table_has_as_many_cells_as_its_header(document):
    """Split at bars outside of code."""
    tables = re.findall(r"(?:^\|.*\n)+", re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL), re.MULTILINE)
    for table in tables:
        rows = [re.sub(r"`[^`]*`", "", row).count("|") for row in table.splitlines()]
        assert len(rows) > 2 and set(rows) == {rows[0]}, table.splitlines()[0]


def test_training_is_up_to_date():
    assert make_training.render(read("README.md")) == read("README.md"), "run: python -m docs.make_training"


def test_training_is_recorded_and_described(tmp_path):
    """On the CPU, where `unordered` repeats its bits: so the last step of a run is changed by hand."""
    assert make_training.main(["--run", "--steps", "2", "--folder", str(tmp_path)]) == 0
    text = " ".join(make_training.describe(tmp_path).split())
    assert "Two runs of `auto` are equal" in text and "after each of 2 steps" in text
    step, loss, _ = (tmp_path / "unordered_2.csv").read_text().splitlines()[2].split(",")
    changed = (tmp_path / "unordered_1.csv").read_text().splitlines()[:2] + [f"{step},{float(loss) + 0.5},00"]
    (tmp_path / "unordered_2.csv").write_text("\n".join(changed) + "\n")
    text = " ".join(make_training.describe(tmp_path).split())
    assert "Two runs of `unordered` have other weights from step 1 on, and losses that are up to 0.5 apart" in text


def test_determinism_is_up_to_date():
    assert make_determinism.render(read("determinism.md")) == read("determinism.md"), (
        "run: python -m docs.make_determinism"
    )


def test_determinism_quotes_what_is_recorded(tmp_path):
    """From files as the two commands write them; without files, how to make them."""
    assert make_determinism.describe_results(tmp_path) == make_determinism.NONE
    report = tmp_path / "verify_bits.json"
    with contextlib.redirect_stdout(report.open("w")):
        command = ["verify-bits", "--emulator", "--minutes", "0", "--head-dim", "64", "--seqlen-q", "200", "--json"]
        assert cli.main([*command, "--schedule", "baseline", "descending", "--mask", "full"]) == 0
    assert fuzz.main(["--cases", "2", "--device", "cpu", "--json", str(tmp_path / "fuzz.json")]) == 0
    text = make_determinism.describe_results(tmp_path)
    assert "`cute-dash verify-bits`, 2 configurations" in text
    (row,) = re.findall(r"^\| interleavings .*$", text, re.MULTILINE)
    assert [cell.strip() for cell in row.split("|")][2:-1] == ["2", "16", "16", "16"]
    assert "`unordered` changed its bits in 1 of 1 configurations" in text
    assert "2 cases in 1 process, 0 failed, 0 without a result" in text


def test_determinism_quotes_what_the_sanitizer_found(tmp_path, monkeypatch):
    """A finding of two problems is listed once; one without explanation and a problem that broke off are said."""
    place = "kernel_flash_bwd_sm90_0+0x10"
    hazard = f"""
========= Error: Potential WAR hazard detected at __shared__ 0x4d0 in block (3,0,0) :
=========     Read Thread (130,0,0) at {place}
=========     Write Thread (32,0,0) at {place}
"""
    explained, other = (read_output(text.splitlines(), []).rows for text in (hazard, hazard.replace("WAR", "RAW")))
    roles = ("MMA warpgroup 0", "STORE_DQ_EVEN")
    finding = sanitize.Finding("racecheck", "WAR", "outside the storage, 0x4d0", roles)
    monkeypatch.setitem(sanitize.EXPLANATIONS, finding, "it is ordered")
    limits = frozenset({(finding.kind, finding.buffer)})
    racecheck = [sanitize.Result("racecheck", name, explained, limits=limits) for name in ("a", "b")]
    racecheck.append(sanitize.Result("racecheck", "c", other))
    chains = {
        sanitize.Chain("sDuty", "whole"): sanitize.Result("racecheck", "sDuty whole", explained),
        sanitize.Chain("sDuty", "broken"): sanitize.Result("racecheck", "sDuty broken", failure="stopped"),
        sanitize.Chain("sStats", "whole"): sanitize.Result("racecheck", "sStats whole"),
    }
    synccheck = [sanitize.Result("synccheck", "a"), sanitize.Result("synccheck", "b", failure="stopped")]
    runs = [sanitize.Run("racecheck", racecheck, racecheck[0], chains), sanitize.Run("synccheck", synccheck)]
    report = sanitize.as_dict(runs, {"GPU": "H200", "compute-sanitizer": "2026.4"})
    (tmp_path / "sanitize.json").write_text(json.dumps(report))
    text = make_determinism.describe_results(tmp_path)
    assert "GPU H200, compute-sanitizer 2026.4:" in text
    tables = [table.splitlines() for table in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)]
    tools, problems, controls = (
        [[cell.strip() for cell in row.split("|")[1:-1]] for row in (table[0], *table[2:])] for table in tables
    )
    assert tools[1:] == [["racecheck", "3", "0", "0", "2", "1", "seen"], ["synccheck", "2", "1", "1", "0", "0", "none"]]
    where = "on `outside the storage, 0x4d0`, MMA warpgroup 0, then STORE_DQ_EVEN"
    assert re.findall(r"^- .*$", text, re.MULTILINE) == [
        f"- racecheck, 2 in 2 problems: WAR {where}: it is ordered",
        f"- racecheck, 1 in 1 problem: RAW {where}: **not explained**",
    ]
    assert problems == [
        ["problem", "racecheck", "synccheck"],
        ["a", "1 explained", "clean"],
        ["b", "1 explained", "not finished"],
        ["c", "1 found", ""],
    ]
    assert controls == [
        ["control", "`whole`, right", "`broken`, a race"],
        ["`sDuty`", "in CTAs 3", "not finished"],
        ["`sStats`", "clean", "none"],
    ]


def test_gallery_shows_every_schedule():
    shown = re.findall(r"^<!-- gallery (\w+):begin -->$", read("schedules.md"), re.MULTILINE)
    assert sorted(shown) == make_gallery.list_names()
    headings = re.findall(r"^### (\w+)$", read("schedules.md").split("## Gallery")[1].split("\n## ")[0], re.MULTILINE)
    assert headings == shown


def test_gallery_quotes_the_results_file():
    """`baseline` in the first cell, read from the file by hand."""
    records = json.loads(make_gallery.MEASURED.read_text())["records"]
    (tflops,) = [
        r["tflops"]
        for r in records
        if (r["schedule"], r["head_dim"], r["mask"], r["seqlen_q"], r["batch"]) == ("baseline", 64, "causal", 2048, 8)
    ]
    assert f"hd64 causal 2k {tflops:.0f}," in read("schedules.md").split("### baseline")[1].split("### descending")[0]


def test_gallery_times_are_the_papers():
    """m heads of n tiles on n SMs, c = 1, r = 1/4: the formulas that the paper gives."""
    m, n, c, r = 4, 8, 1.0, 0.25
    expected = {
        "baseline": m * n * (c + r) + (n - 1) * r,  # of the full mask; the causal one takes as long
        "descending": m * (n + 1) * (c + r) / 2 + (n - 1) * r,
        "shift": m * n * (c + r),
    }
    entries = {entry.name: entry for entry in make_gallery.list_entries() if entry.name in expected}
    assert {name: entry.timeline.makespan for name, entry in entries.items()} == expected


def test_a_stale_or_missing_region_is_noticed():
    document = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n"
    assert regions.fill(document, "x", "new\n") == document.replace("old", "new")
    with pytest.raises(ValueError, match="0 regions 'y'"):
        regions.fill(document, "y", "new")


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "figures").glob("*.[ps][nv]g")), ids=lambda path: path.name)
def test_figures_are_small_and_used(path):
    assert path.stat().st_size < 60_000
    assert any(f"figures/{path.name})" in read(name) for name in DOCUMENTS)


def test_architecture_figures_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib, the `plot` extra, is not installed")
    with regions.repeatable_svg():
        for name, draw in make_architecture.FIGURES.items():
            draw().savefig(tmp_path / f"{name}.svg")
            drawn, kept = ((folder / f"{name}.svg").read_text() for folder in (tmp_path, regions.FIGURES))
            # texts, not coordinates, which may differ between versions of matplotlib
            assert re.findall(r"<text[^>]*>([^<]*)", drawn) == re.findall(r"<text[^>]*>([^<]*)", kept)


# The memory map


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", TUNED_HEAD_DIMS)
def test_memory_map_is_the_kernels(head_dim, causal):
    cutlass = pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
    from cute_dash.kernels.flash_bwd_sm90 import FlashAttentionBackwardSm90

    config = get_config(head_dim, causal)
    kernel = FlashAttentionBackwardSm90(config, cutlass.BFloat16, registry.load("baseline"))
    storage = kernel.shared_storage()
    # the bytes from each field to the next, or to the end
    starts = {**storage._offsets, "": storage.size_in_bytes()}
    sizes = {name: end - start for (name, start), end in zip(starts.items(), [*starts.values()][1:], strict=False)}
    parts = memory.list_parts(config)
    assert storage.size_in_bytes() <= sum(parts.values())
    stats = parts.pop("sStats")  # padding follows it
    assert stats <= sizes["sStats"] < stats + 1024
    assert parts.pop("barriers") >= starts["sOnes"]
    assert {name: sizes[name] for name in parts} == parts


# The tutorial


def test_tutorial_shows_what_its_commands_print(tmp_path):
    """An outdated output, and an output of a Python block, are replaced; what raises is passed on."""
    document = (
        "```python file=mine.py\nfrom schedules.baseline import SCHEDULE\n```\n\n"
        "```console\n$ cute-dash check mine:SCHEDULE --seqlen-q 128\nsomething old\n```\n\n"
        "```python\nimport mine\nprint(mine.SCHEDULE.name)\n```\n\n```text\nsomething old\n```\n"
    )
    ran = tutorial.run(document, tmp_path)
    assert "something old" not in ran
    assert "\nbaseline version 1 keeps every rule for causal mask, 128 x 128 tokens" in ran
    assert ran.endswith("```text\nbaseline\n```\n")
    assert "mine" not in sys.modules
    assert Path.cwd() != tmp_path
    with pytest.raises(AssertionError):
        tutorial.run("```python\nassert False\n```\n", tmp_path)
    with pytest.raises(RuntimeError, match="not_there"):
        tutorial.run("```console\n$ cute-dash check not_there\n```\n", tmp_path)


def test_tutorial_says_what_it_shows():
    """The first attempt breaks a rule, the second one does not; and the order is worked out by hand."""
    text = read("schedules.md").split("## Write one")[1]
    verdicts = re.findall(r"^outside_in version 1 (keeps|breaks)", text, re.MULTILINE)
    assert verdicts == ["keeps", "breaks", "keeps", "keeps", "keeps"]
    printed = text.split("### Look at it")[1].split("```text\n")[1]
    # claims 0, 3, 1, 2; m_block 3 sees all of them, so n_block 3 adds second and n_block 2 last
    assert "    0  3:0  3:2  3:3  3:1\n" in printed
    assert "claim    0    2    3    1\n" in printed


def test_schedule_of_the_tutorial_can_be_published(tmp_path, monkeypatch):
    """The entry point of its pyproject.toml, in a distribution as pip would install it, makes it known by its name."""
    files = re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", read("schedules.md"), re.DOTALL | re.MULTILINE)
    for name, body in files:
        (tmp_path / name).write_text(body)
    project = configparser.ConfigParser()
    project.read(tmp_path / "pyproject.toml")
    ((name, value),) = project['project.entry-points."cute_dash.schedules"'].items()
    assert f'["{value.strip(chr(34)).partition(":")[0]}"]' == project["tool.setuptools"]["py-modules"]
    installed = tmp_path / "outside_in-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-in\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[cute_dash.schedules]\n{name} = {value.strip(chr(34))}\n")
    assert "outside_in" not in registry.available()
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert "outside_in" in registry.available()
        assert registry.load("outside_in").name == "outside_in"
    finally:
        sys.modules.pop("outside_in", None)


# Names


@every_document
def test_links_lead_somewhere(name):
    folder = DOCUMENTS[name].parent
    links = re.findall(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]*))?\)", read(name))
    assert links
    for target, anchor in links:
        path = folder / target if target else DOCUMENTS[name]
        assert path.exists(), target
        if anchor:
            assert anchor in list_anchors(path.read_text()), f"{target}#{anchor}"


def list_anchors(text):
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@every_document
def test_files_that_are_named_exist(name):
    for target in set(re.findall(r"`([\w.*-]+/[\w./*-]*)`", read(name))) - WRITTEN_BY_THE_READER:
        if target.split("/")[0] in FOLDERS:
            assert any(ROOT.glob(target.rstrip("/"))), target


def test_what_the_change_table_names_is_in_the_files_that_it_links():
    section = read("architecture.md").split("To change X")[1]
    rows = re.findall(r"^\| (?!to change)(.*?) \| (.*?) \| (.*?) \|$", section, re.MULTILINE)
    assert len(rows) > 10
    for _, files, names in rows:
        sources = [(ROOT / "docs" / target).read_text() for target in re.findall(r"\]\(([^)]+)\)", files)]
        for word in re.findall(r"`(\w+)`", names):
            assert any(re.search(rf"\b{word}\b", source) for source in sources), word


def test_roles_and_barriers_are_the_kernels():
    text = read("architecture.md")
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
    from cute_dash.kernels.bundles import Rings
    from cute_dash.kernels.pipeline import Ring
    from cute_dash.kernels.roles import NamedBarrierBwd, WarpRole

    named = [f"ring_{name}" if kind is Ring else name for name, kind in Rings.__annotations__.items()]
    named += [barrier.name for barrier in NamedBarrierBwd]
    table = text.split("Synchronization inside a CTA")[1].split("\n\nRings")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == sorted(named, key=table.index)
    for role in WarpRole:
        assert role.name in text
    drawn = {part for box in cta.BOXES.values() for part in box[-1].splitlines()[:1]} | {a[2] for a in cta.ARROWS}
    for name in [*named, *(role.name for role in WarpRole)]:
        if name != "Epilogue":
            assert any(part.startswith(name) for part in drawn), name


@every_document
def test_commands_are_accepted(name):
    parser = cli._parser()
    commands = list_commands(read(name), "cute-dash")
    for command, *options in commands:
        if command == "bench":
            parse_bench(options)
        elif not options and f"`cute-dash {command}`" in read(name):  # a mention
            assert command in parser._subparsers._group_actions[0].choices
        else:
            assert parser.parse_args([command, *options]).command == command
    for options in list_commands(read(name), "python -m bench"):
        parse_bench(options)


def parse_bench(options):
    try:
        bench._parser().parse_args(options)
    except SystemExit as exit:
        assert exit.code == 0, options  # --help


@pytest.mark.parametrize("name", ["README.md", "schedules.md"])
def test_commands_are_found_at_all(name):
    assert len(list_commands(read(name), "cute-dash")) > 3
