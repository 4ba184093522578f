"""The training example: its runs repeat to the bit, it learns, and what compares, hashes and draws runs can fail."""

import csv
import importlib.util
import os
import re
import runpy
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_gpt.py"


def load_example():
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


train_gpt = load_example()


def train(out, *options):
    """A run in an interpreter of its own, as a user starts it; returns what it printed."""
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--out", str(out), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Record of 30 steps, and what was printed."""
    path = tmp_path_factory.mktemp("runs") / "run.csv"
    return path, train(path, "--steps", "30")


def write_rows(path, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([("step", "loss", "hash"), *rows])
    return str(path)


def exit_status(monkeypatch, *options):
    """Of the script as a program, without the seconds that another interpreter takes."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return stop.value.code


def test_same_seed_gives_equal_records(run, tmp_path):
    path, _ = run
    train(tmp_path / "again.csv", "--steps", "6", "--seed", "0")
    again = read(tmp_path / "again.csv")
    assert len(again) == 6
    assert again == read(path)[:6]


def test_every_step_changes_the_weights(run):
    hashes = [row["hash"] for row in read(run[0])]
    assert len(set(hashes)) == len(hashes) == 30


@pytest.fixture
def deterministic(monkeypatch):
    """Lets a test run in this process what changes the process, and undoes it."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    enabled = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(enabled)


def first_row(seed, schedule):
    train_gpt.make_deterministic(seed)
    row, _ = next(train_gpt.train(torch.device("cpu"), schedule, seed, steps=1))
    return row._asdict()


@pytest.mark.usefixtures("deterministic")
def test_what_the_bits_depend_on(run):
    """On the seed, and on the order of additions, which leaves the forward pass and so the first loss as they are."""
    recorded = read(run[0])[0]
    assert first_row(0, "auto") == recorded
    other_seed, other_order = first_row(1, "auto"), first_row(0, "baseline")
    assert other_seed["loss"] != recorded["loss"] and other_seed["hash"] != recorded["hash"]
    assert other_order["loss"] == recorded["loss"] and other_order["hash"] != recorded["hash"]


@pytest.mark.usefixtures("deterministic")
def test_main_makes_torch_deterministic_before_it_trains(monkeypatch):
    calls = []

    def train(*arguments):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert (
            torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
        )
        assert torch.initial_seed() == 7
        calls.append(arguments)
        return iter(())

    monkeypatch.setattr(train_gpt, "train", train)
    options = ["--device", "cpu", "--schedule", "unordered", "--seed", "7", "--steps", "3"]
    assert train_gpt.main(options) == 0
    assert calls == [(torch.device("cpu"), "unordered", 7, 3)]


def test_the_model_learns(run):
    """From log(256) = 5.55 nats, a model that knows nothing, to below what byte frequencies alone give."""
    losses = [float(row["loss"]) for row in read(run[0])]
    assert losses[0] == pytest.approx(5.55, abs=0.4)
    data, _ = train_gpt.read_corpus()
    frequencies = torch.bincount(data.long(), minlength=256) / len(data)
    entropy = torch.special.entr(frequencies).sum().item()
    assert statistics.mean(losses[-10:]) < entropy < statistics.mean(losses[:5])


def test_each_step_is_printed(run):
    path, output = run
    printed = [line.split() for line in output.splitlines() if line.startswith("step ")]
    assert len(printed) == 30
    for row, (_, step, _, loss, _, weights, speed, unit) in zip(read(path), printed, strict=True):
        assert (step, weights, unit) == (row["step"], row["hash"][: len(weights)], "tokens/s")
        assert float(loss) == pytest.approx(float(row["loss"]), abs=1e-4)
        assert float(speed.replace(",", "")) > 0


def test_corpus_is_the_standard_library_and_held_out_files_are_not_trained_on():
    training, validation = (bytes(part.tolist()) for part in train_gpt.read_corpus())
    assert len(training) > 5 * len(validation) > 0
    sources = {name: Path(sys.modules[name].__file__).read_bytes() for name in ("csv", "runpy", "statistics")}
    for source in sources.values():
        assert (source in training) != (source in validation)


def test_hash_covers_every_parameter():
    model = train_gpt.GPT(train_gpt.CPU_CONFIG, "auto")
    hashes = {train_gpt.hash_weights(model)}
    parameters = list(model.named_parameters())
    for _, parameter in parameters:
        last = parameter.detach().view(-1)[-1:]
        old = last.clone()
        torch.nextafter(old, torch.tensor([float("inf")]), out=last)
        hashes.add(train_gpt.hash_weights(model))
        last.copy_(old)
    assert len(hashes) == 1 + len(parameters)
    assert train_gpt.hash_weights(model) in hashes


def test_attention_is_causal():
    model = train_gpt.GPT(train_gpt.CPU_CONFIG, "auto")
    tokens = torch.randint(256, (1, train_gpt.CPU_CONFIG.seqlen))
    changed = tokens.clone()
    changed[0, 200] = (tokens[0, 200] + 1) % 256
    with torch.no_grad():
        differs = (model(tokens) != model(changed)).any(dim=-1)[0]
    assert not differs[:200].any() and differs[200:].all()


def test_targets_are_the_next_bytes():
    """The loss of a 'model' that is sure of the byte after each, against one that is sure of the byte itself."""
    batch = torch.arange(20)[None]
    sure_of_next = lambda tokens: 100.0 * torch.nn.functional.one_hot(tokens + 1, 256)
    sure_of_same = lambda tokens: 100.0 * torch.nn.functional.one_hot(tokens, 256)
    cpu = torch.device("cpu")
    assert train_gpt.get_loss(sure_of_next, batch, cpu) < 1e-6
    assert train_gpt.get_loss(sure_of_same, batch, cpu) > 99


ROWS = [("0", "5.5", "aa"), ("1", "5.25", "bb"), ("2", "nan", "cc")]


def test_compare_of_equal_runs(tmp_path, monkeypatch, capsys):
    a, b = (write_rows(tmp_path / name, ROWS) for name in ("a.csv", "b.csv"))
    assert exit_status(monkeypatch, "--compare", a, b) == 0
    assert capsys.readouterr().out == "equal: 3 steps, weights cc\n"


@pytest.mark.parametrize(
    ("rows", "step"),
    [
        ([ROWS[0], ("1", "5.25", "xx"), ("2", "5.0", "yy")], 1),
        ([ROWS[0], ("1", "5.250000000000001", "bb"), ROWS[2]], 1),
        ([("0", "5.5", "xx"), *ROWS[1:]], 0),
        (ROWS[:2], 2),
    ],
    ids=["hash", "loss", "first step", "shorter"],
)
@pytest.mark.parametrize("swapped", [False, True], ids=["a b", "b a"])
def test_compare_names_the_first_step_that_differs(tmp_path, monkeypatch, capsys, rows, step, swapped):
    a, b = write_rows(tmp_path / "a.csv", ROWS), write_rows(tmp_path / "b.csv", rows)
    assert exit_status(monkeypatch, "--compare", *((b, a) if swapped else (a, b))) == 1
    assert f"part at step {step}:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("nope", "unknown schedule 'nope': known are "),
        ("shift", "'shift' cannot implement .*: it orders the full mask only"),
        ("no_such_module:X", "no module named 'no_such_module'"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, capsys, schedule, message
):
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    out = tmp_path / "run.csv"
    assert exit_status(monkeypatch, "--device", "cpu", "--schedule", schedule, "--out", str(out)) == 2
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])
    assert not out.exists()


