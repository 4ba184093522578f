"""Shared-memory layouts, tiled MMAs and accumulator views of the backward kernels (trace time).

All 16-bit operand tiles live in shared memory with their head dim (or, for P and dS, their keys) contiguous, in
swizzled atoms of 8 rows x 64 elements, or fewer where the warpgroups share such columns out in parts that are not a
multiple of 64; the same bytes serve as K-major operand and, through `transpose_view`, as MN-major operand, so that no
tile is stored twice.

A warpgroup's accumulator of one 64-row atom is, per thread, ((2, 2, N/8), 1, 1): column pair, row pair (8 apart), and
groups of 8 columns. Row = 16 * warp + lane / 4 + 8 * r; column = 8 * v + 2 * (lane % 4) + c.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from cute_dash.config import BwdConfig

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


def make_smem_layout(dtype, shape, num_stages=None, columns_per_mma=None):
    """Row-major swizzled layout of a (rows, columns) tile; (rows, columns, num_stages) if stages are given.

    Args:
        columns_per_mma: that one wgmma reads or writes, which must be whole swizzle atoms; default: all.
    """
    kind = get_swizzle(shape[1] if columns_per_mma is None else columns_per_mma)
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    if num_stages is None:
        return cute.tile_to_shape(atom, shape, order=(0, 1))
    return cute.tile_to_shape(atom, (*shape, num_stages), order=(0, 1, 2))


def get_swizzle(columns: int) -> warpgroup.SmemLayoutAtomKind:
    """The widest swizzle atom, 64, 32 or 16 elements, that `columns` are a multiple of."""
    if columns % 64 == 0:
        return warpgroup.SmemLayoutAtomKind.K_SW128
    return warpgroup.SmemLayoutAtomKind.K_SW64 if columns % 32 == 0 else warpgroup.SmemLayoutAtomKind.K_SW32


class Tiles(NamedTuple):
    """(rows, columns) of the tiles that travel through the TMA; dQ is like Q, dK like K and dV like V."""

    Q: tuple[int, int]
    K: tuple[int, int]
    V: tuple[int, int]
    dO: tuple[int, int]


def get_tiles(config: BwdConfig) -> Tiles:
    """The tiles of a configuration."""
    columns, columns_v = config.head_dim_padded, config.head_dim_v_padded
    return Tiles(
        Q=(config.tile_m, columns),
        K=(config.tile_n, columns),
        V=(config.tile_n, columns_v),
        dO=(config.tile_m, columns_v),
    )


class OperandLayouts(NamedTuple):
    """Shared-memory layouts of the operand tiles, without or with a mode of stages where a tile has stages."""

    Q: cute.ComposedLayout  # (tile_m, head_dim_padded)
    K: cute.ComposedLayout  # (tile_n, head_dim_padded)
    V: cute.ComposedLayout  # (tile_n, head_dim_v_padded)
    dO: cute.ComposedLayout  # (tile_m, head_dim_v_padded)
    dS: cute.ComposedLayout  # (tile_m, tile_n), also of P where that is staged


def make_operand_layouts(dtype, config: BwdConfig, staged: bool) -> OperandLayouts:
    """The layouts of a configuration. A GEMM whose columns the warpgroups share out needs atoms that fit a share."""
    tiles = get_tiles(config)
    # elements of the head dim and keys that one wgmma of dK, or of dV, takes
    (columns_dK, keys), (columns_dV, _) = (get_dKV_extents(config, tile[1]) for tile in (tiles.K, tiles.V))
    stages_Q, stages_dO, stages_dS = (config.num_stages, config.num_stages_dO, config.num_dS_stages)
    if not staged:
        stages_Q, stages_dO, stages_dS = None, None, None
    return OperandLayouts(
        Q=make_smem_layout(dtype, tiles.Q, stages_Q, columns_dK),
        K=make_smem_layout(dtype, tiles.K, columns_per_mma=get_dQ_piece(config)[1]),
        V=make_smem_layout(dtype, tiles.V, columns_per_mma=columns_dV),
        dO=make_smem_layout(dtype, tiles.dO, stages_dO, columns_dV),
        dS=make_smem_layout(dtype, (config.tile_m, config.tile_n), stages_dS, keys),
    )


def transpose_view(tensor: cute.Tensor) -> cute.Tensor:
    """The same bytes with the first two modes exchanged."""
    rows, columns, *rest = tensor.shape
    order = (1, 0, *range(2, cute.rank(tensor)))
    return cute.composition(tensor, cute.make_ordered_layout((columns, rows, *rest), order=order))


def make_tiled_mma_SdP(dtype, config: BwdConfig, A_in_regs: bool = False) -> cute.TiledMma:
    """S^T = K Q^T and dP^T = V dO^T: (tile_n, tile_m), shared out by keys or by queries.

    With swapped operands S = Q K^T and dP = dO V^T: (tile_m, tile_n), shared out by keys.
    """
    num_warpgroups = config.num_mma_warpgroups
    return make_trivial_tiled_mma(
        dtype,
        dtype,
        K_MAJOR,
        K_MAJOR,
        Float32,
        atom_layout_mnk=(1, num_warpgroups, 1) if config.split_columns else (num_warpgroups, 1, 1),
        tiler_mn=(64, config.score_columns),
        a_source=warpgroup.OperandSource.RMEM if A_in_regs else warpgroup.OperandSource.SMEM,
    )


def make_tiled_mma_dKV(dtype, config: BwdConfig, head_dim_padded: int) -> cute.TiledMma:
    """dV += P^T dO and dK += dS^T Q: (tile_n, head_dim_padded), or head_dim_v_padded for dV.

    By keys, with P^T and dS^T in registers, or by columns, with both in shared memory as (tile_m, tile_n) tiles.
    With swapped operands dV^T += dO^T P and dK^T += Q^T dS: (head_dim_padded, tile_n).
    """
    rows, columns = get_dKV_mma(config, head_dim_padded)
    return make_trivial_tiled_mma(
        dtype,
        dtype,
        MN_MAJOR if config.split_columns else K_MAJOR,
        MN_MAJOR,
        Float32,
        atom_layout_mnk=(rows // 64, config.num_mma_warpgroups * 64 // rows, 1),
        tiler_mn=(64, columns),
        a_source=warpgroup.OperandSource.SMEM if config.split_columns else warpgroup.OperandSource.RMEM,
    )


def get_dKV_mma(config: BwdConfig, head_dim_padded: int) -> tuple[int, int]:
    """Rows that the wgmmas of all warpgroups side by side have of dK or dV, and columns that one wgmma has.

    By columns where the warpgroups share the columns out, but not those of a dV^T of as many rows as their wgmmas have
    together: it takes fewer bytes of shared memory to share these out.
    """
    rows, columns = config.in_order(config.tile_n, head_dim_padded)
    all_rows = 64 * config.num_mma_warpgroups
    return (all_rows, columns) if rows == all_rows else (64, columns // config.num_mma_warpgroups)


def get_dKV_extents(config: BwdConfig, head_dim_padded: int) -> tuple[int, int]:
    """Elements of the head dim, and keys, that one wgmma of dK or dV has."""
    _, columns = get_dKV_mma(config, head_dim_padded)
    return (64, columns) if config.swap_operands else (columns, 64)


def splits_dQ_rows(config: BwdConfig) -> bool:
    """Whether the warpgroups split the rows of a dQ tile, 64 for each, or else its columns."""
    return config.tile_m == 64 * config.num_mma_warpgroups


def get_dQ_piece(config: BwdConfig) -> tuple[int, int]:
    """Rows and columns of a dQ tile that one warpgroup computes."""
    if splits_dQ_rows(config):
        return 64, config.head_dim_padded
    return config.tile_m, config.head_dim_padded // config.num_mma_warpgroups


def locate_dQ_piece(config: BwdConfig, m_block: Int32, warpgroup_idx: Int32) -> tuple[Int32, Int32]:
    """Where a warpgroup's piece of a dQ tile lies, counted in pieces."""
    if splits_dQ_rows(config):
        return config.num_mma_warpgroups * m_block + warpgroup_idx, 0
    return m_block, warpgroup_idx


