"""Generated regions of a document, and figures that are small and whose bytes are the same whenever they are drawn.

A region lies between two comments, each on a line of its own:

    <!-- NAME:begin -->
    <!-- NAME:end -->
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

FOLDER = Path(__file__).parent
FIGURES = FOLDER / "figures"


def fill(document: str, name: str, content: str) -> str:
    """`document` with `content` as its region `name`.

    Raises:
        ValueError: the document does not have this region exactly once.
    """
    pattern = re.compile(rf"(<!-- {re.escape(name)}:begin -->\n).*?(<!-- {re.escape(name)}:end -->)", re.DOTALL)
    filled, count = pattern.subn(lambda match: f"{match[1]}{content.strip()}\n{match[2]}", document)
    if count != 1:
        raise ValueError(f"the document has {count} regions {name!r}; it needs <!-- {name}:begin --> ... once")
    return filled


@contextmanager
def repeatable_svg() -> Iterator[None]:
    """Within it, matplotlib writes SVG with text as text, and without dates or random ids."""
    import matplotlib

    settings = {"svg.fonttype": "none", "svg.hashsalt": "cute-dash", "font.family": "sans-serif"}
    with mock.patch.dict(os.environ, {"SOURCE_DATE_EPOCH": "0"}), matplotlib.rc_context(settings):
        yield


def compact(picture: Path) -> None:
    """A chart needs few colours; with a palette of them a PNG takes a third of the bytes."""
    from PIL import Image  # matplotlib needs it too

    with Image.open(picture) as image:
        image.convert("RGB").quantize(64).save(picture, optimize=True)
