"""Bulk and TMA copies between global and shared memory (device)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.experimental import primitives


def select_modes(tensor: cute.Tensor, modes: tuple[int, ...]) -> cute.Tensor:
    """The tensor with its modes picked and reordered."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=list(modes)))


def partition_tma(atom: cute.CopyAtom, sX: cute.Tensor, gX: cute.Tensor):
    """Shared and global side of a TMA copy of whole tiles.

    Args:
        sX: (rows, columns[, stages]) shared-memory tile.
        gX: (rows, columns[, tiles]) global tile.
    Returns:
        (tXsX, tXgX), each with the tile grouped into mode 0 and the stages or tiles, if any, behind it.
    """
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2))


def copy_vector(gX: cute.Tensor, sX: cute.Tensor, barrier: cute.Pointer) -> None:
    """Starts the bulk copy of a contiguous fp32 vector to shared memory. Called by a whole warp."""
    with cute.arch.elect_one():
        cute.copy(cute.make_copy_atom(cpasync.CopyBulkG2SOp(), gX.element_type), gX, sX, mbar_ptr=barrier)


@dsl_user_op
def bulk_store(smem: cute.Pointer, gmem: cute.Pointer, num_bytes: int, *, loc=None, ip=None) -> None:
    """gmem = smem, `num_bytes` contiguous bytes, in the calling thread's bulk group."""
    primitives.cp_async_bulk_global_shared_cta(
        _global_pointer(gmem, loc, ip), smem.to_llvm_ptr(loc=loc, ip=ip), num_bytes, loc=loc, ip=ip
    )


@dsl_user_op
def bulk_add_f32(smem: cute.Pointer, gmem: cute.Pointer, num_bytes: int, *, loc=None, ip=None) -> None:
    """gmem += smem for contiguous fp32 elements, in the calling thread's bulk group."""
    primitives.cp_reduce_async_bulk_global_shared_cta(
        _global_pointer(gmem, loc, ip),
        smem.to_llvm_ptr(loc=loc, ip=ip),
        num_bytes,
        op=primitives.CpReduceOp.ADD,
        type=primitives.CpReduceType.F32,
        noftz=False,
        loc=loc,
        ip=ip,
    )


def _global_pointer(gmem: cute.Pointer, loc, ip):
    """The bulk instructions want an address in the global space; tensor arguments carry generic ones."""
    space = llvm.PointerType.get(cutlass.AddressSpace.gmem.value)
    return llvm.addrspacecast(space, gmem.to_llvm_ptr(loc=loc, ip=ip), loc=loc, ip=ip)


def fragment_slots(base: cute.Pointer, num_values: int, tidx: Int32) -> cute.Tensor:
    """Where thread `tidx` of a warpgroup keeps `num_values` fp32 accumulator registers, in flat register order.

    Group i of 4 registers lies at ((i * 128) + tidx) * 4: 16-byte accesses, contiguous across the warpgroup. The dQ
    partials travel in this order through shared and global memory; only finished dQ is in the order of rows.
    """
    layout = cute.make_layout((4, num_values // 4), stride=(1, 4 * 128))
    return cute.make_tensor((base + tidx * 4).align(16), layout)


def fragment_registers(acc: cute.Tensor) -> cute.Tensor:
    """An fp32 accumulator as (4, num_values / 4), matching `fragment_slots`."""
    assert acc.element_type is Float32
    return cute.make_tensor(acc.iterator, cute.make_layout((4, cute.size(acc) // 4)))