def make_tiled_mma_dQ(dtype, config: BwdConfig) -> cute.TiledMma:
    """dQ = dS K, (tile_m, head_dim_padded), a piece for each warpgroup."""
    num_warpgroups = config.num_mma_warpgroups
    return _make_mma_dQ(dtype, config, (num_warpgroups, 1, 1) if splits_dQ_rows(config) else (1, num_warpgroups, 1))


def make_tiled_mma_dQ_piece(dtype, config: BwdConfig) -> cute.TiledMma:
    """One warpgroup's part of dQ = dS K."""
    return _make_mma_dQ(dtype, config, (1, 1, 1))


def _make_mma_dQ(dtype, config: BwdConfig, atom_layout: tuple[int, int, int]) -> cute.TiledMma:
    _, columns = get_dQ_piece(config)
    return make_trivial_tiled_mma(
        dtype, dtype, K_MAJOR, MN_MAJOR, Float32, atom_layout_mnk=atom_layout, tiler_mn=(64, columns)
    )


class Gemm(NamedTuple):
    """One GEMM of the backward step: its tiled MMA and this warpgroup's operand fragments.

    tCrA is None where A comes from registers, step by step.
    """

    tiled_mma: cute.TiledMma
    tCrA: cute.Tensor | None
    tCrB: cute.Tensor

    @staticmethod
    def partition(tiled_mma: cute.TiledMma, warpgroup_idx: Int32, sA, sB) -> "Gemm":
        """Descriptor fragments of the shared-memory tiles sA (M, K[, stages]) and sB (N, K[, stages])."""
        mma = tiled_mma.get_slice(warpgroup_idx * 128)
        tCrA = None if sA is None else mma.make_fragment_A(mma.partition_A(sA))
        return Gemm(tiled_mma, tCrA, mma.make_fragment_B(mma.partition_B(sB)))

    def product(self, stage_A: Int32 | None, stage_B: Int32 | None) -> tuple:
        """What `issue_gemm` takes for these stages of the operands."""
        return self.tiled_mma, stage_of(self.tCrA, stage_A), stage_of(self.tCrB, stage_B)


