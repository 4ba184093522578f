"""Kernels with one fault each (device): what compute-sanitizer must report, if it looks at this package's kernels.

Their names have the part by which `tests.sanitize` picks kernels.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_dash.compile import ARCH

NUM_THREADS = 64
NUM_ELEMENTS = 128  # 512 bytes, in which torch allocates


class Faulty:
    """`past_the_end`: each thread stores an element behind mX. Otherwise: a race between two warps in shared memory."""

    def __init__(self, past_the_end: bool):
        self.past_the_end = past_the_end

    @cute.jit
    def __call__(self, mX: cute.Tensor, stream):
        """mX: (NUM_ELEMENTS,), fp32."""
        self.flash_bwd_control(mX).launch(grid=(1, 1, 1), block=(NUM_THREADS, 1, 1), stream=stream)

    @cute.kernel
    def flash_bwd_control(self, mX: cute.Tensor):
        tidx = cute.arch.thread_idx()[0]
        if const_expr(self.past_the_end):
            mX[tidx + NUM_ELEMENTS] = Float32(1.0)
        else:
            sX = cute.make_tensor(
                SmemAllocator().allocate_array(cutlass.Float32, NUM_THREADS), cute.make_layout(NUM_THREADS)
            )
            sX[tidx] = Float32(Int32(tidx))
            mX[tidx] = sX[(tidx + NUM_THREADS // 2) % NUM_THREADS]  # written by the other warp; no barrier


def compile_faulty(past_the_end: bool, options: str = ""):
    """Compiles it for Hopper, with or without a GPU here. Takes a CUDA tensor (NUM_ELEMENTS,), fp32."""
    return cute.compile(
        Faulty(past_the_end),
        make_fake_tensor(Float32, (NUM_ELEMENTS,), (1,), assumed_align=4),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {ARCH} {options}".strip(),
    )
