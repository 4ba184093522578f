"""Static configuration of the Hopper backward kernel: tile shapes, stages and register budget per head dim.

Host only; needs neither torch nor cutlass, so that the emulator, the checker and the command line can ask for tile
shapes anywhere. The choice depends on head dim, mask and whether lengths differ, never on the device: tile shapes are
part of the determinism contract.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from cute_dash.problem import ProblemShape, Window

SUPPORTED_HEAD_DIMS = range(32, 257, 8)  # TMA wants strides in multiples of 16 bytes
ALLOWED_HEAD_DIMS = "multiples of 8 from 32 to 256"  # the same, in messages
UNEQUAL_HEAD_DIMS = (192, 128)  # of Q and K, and of V and the output, where they may differ
TILE_HEAD_DIMS = (64, 96, 128, 192, 256)  # the others are padded to the next one of these, in shared memory only
TUNED_HEAD_DIMS = (64, 128)  # the measured ones, which tools take by default
STATS_COLUMNS = 8  # bf16 values per query of the statistics operand: 16 bytes, one row of a wgmma core matrix
NUM_DS_STAGES = 2  # dS of one step is written while that of the step before is read; see `num_dS_stages`
CLAIM_LOOKAHEAD = 2  # contributors: behind so many at most a turn comes soon, see `publish_claim` of the kernel
NUM_WORK_STAGES = 4  # claimed work tiles in shared memory: that many the fastest warp may be ahead of the slowest
REGISTERS_PER_LANE = 504  # of the warpgroups together: a CTA of 384 threads starts with 168 for each
NUM_MMA_WARPGROUPS = 2
SMEM_CAPACITY_BYTES = 227 * 1024  # per CTA on sm_90


@dataclass(frozen=True)
class BwdConfig:
    """One compiled shape of the backward kernel.

    Attributes:
        head_dim: elements per head of Q and K in global memory; see `head_dim_padded` for the tiles.
        causal: whether the causal mask is compiled in.
        tile_m, tile_n: tokens per Q tile and per KV tile; tile_n also says how the two consumer warpgroups share a step
            out, see `split_columns` and `swap_operands`.
        num_stages: stages of Q, LSE and dPsum in shared memory, and of dO but for `num_stages_dO`.
        num_mma_regs, num_producer_regs: registers per thread after setmaxnreg.
        stats_by_gemm: LSE and dPsum enter S and dP as one more k-step of their GEMMs (`kernels.stats`).
        fuse_dQ: the last to add to a dQ tile scales and rounds it, in the main kernel, where the schedule is ordered;
            otherwise a postprocess kernel does.
        local: whether a sliding window is compiled in, instead of the causal or the full mask. Its sides are not: they
            are arguments of the kernel.
        head_dim_v: elements per head of V and dO; if 0 is given, head_dim.
        prefetch_KV: dK and dV leave through the memory of dS, enlarged where it is too small, instead of that of K and
            V, so that K and V of the next work tile load meanwhile.
        skip_hidden_keys: a warpgroup whose keys no query of a step sees computes its part of dQ only. It pays where Q
            tiles are shorter than KV tiles: half of the first step on a diagonal is hidden then.
        K_in_regs: K, as operand A of S^T, is read from shared memory once per work tile and kept in registers, not read
            in every step. For 128 keys only: by columns K is not operand A, or there are no registers for it.
    """

    head_dim: int
    causal: bool
    tile_m: int
    tile_n: int
    num_stages: int = 2
    num_mma_regs: int = 232
    num_producer_regs: int = 40
    stats_by_gemm: bool = False
    fuse_dQ: bool = False
    local: bool = False
    head_dim_v: int = 0
    prefetch_KV: bool = False
    skip_hidden_keys: bool = False
    K_in_regs: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.head_dim)
        if self.causal and self.local:
            raise ValueError("causal=True and local=True exclude each other: a causal window is one with right = 0")
        if self.head_dim not in SUPPORTED_HEAD_DIMS:
            raise ValueError(f"head_dim={self.head_dim} is not supported; allowed: {ALLOWED_HEAD_DIMS}")
        if self.head_dim_v != self.head_dim and (self.head_dim, self.head_dim_v) != UNEQUAL_HEAD_DIMS:
            raise ValueError(
                f"head_dim_v={self.head_dim_v} is not supported with head_dim={self.head_dim}; allowed: "
                f"{self.head_dim}, or head_dim={UNEQUAL_HEAD_DIMS[0]} with head_dim_v={UNEQUAL_HEAD_DIMS[1]}"
            )
        if self.head_dim_v != self.head_dim and not self.split_columns:
            raise ValueError(f"tile_n={self.tile_n} must be 64 or 96 where head_dim_v differs from head_dim")
        if self.tile_m % 64 or self.tile_m <= 0:
            raise ValueError(f"tile_m={self.tile_m} must be a positive multiple of 64, the rows of a wgmma")
        if self.tile_n not in (64, 96, 128):
            raise ValueError(
                f"tile_n={self.tile_n} must be 128 or 64, 64 keys for each consumer warpgroup or for both, or 96, of "
                "which each has 48"
            )
        if self.swap_operands and (self.head_dim_padded != 192 or self.tile_m != 64 or self.stats_by_gemm):
            raise ValueError(
                "tile_n=96 is for head dims from 136 to 192, tile_m=64 and stats_by_gemm=False, not for "
                f"head_dim={self.head_dim}, tile_m={self.tile_m}, stats_by_gemm={self.stats_by_gemm}"
            )
        if self.K_in_regs and self.split_columns:
            raise ValueError(f"K_in_regs=True is for tile_n=128, not for tile_n={self.tile_n}")
        if self.skip_hidden_keys and (self.mask == "full" or self.split_columns):
            raise ValueError(
                "skip_hidden_keys=True is for masks that hide keys and warpgroups with keys of their own (tile_n=128), "
                f"not for mask={self.mask!r}, tile_n={self.tile_n}"
            )
        if self.num_stages < 1:
            raise ValueError(f"num_stages={self.num_stages} must be at least 1")
        num_regs = self.num_mma_warpgroups * self.num_mma_regs + self.num_producer_regs
        if num_regs > REGISTERS_PER_LANE:
            raise ValueError(
                f"{self} needs {num_regs} registers in each lane of the warpgroups, {REGISTERS_PER_LANE} exist"
            )
        if self.smem_bytes > SMEM_CAPACITY_BYTES:
            raise ValueError(f"{self} needs {self.smem_bytes} bytes of shared memory, {SMEM_CAPACITY_BYTES} exist")

    def make_shape(
        self,
        batch: int,
        num_heads: int,
        seqlen_q: int,
        seqlen_k: int,
        window: Window | None = None,
        group_size: int = 1,
    ) -> ProblemShape:
        """The problem of these extents, ints of either kind, in the tiles and with the mask of this configuration.

        Args:
            num_heads: KV heads, each with `group_size` query heads.

        Raises:
            ValueError: a window for a configuration without one, or none for a local one.
        """
        if (window is not None) != self.local:
            raise ValueError(f"{window=} does not go with local={self.local}")
        tile_m, tile_n, causal = self.tile_m, self.tile_n, self.causal
        return ProblemShape(batch, num_heads, seqlen_q, seqlen_k, tile_m, tile_n, causal, window, group_size)

    def make_shape_of(
        self, q_shape: tuple[int, ...], k_shape: tuple[int, ...], window: Window | None = None
    ) -> ProblemShape:
        """The problem of q (batch, seqlen_q, num_heads, head_dim) and k (batch, seqlen_k, num_heads_kv, head_dim)."""
        batch, seqlen_q, num_heads, _ = q_shape
        _, seqlen_k, num_heads_kv, _ = k_shape
        return self.make_shape(batch, num_heads_kv, seqlen_q, seqlen_k, window, num_heads // num_heads_kv)

    @property
    def mask(self) -> str:
        """The kind of mask that is compiled in, one of `problem.MASKS`."""
        return "local" if self.local else "causal" if self.causal else "full"

    @property
    def head_dims(self) -> str:
        """Both head dims as people write them: "128" or "192/128"."""
        return describe_head_dims(self.head_dim, self.head_dim_v)

    @property
    def head_dim_padded(self) -> int:
        """Columns of the Q, K and dQ tiles, one of `TILE_HEAD_DIMS`.

        The TMA fills those beyond head_dim with zeros when it loads, and leaves them out when it stores.
        """
        return _pad_head_dim(self.head_dim)

    @property
    def head_dim_v_padded(self) -> int:
        """Columns of the V and dO tiles."""
        return _pad_head_dim(self.head_dim_v)

    @property
    def num_mma_warpgroups(self) -> int:
        return NUM_MMA_WARPGROUPS

    @property
    def split_columns(self) -> bool:
        """How the two consumer warpgroups share the GEMMs of a step out.

        False, 128 keys: S^T, dP^T, dK and dV by keys, 64 for each; P^T and dS^T are operands from registers then.
        True, 64 or 96 keys, where 128 would need too many registers: the columns of every product, so that P and dS go
        through shared memory. Those of S^T and dP^T are queries, of dK and dV columns of the head dim; those of S and
        dP, dK^T and dV^T (`swap_operands`) are keys.
        """
        return self.tile_n != 128

    @property
    def swap_operands(self) -> bool:
        """Whether S = Q K^T, dP = dO V^T, dV^T = dO^T P and dK^T = Q^T dS are computed, else the transposes of these.

        So with 96 keys, which are no multiple of the 64 rows of a wgmma but may be its columns.
        """
        return self.tile_n == 96

    def in_order(self, first: Any, second: Any) -> tuple[Any, Any]:
        """Operands A and B of S^T, dP^T, dV or dK, or their rows and columns, exchanged where `swap_operands`.

        Not those of dQ, whose GEMM is one for all.
        """
        return (second, first) if self.swap_operands else (first, second)

    @property
    def score_columns(self) -> int:
        """Columns of the part of S^T and dP^T, or of S and dP, that one warpgroup computes: queries, or keys."""
        columns: int = self.in_order(self.tile_n, self.tile_m)[1]
        return columns // self.num_mma_warpgroups if self.split_columns else columns

    @property
    def num_stages_dO(self) -> int:
        """Stages of dO: as many as of Q, but one where two of 192 columns do not fit beside 96 keys."""
        return 1 if self.swap_operands and self.head_dim_v_padded > 128 else self.num_stages

    @property
    def add_dV_first(self) -> bool:
        """By columns: dV is the first of the step's GEMMs that read P and dS, not dK, so that dO is released early."""
        return self.num_stages_dO < self.num_stages

    @property
    def num_dS_stages(self) -> int:
        """Stages of dS and P: one beside 96 keys, where two do not fit."""
        return 1 if self.swap_operands else NUM_DS_STAGES

    @property
    def stats_size(self) -> int:
        """LSE and dPsum of a Q tile, in fp32 elements."""
        return self.tile_m * (STATS_COLUMNS // 2 if self.stats_by_gemm else 2)

    @property
    def ones_size(self) -> int:
        """bf16 elements of the two constant operands that select LSE or dPsum, 8 x 8 each."""
        return 2 * 8 * STATS_COLUMNS if self.stats_by_gemm else 0

    @property
    def dS_size(self) -> int:
        """16-bit elements of the stages of dS, and of dK and dV where they leave through them."""
        dS = self.num_dS_stages * self.tile_m * self.tile_n
        dK_dV = self.tile_n * (self.head_dim_padded + self.head_dim_v_padded)
        return max(dS, dK_dV) if self.prefetch_KV else dS

    @property
    def P_size(self) -> int:
        """16-bit elements of the stages of P, which goes through shared memory by columns only."""
        return self.num_dS_stages * self.tile_m * self.tile_n if self.split_columns else 0

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA in bytes: stages of Q, dO, dS and P; K, V, the fp32 dQ tile, row statistics."""
        element, fp32 = 2, 4
        q_elements, do_elements = self.tile_m * self.head_dim_padded, self.tile_m * self.head_dim_v_padded
        q_do = (self.num_stages * q_elements + self.num_stages_dO * do_elements) * element
        kv = self.tile_n * (self.head_dim_padded + self.head_dim_v_padded) * element
        ds_p = (self.dS_size + self.P_size) * element
        dq = q_elements * fp32
        barriers = 256
        head = barriers + self.ones_size * element + self.num_stages * self.stats_size * fp32
        return q_do + kv + ds_p + dq + (head + 1023) // 1024 * 1024


def describe_head_dims(head_dim: int, head_dim_v: int) -> str:
    """ "128", or "192/128" where V's head dim differs."""
    return str(head_dim) if head_dim_v == head_dim else f"{head_dim}/{head_dim_v}"


def _pad_head_dim(head_dim: int) -> int:
    return min(columns for columns in TILE_HEAD_DIMS if columns >= head_dim)


@lru_cache
def get_config(head_dim: int, causal: bool, local: bool = False, head_dim_v: int | None = None) -> BwdConfig:
    """The configuration compiled for a head dim and mask; head_dim_v is that of V, if not head_dim.

    Raises:
        ValueError: unsupported head dims, naming what is allowed; causal and local at once.
    """
    config = _get_config(head_dim, causal, local)
    return config if head_dim_v is None else replace(config, head_dim_v=head_dim_v)


def _get_config(head_dim: int, causal: bool, local: bool) -> BwdConfig:
    if head_dim <= 64:
        return BwdConfig(
            head_dim,
            causal,
            128,
            tile_n=128,
            num_mma_regs=224,
            num_producer_regs=56,
            fuse_dQ=True,
            local=local,
            prefetch_KV=True,
        )
    if head_dim <= 128:
        return BwdConfig(
            head_dim,
            causal,
            64,
            tile_n=128,
            stats_by_gemm=True,
            fuse_dQ=True,
            local=local,
            prefetch_KV=True,
            skip_hidden_keys=causal or local,
            K_in_regs=head_dim <= 96,  # at 128 columns there are no registers for it
        )
    return BwdConfig(
        head_dim,
        causal,
        64,
        tile_n=96 if head_dim <= 192 else 64,
        num_stages=2 if head_dim <= 192 else 1,  # two of 256 columns do not fit
        fuse_dQ=True,
        local=local,
    )