def make_accumulator(tiled_mma: cute.TiledMma, shape_mn: tuple[int, int]) -> cute.Tensor:
    """Uninitialised fp32 accumulator registers of an (M, N) tile."""
    return cute.make_rmem_tensor(tiled_mma.partition_shape_C(shape_mn), Float32)


def stage_of(fragment: cute.Tensor, stage: Int32 | None) -> cute.Tensor:
    """One stage of an operand fragment; fragments without a stage mode are returned whole."""
    return fragment if stage is None else fragment[None, None, None, stage]


def issue_gemm(acc: cute.Tensor, accumulate: bool, *products: tuple) -> None:
    """Issues acc (+)= the sum of the products A B as one committed wgmma group, without waiting for it.

    Args:
        products: (tiled_mma, tCrA, tCrB) each.
    """
    warpgroup.fence()
    for tiled_mma, tCrA, tCrB in products:
        # a fresh atom: the accumulate flag is its state, and setting it on an outer one would leak out of the loop
        atom = cute.make_mma_atom(tiled_mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, accumulate)
        for k in range(cute.size(tCrA.shape[2])):
            cute.gemm(atom, acc, tCrA[None, None, k], tCrB[None, None, k], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        accumulate = True
    warpgroup.commit_group()


def make_operand_A(tiled_mma: cute.TiledMma, sA: cute.Tensor, tidx: Int32) -> cute.Tensor:
    """Uninitialised registers for this thread's part of sA (M, K), as register operand A of a wgmma."""
    mma = tiled_mma.get_slice(tidx)
    return mma.make_fragment_A(mma.partition_A(sA).shape)


def load_operand_A(tiled_mma: cute.TiledMma, sA: cute.Tensor, rA: cute.Tensor, tidx: Int32) -> None:
    """Loads the registers of `make_operand_A` with ldmatrix."""
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), sA.element_type)
    copy = cute.make_tiled_copy_A(atom, tiled_mma)
    thread_copy = copy.get_slice(tidx)
    cute.copy(copy, thread_copy.partition_S(sA), thread_copy.retile(rA))


def to_operand_A(acc: cute.Tensor, dtype) -> cute.Tensor:
    """Rounds an accumulator of one 64-row atom to `dtype`, shaped as the register operand A of the next wgmma.

    Flat register order is the same in both: ((2, 2, V), 1, 1) -> ((2, 2, 2), 1, V / 2).
    """
    return round_registers(acc, dtype, ((2, 2, 2), 1, cute.size(acc) // 8))


def round_registers(acc: cute.Tensor, dtype, shape=None) -> cute.Tensor:
    """Rounds an accumulator to `dtype`, in `shape`, default its own, with the same flat register order."""
    rounded = cute.make_rmem_tensor(cute.make_layout(acc.shape if shape is None else shape), dtype)
    pairs = cute.recast_tensor(cute.make_tensor(rounded.iterator, cute.make_layout(cute.size(acc))), Int32)
    source = cute.make_tensor(acc.iterator, cute.make_layout((2, cute.size(pairs))))
    for i in range(cute.size(pairs)):
        pairs[i] = _round_pair(source[0, i], source[1, i], dtype)
    return rounded


def _round_pair(low: Float32, high: Float32, dtype) -> Int32:
    """Two fp32 values rounded to nearest even and packed.

    In PTX, because LLVM converts ordinary values a second time where they are used a second time, which keeps the fp32
    tile alive across the GEMMs: 40 registers at a Q tile of 80 rows, for which ptxas then serialized every wgmma.
    """
    kind = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=[high, low]
    )


def make_store_C(tiled_mma: cute.TiledMma, sC: cute.Tensor, tidx: Int32, transpose: bool):
    """Partitions the row-major tile sC for storing 16-bit accumulators with stmatrix.

    Args:
        transpose: whether the accumulators are those of the tile's transpose.
    Returns:
        (tiled_copy, tRS_sC): pass both to `store_C`.
    """
    if transpose:
        sC = transpose_view(sC)
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=transpose, num_matrices=4), sC.element_type)
    tiled_copy = cute.make_tiled_copy_C(atom, tiled_mma)
    return tiled_copy, tiled_copy.get_slice(tidx).partition_D(sC)


def store_C(tiled_copy: cute.TiledCopy, rC: cute.Tensor, tRS_sC: cute.Tensor) -> None:
    """Writes 16-bit accumulator registers, in any shape with the accumulator's flat order, to shared memory."""
    cute.copy(tiled_copy, tiled_copy.retile(rC), tRS_sC)