@pytest.mark.parametrize(
    "content", [None, b"", b"step,loss,hash\n", b"a,b,c\n0,1,2\n", b"step,loss,hash\n0,1\n", b"\x89PNG\r\n", b"a\0b\n"]
)
def test_compare_refuses_what_is_no_record(tmp_path, monkeypatch, capsys, content):
    good, bad = write_rows(tmp_path / "good.csv", ROWS), tmp_path / "bad.csv"
    if content is not None:
        bad.write_bytes(content)
    assert exit_status(monkeypatch, "--compare", good, str(bad)) == 2
    assert str(bad) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--steps", "0"), "argument --steps: 0; allowed: at least 1"),
        (("--seed", str(2**64)), f"argument --seed: {2**64}; allowed: {-(2**63)} to {2**64 - 1}"),
        (("--seed", str(-(2**63) - 1)), "argument --seed: "),
        (("--device", "tpu"), "argument --device: 'tpu'; allowed here: cpu"),
        (("--device", "cuda:99"), "argument --device: 'cuda:99'; allowed here: cpu"),
        (("--device", "cpu", "--out", "no such folder/x.csv"), "argument -o/--out: [Errno 2] No such file"),
        (("--plot", "a.csv", "b.csv"), "argument --plot: needs -o/--out, the file of the picture"),
        (("--plot", "a", "--compare", "a", "b"), "argument --compare: not allowed with argument --plot"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, tuple) else "",
)
def test_wrong_usage_names_the_argument(monkeypatch, capsys, options, message):
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    assert exit_status(monkeypatch, *options) == 2
    err = capsys.readouterr().err
    assert err.startswith("usage:")
    assert message in err.splitlines()[-1]


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="argument --device: 'cuda'; allowed here: cpu$"):
        train_gpt.find_device("cuda")
    assert train_gpt.find_device(None).type == "cpu"


