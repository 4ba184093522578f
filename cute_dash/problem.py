"""The problem a schedule orders: extents in tokens and tiles, and which (m_block, n_block) tiles the mask leaves.

m = query, n = key. Host and device: every method takes and returns ints of either kind (see `cute_dash.ints`). The
mask decides which tiles exist; a schedule only orders them.
"""

from dataclasses import dataclass
from typing import NamedTuple

from cute_dash.ints import ceil_div, maximum, minimum

MASKS = ("full", "causal", "local")


class Window(NamedTuple):
    """A sliding window: query i sees keys i + d - left .. i + d + right, with d = seqlen_k - seqlen_q; tokens, >= 0."""

    left: int
    right: int


def normalize_mask(
    causal: bool, window_size: tuple[int, int], seqlen_q: int, seqlen_k: int
) -> tuple[bool, Window | None]:
    """The one mask kind that stands for `causal` and `window_size` together. Host only.

    The causal mask is a window with right = 0, whatever the right side says. A side that hides nothing is no limit, so
    that such a window runs as the full or the causal mask.

    Args:
        causal: bottom-right aligned causal mask.
        window_size: (left, right) in tokens, at least 0, or -1 for no limit on that side.
        seqlen_q, seqlen_k: tokens.

    Returns:
        (causal, window): (False, None) full, (True, None) causal, (False, window) local. An unlimited side of a window
        is the least number that hides nothing: seqlen_k - 1 on the left, seqlen_q - 1 on the right.
    """
    # the last query sees key 0 with left = seqlen_k - 1, the first one the last key with right = seqlen_q - 1
    left, right = (
        most if side < 0 else min(side, most)
        for side, most in zip(window_size, (seqlen_k - 1, seqlen_q - 1), strict=True)
    )
    if causal:
        right = 0
    if left < seqlen_k - 1:
        return False, Window(left, right)
    if causal:
        return True, None
    if right == seqlen_q - 1:
        return False, None
    return (True, None) if right == 0 else (False, Window(left, right))


@dataclass(frozen=True)
class ProblemShape:
    """Extents of one attention backward problem.

    Attributes:
        batch: sequences.
        num_heads: KV heads; a schedule sees no others.
        seqlen_q, seqlen_k: tokens, at least 1.
        tile_m, tile_n: tokens a Q tile and a KV tile cover (Python ints, known when the kernel is compiled).
        causal: bottom-right aligned: query i sees keys 0 .. i + seqlen_k - seqlen_q (Python bool).
        window: limits on both sides, see `Window`; None for the full and the causal mask. Whether there is one is known
            when the kernel is compiled, its sides are ints like the extents: at most seqlen_k - 1 and seqlen_q - 1, of
            the greatest lengths where sequences differ.
        group_size: query heads per KV head. A work tile walks its steps once for each of them, in the same order with
            the same lock values, so a schedule need not know it.
    """

    batch: int
    num_heads: int
    seqlen_q: int
    seqlen_k: int
    tile_m: int
    tile_n: int
    causal: bool
    window: Window | None = None
    group_size: int = 1

    def __post_init__(self) -> None:
        if self.causal and self.window is not None:
            raise ValueError(f"causal=True with {self.window}: write it as a window with right = 0")

    @property
    def mask(self) -> str:
        """The kind of mask, one of MASKS."""
        if self.window is not None:
            return "local"
        return "causal" if self.causal else "full"

    @property
    def diagonal(self) -> int:
        """Bottom-right alignment: query i is in line with key i + diagonal."""
        return self.seqlen_k - self.seqlen_q

    @property
    def num_m_blocks(self) -> int:
        """Q tiles of one head."""
        return ceil_div(self.seqlen_q, self.tile_m)

    @property
    def num_n_blocks(self) -> int:
        """KV tiles of one head: its work tiles."""
        return ceil_div(self.seqlen_k, self.tile_n)

    @property
    def num_streams(self) -> int:
        """(batch, KV head) pairs; tiles of different streams never touch the same gradient."""
        return self.batch * self.num_heads

    @property
    def num_query_heads(self) -> int:
        """Query heads: group_size for each KV head, the first KV head's first."""
        return self.num_heads * self.group_size

    @property
    def num_work_tiles(self) -> int:
        """Work tiles of the whole problem."""
        return self.num_streams * self.num_n_blocks

    def get_m_block_min(self, n_block: int) -> int:
        """First Q tile with a query that sees a key of KV tile `n_block`; 0 if none does."""
        if self.mask == "full":
            return 0
        # the first key of the tile is the last one that this query sees
        first_row = n_block * self.tile_n - self.diagonal
        if self.window is not None:
            first_row = first_row - self.window.right
        return maximum(first_row, 0) // self.tile_m

    def get_m_block_max(self, n_block: int) -> int:
        """One past the last such Q tile; 0 if there is none. Without a window the last query sees every key."""
        if self.window is None:
            return self.num_m_blocks
        num_rows = maximum((n_block + 1) * self.tile_n - self.diagonal + self.window.left, 0)
        return minimum(ceil_div(num_rows, self.tile_m), self.num_m_blocks)

    def get_n_block_min(self, m_block: int) -> int:
        """First KV tile that a query of Q tile `m_block` sees; 0 if they see none."""
        if self.window is None:
            return 0
        return maximum(m_block * self.tile_m + self.diagonal - self.window.left, 0) // self.tile_n

    def get_n_block_max(self, m_block: int) -> int:
        """One past the last KV tile that a query of Q tile `m_block` sees; 0 if they see none."""
        if self.mask == "full":
            return self.num_n_blocks
        num_keys = (m_block + 1) * self.tile_m + self.diagonal
        if self.window is not None:
            num_keys = num_keys + self.window.right
        return minimum(ceil_div(maximum(num_keys, 0), self.tile_n), self.num_n_blocks)

    def hides_keys(self, m_block: int, first_key: int, num_keys: int) -> bool:
        """True if no query of Q tile `m_block` sees any of the keys first_key .. first_key + num_keys - 1."""
        is_hidden = first_key >= self.seqlen_k
        if self.mask == "full":
            return is_hidden
        last_seen = minimum((m_block + 1) * self.tile_m, self.seqlen_q) - 1 + self.diagonal
        if self.window is None:
            return is_hidden | (first_key > last_seen)
        first_seen = m_block * self.tile_m + self.diagonal - self.window.left
        return is_hidden | (first_key > last_seen + self.window.right) | (first_key + num_keys <= first_seen)

    def needs_mask(self, m_block: int, n_block: int) -> bool:
        """True if some pair of a query and a key of this tile is masked or the key lies beyond seqlen_k."""
        needs_right_mask = self.needs_right_mask(m_block, n_block)
        return needs_right_mask if self.window is None else needs_right_mask | self.needs_left_mask(m_block, n_block)

    def needs_right_mask(self, m_block: int, n_block: int) -> bool:
        """True if the last key of this tile is hidden from its first query or lies beyond seqlen_k."""
        beyond_k = (n_block + 1) * self.tile_n > self.seqlen_k
        if self.mask == "full":
            return beyond_k
        last_seen = m_block * self.tile_m + self.diagonal
        if self.window is not None:
            last_seen = last_seen + self.window.right
        return beyond_k | ((n_block + 1) * self.tile_n - 1 > last_seen)

    def needs_left_mask(self, m_block: int, n_block: int) -> bool:
        """True if the first key of this tile is hidden from its last query; False without a window."""
        if self.window is None:
            return False
        last_row = minimum((m_block + 1) * self.tile_m, self.seqlen_q) - 1
        return n_block * self.tile_n < last_row + self.diagonal - self.window.left
