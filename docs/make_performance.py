"""Rewrites the tables of performance.md and README.md that are printed from recorded runs.

`python -m docs.make_performance` from the root of a checkout; no GPU. Which runs they are is said here and, for the
gallery too, in `make_gallery`. What is said about them in words stays as it is, and is to be read again.
"""

from collections.abc import Callable
from pathlib import Path

from bench import report
from bench.results import Results
from docs import regions
from docs.make_gallery import MEASURED

DOCUMENT = regions.FOLDER / "performance.md"
README = regions.FOLDER.parent / "README.md"
SUSTAINED = MEASURED.with_name("h200_sustained_b48a618.json")
HEAD_DIMS = MEASURED.with_name("h200_head_dims_733a4d0.json")
BURST_STYLE, SUSTAINED_STYLE = report.Style(markdown=True), report.Style(markdown=True, regime="sustained")

# document, region -> how its table is printed
TABLES: dict[Path, dict[str, Callable[[], str]]] = {
    DOCUMENT: {
        "schedules": lambda: report.summary(Results.load(MEASURED), BURST_STYLE),
        "sustained": lambda: report.summary(Results.load(SUSTAINED), SUSTAINED_STYLE),
        "head_dims": lambda: report.headline(Results.load(HEAD_DIMS), BURST_STYLE),
        "price": lambda: report.price(Results.load(MEASURED), BURST_STYLE),
        "paper": lambda: report.paper(Results.load(MEASURED), BURST_STYLE),
    },
    README: {"headline": lambda: report.headline(Results.load(MEASURED), BURST_STYLE)},
}


def main() -> None:
    """Rewrites the documents."""
    for document in TABLES:
        document.write_text(render(document))


def render(document: Path) -> str:
    """A document with its tables as the recorded runs have them."""
    text = document.read_text()
    for region, table in TABLES[document].items():
        text = regions.fill(text, region, table())
    return text


if __name__ == "__main__":
    main()
