"""The picture of training runs in README.md, from four runs of the example: two of `auto`, two of `unordered`.

    python -m docs.make_training --run     # on a Hopper GPU: trains, and records the runs in docs/results/training
    python -m docs.make_training           # draws docs/figures/training.png and rewrites the README's part; no GPU

From the root of a checkout; the second needs the `plot` extra.
"""

import argparse
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from docs import regions
from examples import train_gpt

DOCUMENT = regions.FOLDER.parent / "README.md"
RESULTS = regions.FOLDER / "results" / "training"
FIGURE = regions.FIGURES / "training.png"
SCHEDULES = ("auto", "unordered")
ENVIRONMENT = "environment.txt"
STEPS = 200
NONE = (
    "Pictures of such runs are not in the repository yet: `python -m docs.make_training --run` on a Hopper GPU "
    "records them, and\n`python -m docs.make_training` draws them."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, or draws what was trained; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m docs.make_training", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", action="store_true", help="train and record, all four runs at once on one GPU")
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the records; default: docs/results/training")
    args = parser.parse_args(argv)
    if args.run:
        return record(args.folder, args.steps)
    groups = [[str(path) for path in list_runs(args.folder, schedule)] for schedule in SCHEDULES]
    train_gpt.plot(groups, str(FIGURE))
    regions.compact(FIGURE)
    DOCUMENT.write_text(render(DOCUMENT.read_text(), args.folder))
    return 0


def list_runs(folder: Path, schedule: str) -> list[Path]:
    """The two records of a schedule."""
    return [folder / f"{schedule}_{number}.csv" for number in (1, 2)]


def record(folder: Path, steps: int) -> int:
    """Trains all runs at once: they contend for the GPU, which must not change a bit of those of `auto`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ENVIRONMENT).write_text(describe_environment() + "\n")
    start, processes = time.monotonic(), []
    for schedule in SCHEDULES:
        for path in list_runs(folder, schedule):
            command = [sys.executable, "-m", "examples.train_gpt", "--steps", str(steps), "--schedule", schedule]
            command += ["--out", str(path.absolute())]
            with path.with_suffix(".log").open("w") as log:
                processes.append((path, subprocess.Popen(command, cwd=DOCUMENT.parent, stdout=log, stderr=log)))
    failed = [path for path, process in processes if process.wait()]
    for path, _ in processes:
        log = path.with_suffix(".log")
        print(f"{path.stem}: {log.read_text().splitlines()[-1]}" if path not in failed else log.read_text())
        log.unlink()
    if not failed:
        print(describe(folder))
    print(f"{time.monotonic() - start:.0f} s")
    return int(bool(failed))


def describe_environment() -> str:
    """What the bits depend on, beside the seed, the schedule and the versions of this package."""
    import importlib.metadata
    import platform

    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU emulator"
    try:
        dsl = importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        dsl = "none"
    return f"{device}, torch {torch.__version__}, CuTe DSL {dsl}, Python {platform.python_version()}"


def render(document: str, folder: Path = RESULTS) -> str:
    """The document with its part about training as it is today."""
    return regions.fill(document, "training", describe(folder) if (folder / ENVIRONMENT).exists() else NONE)


def describe(folder: Path) -> str:
    """The picture, and in words what it shows."""
    first, second = ([train_gpt.read_rows(str(path)) for path in list_runs(folder, name)] for name in SCHEDULES)
    picture = f"![Losses of two runs of auto and of two runs of unordered](docs/figures/{FIGURE.name})"
    words = [
        describe_pair("auto", *first),
        describe_pair("unordered", *second),
        "A cross marks where a run parts from the first of its schedule; below is how far its loss is from that one's, "
        "in powers of ten.",
        f"({(folder / ENVIRONMENT).read_text().strip()}; all four at once.)",
    ]
    return f"{picture}\n\n{textwrap.fill(' '.join(words), 120, break_on_hyphens=False)}"


def describe_pair(name: str, a: list[train_gpt.Row], b: list[train_gpt.Row]) -> str:
    """One sentence about two runs of a schedule."""
    parting = train_gpt.find_parting(a, b)
    if parting is None:
        return (
            f"Two runs of `{name}` are equal in every loss and in the hash of all weights after each of {len(a)} "
            f"steps, at the end {a[-1].hash[:12]}."
        )
    gap = max(abs(float(x.loss) - float(y.loss)) for x, y in zip(a, b, strict=False))
    return f"Two runs of `{name}` have other weights from step {parting} on, and losses that are up to {gap:.2g} apart."


if __name__ == "__main__":
    raise SystemExit(main())