def test_devices_are_hopper_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: ((9, 0), (8, 0))[i])
    assert [str(train_gpt.find_device(name)) for name in (None, "cuda", "cuda:0")] == ["cuda", "cuda", "cuda:0"]
    with pytest.raises(ValueError, match="'cuda:1'; allowed here: cpu, cuda:0, cuda$"):
        train_gpt.find_device("cuda:1")


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved."""
    figure = pytest.importorskip("matplotlib.figure", reason="matplotlib, the `plot` extra, is not installed")
    saved = []
    save = figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *a, **k: (saved.append(self), save(self, *a, **k)))
    return saved


def test_plot_marks_where_runs_part(tmp_path, monkeypatch, figures):
    rows = [("0", "5.5", "aa"), ("1", "5.25", "bb"), ("2", "5.0", "cc"), ("3", "4.5", "dd")]
    parted = [*rows[:2], ("2", "5.0", "xx"), ("3", "4.75", "yy")]
    runs = {"first": rows, "again": rows, "longer": [*rows, ("4", "4.0", "ee")], "parted": parted}
    paths = [write_rows(tmp_path / f"{name}.csv", content) for name, content in runs.items()]
    picture = tmp_path / "runs.png"
    assert exit_status(monkeypatch, "--plot", *paths, "-o", str(picture)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    curves, gaps = figures[0].axes
    crosses = [line for line in curves.lines if line.get_marker() == "X"]
    assert [(tuple(line.get_xdata()), tuple(line.get_ydata())) for line in crosses] == [((2,), (5.0,))]
    labels = [text.get_text() for text in curves.get_legend().get_texts()]
    assert labels == ["first", "again: equal", "longer: equal", "parted: parts at step 2"]
    assert [list(line.get_ydata()) for line in gaps.lines] == [[0] * 4, [0] * 4, [0] * 4, [0, 0, 0, 0.25]]


def test_plot_of_what_training_recorded(run, tmp_path, monkeypatch, figures):
    assert exit_status(monkeypatch, "--plot", str(run[0]), "-o", str(tmp_path / "run.png")) == 0
    (line,) = figures[0].axes[0].lines
    assert list(line.get_ydata()) == [float(row["loss"]) for row in read(run[0])]


def test_plot_of_two_groups(tmp_path, monkeypatch, figures):
    rows = [("0", "5.5", "aa"), ("1", "5.25", "bb")]
    parted = [rows[0], ("1", "5.5", "xx")]
    a, b, c = (write_rows(tmp_path / f"{name}.csv", run) for name, run in (("a", rows), ("b", rows), ("c", parted)))
    assert exit_status(monkeypatch, "--plot", a, b, "--plot", a, c, "-o", str(tmp_path / "runs.png")) == 0
    left, right, left_gaps, right_gaps = figures[0].axes
    legends = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in (left, right)]
    assert legends == [["a", "b: equal"], ["a", "c: parts at step 1"]]
    gaps = [list(axes.lines[1].get_ydata()) for axes in (left_gaps, right_gaps)]
    assert gaps == [[0, 0], [0, 0.25]]
