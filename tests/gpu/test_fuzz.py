"""Random problems on the GPU; `python -m tests.fuzz --cases 2000` runs more of them."""

import os

from tests import fuzz

NUM_CASES = 200


def test_random_problems():
    fuzz.warm(min(os.cpu_count() or 1, 8))
    tally = fuzz.fuzz(0, range(NUM_CASES), "cuda")
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.passed == NUM_CASES and tally.comparisons > 2 * NUM_CASES
