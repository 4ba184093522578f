"""What is timed: a cell is one shape of the backward call, with its FLOPs, bytes and lower bound in time.

Host only; no torch. Lengths in tokens, sizes in bytes, times in ms.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from cute_dash.config import TUNED_HEAD_DIMS, BwdConfig, describe_head_dims, get_config
from cute_dash.problem import ProblemShape, normalize_mask

HEAD_DIMS = TUNED_HEAD_DIMS  # of the standard cells
MASKS = ("causal", "full")  # of the standard cells; beside them "local:LEFT:RIGHT", a sliding window in tokens
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
DTYPES = ("bf16", "fp16")
TOKENS = 16384  # batch * seqlen of a standard cell
MODEL_DIM = 2048  # heads * head_dim of a standard cell
ELEMENT_BYTES = 2  # bf16 and fp16 alike
LENGTHS_SEED = 0  # of the lengths of a varlen cell


@dataclass(frozen=True)
class Cell:
    """One shape of the backward call; query and key lengths are equal, and so are their heads unless kv_heads is given.

    A varlen cell has sequences of different lengths, packed one behind the other: those of `draw_lengths`, whose mean
    is seqlen, so that it has the tokens of the cell without.

    Raises:
        ValueError: an extent below 1, KV heads that do not divide the heads, or a mask or dtype that is not known.
    """

    head_dim: int
    mask: str
    seqlen: int
    batch: int
    heads: int
    dtype: str = "bf16"
    kv_heads: int | None = None
    head_dim_v: int | None = None  # of v and out, where it is not head_dim
    varlen: bool = False

    def __post_init__(self) -> None:
        for name in ("head_dim", "value_dim", "seqlen", "batch", "heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.heads % self.num_kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        parse_window(self.mask)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not known; allowed: {', '.join(DTYPES)}")

    @property
    def causal(self) -> bool:
        return self.mask == "causal"

    @property
    def window_size(self) -> tuple[int, int]:
        """(left, right) in tokens; -1 for no limit."""
        return parse_window(self.mask)

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def value_dim(self) -> int:
        """Head dim of v, out and dout."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return draw_lengths(self.batch, self.seqlen) if self.varlen else (self.seqlen,) * self.batch

    @property
    def label(self) -> str:
        """Short name for tables; batch and heads appear only where they are not the standard ones."""
        standard = standard_cell(self.head_dim, self.mask, self.seqlen)
        head_dims = describe_head_dims(self.head_dim, self.value_dim)
        label = f"hd{head_dims} {self.mask} {format_seqlen(self.seqlen)}"
        if (self.batch, self.heads) != (standard.batch, standard.heads):
            label += f" b{self.batch} h{self.heads}"
        if self.num_kv_heads != self.heads:
            label += f" kv{self.kv_heads}"
        if self.varlen:
            label += " varlen"
        return label if self.dtype == "bf16" else f"{label} {self.dtype}"

    @property
    def flops(self) -> float:
        """Matmuls of 2*S*S*D each per stream, three of Q and K's D, two of V's; half of it under the causal mask.

        Under a window 2*D for each pair of a query and a key that it sees. Summed over the sequences of a varlen cell.
        """
        pairs = sum(map(self._num_pairs, self.lengths))
        return 2.0 * self.heads * pairs * (3 * self.head_dim + 2 * self.value_dim)

    def _num_pairs(self, seqlen: int) -> float:
        """(query, key) pairs of a head of one sequence that the FLOPs count."""
        left, right = (seqlen - 1 if side < 0 else min(side, seqlen - 1) for side in self.window_size)
        hidden = sum(n * (n + 1) / 2 for n in (seqlen - 1 - left, seqlen - 1 - right))
        return seqlen**2 / 2 if self.causal else seqlen**2 - hidden

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one (B, S, H, D) tensor of the query heads, with the head dim of Q and K."""
        return self.batch * self.seqlen * self.heads * self.head_dim * ELEMENT_BYTES

    @property
    def kv_bytes(self) -> int:
        """Bytes of one (B, S, H, D) tensor of the KV heads, likewise."""
        return self.tensor_bytes // self.heads * self.num_kv_heads

    @property
    def input_bytes(self) -> int:
        """Bytes that one call reads: q, k, v, out, dout and the fp32 LSE."""
        lse_bytes = 4 * self.batch * self.heads * self.seqlen
        return self.tensor_bytes + self.kv_bytes + self._of_values(2 * self.tensor_bytes + self.kv_bytes) + lse_bytes

    def _of_values(self, num_bytes: int) -> int:
        """Bytes of tensors with V's head dim instead of that of Q and K."""
        return num_bytes // self.head_dim * self.value_dim

    def tflops(self, ms: float) -> float:
        """TFLOPS of a call that takes `ms`."""
        return self.flops / ms * 1e-9

    def floor_ms(self, gemm_tflops: float, copy_tb_per_s: float) -> float:
        """No call can be faster: max(FLOPs / GEMM rate, (read q, k, v, out, dout + write dq, dk, dv) / copy rate).

        Args:
            gemm_tflops: rate of a large bf16 GEMM on the same device, in the same regime.
            copy_tb_per_s: bytes read plus bytes written per second by a device copy, in TB/s.
        """
        moved_bytes = 2 * self.tensor_bytes + 2 * self.kv_bytes
        moved_bytes += self._of_values(2 * self.tensor_bytes + 2 * self.kv_bytes)
        return max(self.flops / gemm_tflops * 1e-9, moved_bytes / copy_tb_per_s * 1e-9)

    def problem_shape(self, config: BwdConfig | None = None) -> ProblemShape:
        """The shape as a schedule sees it, in the tiles of `config` or of the shipped one.

        Of a varlen cell the longest sequence: by it the op chooses schedule and kind of mask for all.

        Raises:
            ValueError: a head dim that the kernel does not have.
        """
        config = config or self.shipped_config()
        batch, seqlen = 1 if self.varlen else self.batch, max(self.lengths)
        _, window = normalize_mask(self.causal, self.window_size, seqlen, seqlen)
        group_size = self.heads // self.num_kv_heads
        return config.make_shape(batch, self.num_kv_heads, seqlen, seqlen, window, group_size)

    def shipped_config(self) -> BwdConfig:
        """What the kernel is compiled with for this cell.

        Raises:
            ValueError: a head dim that the kernel does not have.
        """
        causal, window = normalize_mask(self.causal, self.window_size, max(self.lengths), max(self.lengths))
        return get_config(self.head_dim, causal, window is not None, self.head_dim_v)


