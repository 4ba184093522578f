"""Trains a small byte-level GPT whose losses and weights have the same bits on every run.

    python examples/train_gpt.py --out a.csv
    python examples/train_gpt.py --out b.csv
    python examples/train_gpt.py --compare a.csv b.csv           # exit status: 0 equal, 1 they part, 2 wrong usage
    python examples/train_gpt.py --plot a.csv b.csv -o runs.png

It learns the sources of Python's own standard library. Attention is `cute_dash.flash_attn_func`: in bf16 on a Hopper
GPU, in fp32 on the emulator with a tiny model on a CPU. Nothing else in a step may change bits either: see
`make_deterministic`. In shapes B = batch, T = seqlen, H = heads, D = HEAD_DIM, C = width = H * D.
"""

import argparse
import csv
import hashlib
import os
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cute_dash import flash_attn_func, interface
from cute_dash.validation import resolve_schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Config:
    num_layers: int
    width: int
    batch: int
    seqlen: int


HEAD_DIM = 64
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1  # of torch.manual_seed
# At least three KV tiles of 128 tokens in a sequence: a dQ tile that sums only two has the same bits in either order.
GPU_CONFIG = Config(num_layers=6, width=512, batch=16, seqlen=1024)
CPU_CONFIG = Config(num_layers=2, width=128, batch=1, seqlen=384)


class Attention(nn.Module):
    def __init__(self, config: Config, schedule: str) -> None:
        super().__init__()
        self.schedule = schedule
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, HEAD_DIM)).unbind(2)  # (B, T, H, D) each
        out = flash_attn_func(q, k, v, causal=True, schedule=self.schedule)  # (B, T, H, D)
        return self.proj(out.flatten(2))  # (B, T, C)


class Block(nn.Module):
    # no dropout: its masks would come from the device's generator, whose numbers differ between devices
    def __init__(self, config: Config, schedule: str) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config, schedule)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))  # (B, T, C)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))  # (B, T, C)


