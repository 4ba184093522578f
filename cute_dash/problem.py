"""The problem a schedule orders: extents in tokens and tiles, and which (m_block, n_block) tiles the mask leaves.

m = query, n = key. Host and device: every method takes and returns ints of either kind (see `cute_dash.ints`). The
mask decides which tiles exist; a schedule only orders them.
"""

from dataclasses import dataclass

from cute_dash.ints import ceil_div, maximum, minimum


@dataclass(frozen=True)
class ProblemShape:
    """Extents of one attention backward problem.

    Attributes:
        batch: sequences.
        num_heads: KV heads; a schedule sees no others.
        seqlen_q, seqlen_k: tokens, at least 1.
        tile_m, tile_n: tokens a Q tile and a KV tile cover (Python ints, known when the kernel is compiled).
        causal: bottom-right aligned: query i sees keys 0 .. i + seqlen_k - seqlen_q (Python bool).
        group_size: query heads per KV head. A work tile walks its steps once for each of them, in the same order with the
            same lock values, so a schedule need not know it.
    """

    batch: int
    num_heads: int
    seqlen_q: int
    seqlen_k: int
    tile_m: int
    tile_n: int
    causal: bool
    group_size: int = 1

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
        """First Q tile with a query that sees a key of KV tile `n_block`."""
        if not self.causal:
            return 0
        first_row = maximum(n_block * self.tile_n - (self.seqlen_k - self.seqlen_q), 0)
        return first_row // self.tile_m

    def get_m_block_max(self, n_block: int) -> int:
        """One past the last such Q tile. Every KV tile is seen by the last query, so this is num_m_blocks."""
        return self.num_m_blocks

    def get_n_block_min(self, m_block: int) -> int:
        """First KV tile that a query of Q tile `m_block` sees."""
        return 0

    def get_n_block_max(self, m_block: int) -> int:
        """One past the last KV tile that a query of Q tile `m_block` sees; 0 if they see none."""
        if not self.causal:
            return self.num_n_blocks
        num_keys = maximum((m_block + 1) * self.tile_m + (self.seqlen_k - self.seqlen_q), 0)
        return minimum(ceil_div(num_keys, self.tile_n), self.num_n_blocks)

    def needs_mask(self, m_block: int, n_block: int) -> bool:
        """True if some (query, key) pair of this tile is masked or lies beyond seqlen_k."""
        beyond_k = (n_block + 1) * self.tile_n > self.seqlen_k
        if not self.causal:
            return beyond_k
        # the first query of the tile sees keys up to first_query + seqlen_k - seqlen_q
        return beyond_k | ((n_block + 1) * self.tile_n - 1 > m_block * self.tile_m + (self.seqlen_k - self.seqlen_q))
