"""The masks in tiles: block ranges and `needs_mask` against brute force over elements, and one mask per window."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cute_dash.config import get_config
from cute_dash.problem import MASKS, ProblemShape, Window, normalize_mask

LENGTHS = st.integers(1, 60)
TILES = st.integers(1, 9)
SIDES = st.one_of(st.just(-1), st.integers(0, 70))


def visible_pairs(seqlen_q, seqlen_k, causal, window_size):
    """Bool (seqlen_q, seqlen_k), written down from the definition of the mask, which knows neither tiles nor kinds."""
    left, right = window_size
    in_line = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    keys = np.arange(seqlen_k)[None, :]
    visible = np.ones((seqlen_q, seqlen_k), bool)
    if left >= 0:
        visible &= keys >= in_line - left
    if right >= 0:
        visible &= keys <= in_line + right
    if causal:
        visible &= keys <= in_line
    return visible


def make_shape(seqlen_q, seqlen_k, tile_m, tile_n, causal, window_size):
    causal, window = normalize_mask(causal, window_size, seqlen_q, seqlen_k)
    return ProblemShape(2, 3, seqlen_q, seqlen_k, tile_m, tile_n, causal, window)


def tile_of(visible, shape, m_block, n_block):
    rows, columns = m_block * shape.tile_m, n_block * shape.tile_n
    return visible[rows : rows + shape.tile_m, columns : columns + shape.tile_n]


def visited_tiles(visible, shape):
    """(m_block, n_block, the pairs of the tile) of every tile that a work tile visits."""
    for n in range(shape.num_n_blocks):
        for m in range(shape.get_m_block_min(n), shape.get_m_block_max(n)):
            yield m, n, tile_of(visible, shape, m, n)


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(LENGTHS, LENGTHS, TILES, TILES, st.booleans(), st.tuples(SIDES, SIDES))
@example(10, 3, 2, 2, False, (0, 5))  # more queries than keys, the right side beyond seqlen_k
@example(4, 40, 3, 3, False, (2, 1))  # KV tiles that no query sees
@example(40, 4, 3, 3, False, (2, 1))  # Q tiles that see no key
@example(7, 7, 7, 7, False, (0, 0))
def test_block_ranges_are_those_of_the_elements(seqlen_q, seqlen_k, tile_m, tile_n, causal, window_size):
    shape = make_shape(seqlen_q, seqlen_k, tile_m, tile_n, causal, window_size)
    visible = visible_pairs(seqlen_q, seqlen_k, causal, window_size)
    m_blocks, n_blocks = range(shape.num_m_blocks), range(shape.num_n_blocks)
    visited = {(m, n): tile_of(visible, shape, m, n).any() for m, n in itertools.product(m_blocks, n_blocks)}
    for n in n_blocks:
        assert list(range(shape.get_m_block_min(n), shape.get_m_block_max(n))) == [m for m in m_blocks if visited[m, n]]
        assert 0 <= shape.get_m_block_min(n) < shape.num_m_blocks
    for m in m_blocks:
        assert list(range(shape.get_n_block_min(m), shape.get_n_block_max(m))) == [n for n in n_blocks if visited[m, n]]
        assert (shape.get_n_block_max(m) == 0) == (not any(visited[m, n] for n in n_blocks))  # what the kernel asks


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(LENGTHS, LENGTHS, TILES, TILES, st.booleans(), st.tuples(SIDES, SIDES))
def test_keys_are_hidden_exactly_where_no_query_sees_one(seqlen_q, seqlen_k, tile_m, tile_n, causal, window_size):
    """Of the visited tiles: parts of two keys, or the whole."""
    shape = make_shape(seqlen_q, seqlen_k, tile_m, tile_n, causal, window_size)
    visible = visible_pairs(seqlen_q, seqlen_k, causal, window_size)
    for m, n, tile in visited_tiles(visible, shape):
        for first, num_keys in ((0, tile_n), *((i, 2) for i in range(tile_n - 1))):
            hidden = not tile[:, first : first + num_keys].any()
            assert shape.hides_keys(m, n * tile_n + first, num_keys) == hidden


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(LENGTHS, LENGTHS, TILES, TILES, st.booleans(), st.tuples(SIDES, SIDES))
def test_a_tile_is_masked_exactly_where_it_must_be(seqlen_q, seqlen_k, tile_m, tile_n, causal, window_size):
    """Of the visited tiles: those with a hidden pair, and those whose last keys do not exist."""
    shape = make_shape(seqlen_q, seqlen_k, tile_m, tile_n, causal, window_size)
    visible = visible_pairs(seqlen_q, seqlen_k, causal, window_size)
    for m, n, tile in visited_tiles(visible, shape):
        beyond_k = (n + 1) * tile_n > seqlen_k
        assert shape.needs_mask(m, n) == (beyond_k or not tile.all())
        # the corners: last key and first query, first key and last query
        assert shape.needs_right_mask(m, n) == (beyond_k or not tile[0, -1])
        assert shape.needs_left_mask(m, n) == (not tile[-1, 0])


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(LENGTHS, LENGTHS, st.booleans(), st.tuples(SIDES, SIDES))
def test_normalizing_keeps_the_mask_and_its_kind_is_the_simplest(seqlen_q, seqlen_k, causal, window_size):
    kept, window = normalize_mask(causal, window_size, seqlen_q, seqlen_k)
    visible = visible_pairs(seqlen_q, seqlen_k, causal, window_size)
    assert (visible_pairs(seqlen_q, seqlen_k, kept, window or (-1, -1)) == visible).all()
    if visible.all() and not causal:
        assert (kept, window) == (False, None)
    elif (visible == visible_pairs(seqlen_q, seqlen_k, True, (-1, -1))).all() and window_size[0] < 0:
        assert (kept, window) == (True, None)
    if window is not None:
        assert not kept and 0 <= window.left < seqlen_k and 0 <= window.right < seqlen_q
    again = normalize_mask(kept, window or (-1, -1), seqlen_q, seqlen_k)
    assert again == (kept, window)


@pytest.mark.parametrize(
    ("causal", "window_size", "expected"),
    [
        (False, (-1, -1), (False, None)),
        (False, (99, 99), (False, None)),
        (False, (2**31 - 1, 2**31 - 1), (False, None)),
        (True, (-1, -1), (True, None)),
        (True, (99, 50), (True, None)),
        (False, (-1, 0), (True, None)),  # flash-attn's spelling of the causal mask
        (True, (32, -1), (False, Window(32, 0))),
        (True, (32, 0), (False, Window(32, 0))),
        (True, (32, 7), (False, Window(32, 0))),  # as flash-attn: causal means right = 0
        (False, (32, -1), (False, Window(32, 99))),
        (False, (-1, 7), (False, Window(99, 7))),
        (False, (0, 0), (False, Window(0, 0))),
    ],
    ids=str,
)
def test_spellings_of_a_mask_at_100_tokens(causal, window_size, expected):
    assert normalize_mask(causal, window_size, 100, 100) == expected


def test_mask_kinds():
    shapes = [make_shape(9, 9, 2, 3, *mask) for mask in ((False, (-1, -1)), (True, (-1, -1)), (False, (2, 1)))]
    assert tuple(shape.mask for shape in shapes) == MASKS
    with pytest.raises(ValueError, match="causal=True with Window"):
        ProblemShape(1, 1, 9, 9, 2, 3, True, Window(2, 0))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_window_has_the_tiles_of_the_causal_mask_and_a_configuration_of_its_own(head_dim):
    local, causal = get_config(head_dim, False, local=True), get_config(head_dim, True)
    assert (local.tile_m, local.tile_n) == (causal.tile_m, causal.tile_n) and local != causal
    assert local.mask == "local" and causal.mask == "causal"
    assert local.make_shape(1, 1, 9, 9, Window(2, 0)).window == (2, 0)
    with pytest.raises(ValueError, match=r"window=Window\(left=2, right=0\) does not go with local=False"):
        causal.make_shape(1, 1, 9, 9, Window(2, 0))
    with pytest.raises(ValueError, match="window=None does not go with local=True"):
        local.make_shape(1, 1, 9, 9)
    with pytest.raises(ValueError, match="exclude each other"):
        get_config(head_dim, True, local=True)