@lru_cache
def draw_lengths(batch: int, seqlen: int, seed: int = LENGTHS_SEED) -> tuple[int, ...]:
    """`batch` lengths of mean `seqlen`: pairs (seqlen - d, seqlen + d), a last one without a pair.

    d is uniform in 0 .. 7/8 seqlen, so that a length is 1/8 to 15/8 of the mean; the same for a seed with every Python.
    """
    rng = random.Random(seed)
    offsets = [int(rng.random() * seqlen * 7 / 8) for _ in range(batch // 2)]
    pairs = [(seqlen - offset, seqlen + offset) for offset in offsets]
    return (*(length for pair in pairs for length in pair), *(seqlen,) * (batch % 2))


def standard_cell(
    head_dim: int,
    mask: str,
    seqlen: int,
    batch: int | None = None,
    heads: int | None = None,
    dtype: str = "bf16",
    kv_heads: int | None = None,
    head_dim_v: int | None = None,
    varlen: bool = False,
) -> Cell:
    """A cell at 16,384 tokens and heads * head_dim = 2,048 (at least one sequence, one head) unless told otherwise."""
    batch = max(1, TOKENS // max(1, seqlen)) if batch is None else batch
    heads = max(1, MODEL_DIM // max(1, head_dim)) if heads is None else heads
    kv_heads = None if kv_heads == heads else kv_heads
    head_dim_v = None if head_dim_v == head_dim else head_dim_v
    return Cell(head_dim, mask, seqlen, batch, heads, dtype, kv_heads, head_dim_v, varlen)


def list_cells(
    head_dims: Iterable[int] = HEAD_DIMS,
    masks: Iterable[str] = MASKS,
    seqlens: Iterable[int] = SEQLENS,
    batch: int | None = None,
    heads: int | None = None,
    dtype: str = "bf16",
    kv_heads: int | None = None,
    head_dim_v: int | None = None,
    varlen: bool = False,
) -> list[Cell]:
    """All combinations; by default the 24 standard cells."""
    seqlens = list(seqlens)
    masks = list(masks)
    options = (batch, heads, dtype, kv_heads, head_dim_v, varlen)
    return [standard_cell(d, m, s, *options) for d in head_dims for m in masks for s in seqlens]


def parse_window(mask: str) -> tuple[int, int]:
    """The window of a mask: "local:1024:0" -> (1024, 0), "local:inf:8" -> (-1, 8), "full" and "causal" -> (-1, -1).

    Raises:
        ValueError: not a mask.
    """
    if mask in MASKS:
        return -1, -1
    kind, *sides = mask.split(":")
    if kind != "local" or len(sides) != 2 or not all(side == "inf" or side.isdecimal() for side in sides):
        raise ValueError(
            f"mask={mask!r} is not known; allowed: {', '.join(MASKS)}, local:LEFT:RIGHT in tokens, each at least 0, or "
            "inf for no limit, such as local:1024:0"
        )
    left, right = (-1 if side == "inf" else int(side) for side in sides)
    return left, right


def parse_seqlen(text: str) -> int:
    """'8k' -> 8192, '512' -> 512.

    Raises:
        ValueError: anything else.
    """
    digits, factor = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    if not digits.isdecimal() or int(digits) < 1:
        raise ValueError(f"seqlen={text!r} must be a positive number of tokens, such as 512 or 8k")
    return int(digits) * factor


def format_seqlen(seqlen: int) -> str:
    """8192 -> '8k', 799 -> '799'."""
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)
