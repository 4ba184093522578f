"""The code of docs/distributed.md runs, on CPU tensors, and its table of layouts is true."""

import re
from pathlib import Path

import pytest

from cute_dash.distributed.ring import get_block
from tests.extras import require_transformers

TEXT = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
BLOCKS = [block.replace('"cuda"', '"cpu"') for block in re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.M)]


def run_block(block):
    exec(block, {})


@pytest.mark.parametrize("block", [b for b in BLOCKS if "transformers" not in b], ids=["context parallel", "dtensor"])
def test_code_on_four_ranks(gloo, block):
    gloo.run(run_block, block)


def test_code_with_transformers():
    require_transformers()
    (block,) = [b for b in BLOCKS if "transformers" in b]
    run_block(block)


@pytest.mark.parametrize("world_size", [2, 8])
def test_work_of_a_contiguous_layout(world_size):
    """In steps: the last rank has something to do in each, the first in one."""

    def count(rank):
        return sum(get_block(rank, source, 2, True, "contiguous") is not None for source in range(world_size))

    assert (count(world_size - 1), count(0)) == (world_size, 1)