class GPT(nn.Module):
    def __init__(self, config: Config, schedule: str) -> None:
        super().__init__()
        # Many positions add to one row of its gradient. On CUDA this backward adds them sorted by token, always in the
        # same order; the backward of `index_select` would use atomics.
        self.token_embedding = nn.Embedding(256, config.width)
        self.position_embedding = nn.Parameter(torch.empty(config.seqlen, config.width))
        self.blocks = nn.Sequential(*(Block(config, schedule) for _ in range(config.num_layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # bytes (B, T)
        x = self.token_embedding(tokens) + self.position_embedding[: tokens.shape[1]]  # (B, T, C)
        return self.head(self.norm(self.blocks(x)))  # (B, T, 256)


def read_corpus() -> list[Tensor]:
    """Training and validation bytes, uint8, of the standard library's top-level modules; every tenth file validates."""
    # sorted: a directory lists its files in any order; _sysconfigdata_* holds paths of the machine that built Python
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    sources = [path.read_bytes() for path in paths if not path.name.startswith("_sysconfigdata")]
    parts = [b"".join(s for i, s in enumerate(sources) if (i % 10 == 9) == held_out) for held_out in (False, True)]
    print(f"corpus: {len(parts[0]):,} bytes, sha256 {hashlib.sha256(parts[0]).hexdigest()[:12]}")
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]


def draw_batch(data: Tensor, config: Config, generator: torch.Generator) -> Tensor:
    """(B, T + 1) tokens, int64, from random places; the generator is a CPU one: the same batch for every device."""
    starts = torch.randint(len(data) - config.seqlen, (config.batch, 1), generator=generator)  # (B, 1)
    return data[starts + torch.arange(config.seqlen + 1)].long()  # (B, T + 1)


def get_loss(model: nn.Module, batch: Tensor, device: torch.device) -> Tensor:
    """Mean cross entropy, in nats per byte, of a batch (B, T + 1)."""
    inputs, targets = batch[:, :-1].to(device), batch[:, 1:].to(device)  # (B, T) each
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(inputs).flatten(0, 1)  # (B * T, 256)
    # flat: for targets of more than one dim torch may use a kernel with atomics, which deterministic mode refuses
    return F.cross_entropy(logits.float(), targets.flatten())


def make_deterministic(seed: int) -> None:
    """What a step needs beside cute_dash to give the same bits again; to be called before CUDA starts."""
    # cuBLAS may take other scratch memory at another call, and with it split a sum in another way: this fixes it. It is
    # read once, when cuBLAS starts; without it torch refuses GEMMs in deterministic mode.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Where torch has a kernel without atomics it takes that one; where it has none it raises, so that no change to this
    # model loses determinism unseen. It does not reach into cute_dash: with `unordered` bits may change all the same.
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)  # for the initial weights; they are drawn on the CPU and so are the same on every device
    # How a CPU splits its sums depends on the number of threads; the emulator's tiles are too small for more than one.
    torch.set_num_threads(1)


def hash_weights(model: nn.Module) -> str:
    """sha256 of the names, shapes, dtypes and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


class Row(NamedTuple):
    """A line of the CSV, as text: two are equal exactly when all their bits are, also where the loss is NaN."""

    step: str
    loss: str  # before the step's update, with all its digits
    hash: str  # of the weights after the update


def check_schedule(schedule: str, device: torch.device) -> None:
    """Raises ValueError or ImportError if the model's attention cannot run with it."""
    config = get_config(device)
    x = torch.empty(config.batch, config.seqlen, config.width // HEAD_DIM, HEAD_DIM, device=device)  # (B, T, H, D)
    resolve_schedule(schedule, x, x, causal=True)


def get_config(device: torch.device) -> Config:
    return GPU_CONFIG if device.type == "cuda" else CPU_CONFIG


def train(device: torch.device, schedule: str, seed: int, steps: int) -> Iterator[tuple[Row, float]]:
    """Yields each step's row and its tokens per second (without the hashing)."""
    config = get_config(device)
    training, validation = read_corpus()
    model = GPT(config, schedule).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(seed)  # its own: nothing else that draws numbers can shift the batches
    for step in range(steps):
        start = time.perf_counter()
        loss = get_loss(model, draw_batch(training, config, generator), device)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        digits = repr(loss.item())  # waits for the device
        speed = config.batch * config.seqlen / (time.perf_counter() - start)
        yield Row(str(step), digits, hash_weights(model)), speed
    held_out = draw_batch(validation, replace(config, batch=16), torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = get_loss(model, held_out, device).item()
    print(f"validation loss {loss:.4f}; schedule that ran: {interface.last_schedule().name}")


def read_rows(path: str) -> list[Row]:
    with open(path, newline="") as file:
        try:
            lines = list(csv.reader(file))
        except (UnicodeDecodeError, csv.Error):
            lines = []
    if len(lines) < 2 or lines[0] != list(Row._fields) or any(len(line) != len(Row._fields) for line in lines):
        raise ValueError(f"{path} is not the record of a run; allowed: a file that --out wrote")
    return [Row(*line) for line in lines[1:]]


def find_parting(a: list[Row], b: list[Row]) -> int | None:
    """The first place where two runs differ, or which only one of them has; None if they are equal."""
    return next((i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y), None)


def compare(paths: list[str]) -> int:
    """Says whether two runs are equal; returns the exit status."""
    runs = [read_rows(path) for path in paths]
    if (parting := find_parting(*runs)) is None:
        print(f"equal: {len(runs[0])} steps, weights {runs[0][-1].hash[:12]}")
        return 0
    print(f"they part at step {parting}:")
    for path, run in zip(paths, runs, strict=True):
        print(f"  {path}: {run[parting] if parting < len(run) else 'has ended'}")
    return 1


def plot(groups: list[list[str]], out: str) -> int:
    """Draws groups of runs side by side: losses, distances to a group's first run, crosses where runs part from it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    figure = Figure(figsize=(8, 6) if len(groups) == 1 else (5 * len(groups), 5), layout="constrained")
    grid = figure.subplots(2, len(groups), sharex=True, sharey="row", height_ratios=(3, 2), squeeze=False)
    losses, distances = grid[:, 0]
    # logarithms: losses differ most where they are low, distances grow from a loss's last digit; 0 has a place, too
    losses.set(ylabel="loss, nats per byte", yscale="log")
    losses.yaxis.set(major_locator=LogLocator(subs=range(1, 10)), minor_locator=NullLocator(), major_formatter="{x:g}")
    distances.set_yscale("symlog", linthresh=1e-6, linscale=0.5)
    for (curves, gaps), paths in zip(grid.T, groups, strict=True):
        draw_group(curves, gaps, paths)
    distances.set(ylabel="distance from first", ylim=(-3e-7, None))
    figure.savefig(out, dpi=150)
    return 0


def draw_group(curves: "Axes", gaps: "Axes", paths: list[str]) -> None:
    """Draws runs into an axes for losses and one for distances."""
    runs = [read_rows(path) for path in paths]
    for i, (path, run) in enumerate(zip(paths, runs, strict=True)):
        size = 1 + 1.5 * (len(runs) - 1 - i)  # equal curves lie on one another: the later ones are thinner
        losses = [float(row.loss) for row in run]
        parting = find_parting(runs[0][: len(run)], run[: len(runs[0])])
        fate = (": equal" if parting is None else f": parts at step {parting}") if i else ""
        curves.plot(losses, f"C{i}", linewidth=size, label=Path(path).stem + fate)
        if parting is not None:
            curves.plot(parting, losses[parting], f"C{i}X", markersize=12)
        gaps.plot([abs(a - float(b.loss)) for a, b in zip(losses, runs[0], strict=False)], linewidth=size)
    curves.legend()
    gaps.set(xlabel="step")


def find_device(name: str | None) -> torch.device:
    """The device of that name, or the best there is; ValueError if the model cannot run on it."""
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count()) if torch.cuda.get_device_capability(i) == (9, 0)]
    names = ["cpu", *gpus, *(["cuda"] if "cuda:0" in gpus else [])]
    if name is None:
        return torch.device("cuda" if "cuda" in names else "cpu")
    if name not in names:
        raise ValueError(f"argument --device: {name!r}; allowed here: {', '.join(names)}")
    return torch.device(name)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Trains a small GPT with the same bits on every run.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--schedule", default="auto", help="name or module:ATTR (`cute-dash schedules` lists them)")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the batches")
    parser.add_argument("--device", help="default: cuda on a Hopper GPU, else cpu")
    parser.add_argument("-o", "--out", metavar="FILE", help="record (CSV) of the training, or picture of --plot")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--compare", nargs=2, metavar="CSV", help="say whether two runs are equal, or where they part")
    action.add_argument(
        "--plot",
        nargs="+",
        action="append",
        metavar="CSV",
        help="draw runs, and where they part from the first; given again: another group of runs beside it",
    )
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"argument --steps: {args.steps}; allowed: at least 1")
    if not MIN_SEED <= args.seed <= MAX_SEED:
        parser.error(f"argument --seed: {args.seed}; allowed: {MIN_SEED} to {MAX_SEED}")
    if args.plot and not args.out:
        parser.error("argument --plot: needs -o/--out, the file of the picture")
    try:
        if args.compare or args.plot:
            return compare(args.compare) if args.compare else plot(args.plot, args.out)
    except (ImportError, OSError, ValueError) as error:  # an uncaught one would exit with 1, which means "they part"
        parser.error(str(error))
    make_deterministic(args.seed)
    try:
        device = find_device(args.device)
        check_schedule(args.schedule, device)
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    try:
        file = open(args.out or os.devnull, "w", newline="")
    except OSError as error:
        parser.error(f"argument -o/--out: {error}")
    with file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        for row, speed in train(device, args.schedule, args.seed, args.steps):
            print(f"step {row.step:>4}  loss {float(row.loss):.4f}  weights {row.hash[:12]}  {speed:9,.0f} tokens/s")
            writer.writerow(row)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
