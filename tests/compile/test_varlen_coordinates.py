"""The arithmetic behind TMA tensors that end where a sequence does; the tensors themselves need a GPU."""

import random

from cute_dash.kernels.varlen import MAX_COORDINATE, MAX_ROWS, WRAP_STRIDE
from cute_dash.validation import MAX_TOKENS

ELEMENT_BYTES = 2


def test_coordinates_lead_to_the_tokens_of_the_sequence_and_to_no_others():
    rng = random.Random(0)
    for _ in range(1000):
        stride = 8 * rng.randrange(8, 2**14)
        start = rng.randrange(MAX_TOKENS)
        length = rng.randrange(MAX_TOKENS - start + 1)
        for row in (0, length - 1, length, length + 127):
            x, y = MAX_ROWS - length + row, start + length  # what `view_ragged` makes of row
            offset = (x * stride + y * stride + MAX_ROWS * (WRAP_STRIDE - stride)) * ELEMENT_BYTES
            assert offset % 2**64 == (start + row) * stride * ELEMENT_BYTES % 2**64
            assert (x >= MAX_ROWS) == (row >= length)
            assert max(x, y, MAX_ROWS) < 2**31 and max(y, MAX_ROWS) < MAX_COORDINATE


def test_strides_are_what_tma_takes():
    for stride in (64, 8 * 12345, 2**17):
        for nbytes in (stride * ELEMENT_BYTES, (WRAP_STRIDE - stride) * ELEMENT_BYTES):
            assert nbytes % 16 == 0 and 0 < nbytes < 2**40
