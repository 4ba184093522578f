"""The machine code of the kernels for sm_90a, compiled and disassembled without a GPU.

Every tuned head dim, mask (full, causal, local) and concrete schedule of the registry that orders the mask, in bf16;
fp16, debug and cooperative builds of one schedule each; the tiles of the other head dims over masks and kinds of
builds; some of the head dims that are padded in the tiles. A build takes a few seconds and is shared by all tests of
its key.
"""

import re
from collections import Counter
from dataclasses import replace

import cutlass
import pytest
from cutlass.cute.nvgpu import cpasync

from cute_dash import registry
from cute_dash.compile import CompileKey, build
from cute_dash.config import (
    SMEM_CAPACITY_BYTES,
    SUPPORTED_HEAD_DIMS,
    TILE_HEAD_DIMS,
    TUNED_HEAD_DIMS,
    UNEQUAL_HEAD_DIMS,
    BwdConfig,
    get_config,
)
from cute_dash.kernels.flash_bwd_sm90 import FlashAttentionBackwardSm90
from cute_dash.problem import Window
from cute_dash.schedule import Selector
from tests.compile.sass import build_and_disassemble

REGISTERS_PER_SM = 65536
WARPGROUP_THREADS = 128
MASKS = ((False, False), (True, False), (False, True))
CONFIGS = [get_config(head_dim, *mask) for head_dim in TUNED_HEAD_DIMS for mask in MASKS]
OTHER_HEAD_DIMS = [(d, d) for d in TILE_HEAD_DIMS if d not in TUNED_HEAD_DIMS] + [UNEQUAL_HEAD_DIMS]
OTHER_CONFIGS = [get_config(qk, *mask, v) for qk, v in OTHER_HEAD_DIMS for mask in MASKS]


def concrete_schedules():
    schedules = list(registry.load_all()[0].values())
    return [schedule for schedule in schedules if not isinstance(schedule, Selector)]


def orders_mask_of(schedule, config):
    return schedule.can_implement(config.make_shape(1, 1, 1024, 1024, Window(512, 0) if config.local else None))


def release_keys():
    """All that users run: bf16 for every schedule, and the other dtype and launch mode for one each."""
    keys = [
        CompileKey(config, schedule, "bfloat16")
        for config in CONFIGS
        for schedule in concrete_schedules()
        if orders_mask_of(schedule, config)
    ]
    keys += [CompileKey(config, registry.load("shortest_first"), "float16") for config in CONFIGS]
    # by mask; the simplest and the most demanding
    grouped = dict(full=("baseline", "shift"), causal=("hybrid", "symmetric_shift"), local=("baseline", "hybrid"))
    keys += [
        CompileKey(config, registry.load(name), "bfloat16", grouped=True)
        for config in CONFIGS
        for name in grouped[config.mask]
    ]
    # by mask; what `auto` takes, and another
    varlen = dict(
        full=("longest_first", "unordered"), causal=("hybrid", "shortest_first"), local=("shortest_first", "hybrid")
    )
    keys += [
        CompileKey(config, registry.load(name), "bfloat16", grouped=grouped, varlen=True)
        for config in CONFIGS
        for name, grouped in zip(varlen[config.mask], (True, False), strict=True)
    ]
    return [
        *keys,
        *dlse_keys(),
        CompileKey(get_config(128, False), registry.load("shift"), "bfloat16", cooperative=True),
    ]


def dlse_keys():
    """With a gradient of the LSE: a build of every kind."""
    return [
        CompileKey(get_config(head_dim, *mask), registry.load(name), "bfloat16", dlse=True, **options)
        for head_dim, mask, name, options in (
            (64, (True, False), "hybrid", {}),
            (128, (False, False), "shift", dict(grouped=True)),
            (128, (True, False), "shortest_first", dict(varlen=True)),
            (72, (False, True), "shortest_first", dict(varlen=True, grouped=True)),
            (64, (False, False), "unordered", {}),
        )
    ]


def other_keys():
    """The tiles of the other head dims: what `auto` takes and the most demanding, in every kind of build."""
    keys = []
    for config in OTHER_CONFIGS:
        first, second = dict(
            full=("longest_first", "shift"), causal=("hybrid", "symmetric_shift"), local=("shortest_first", "hybrid")
        )[config.mask]
        varlen = "unordered" if config.mask == "full" else "hybrid"
        keys += [
            CompileKey(config, registry.load(first), "bfloat16"),
            CompileKey(config, registry.load(second), "bfloat16", grouped=True),
            CompileKey(config, registry.load(first), "float16", varlen=True),
            CompileKey(config, registry.load(varlen), "bfloat16", grouped=True, varlen=True),
        ]
    return keys


def padded_keys():
    """Every head dim that is padded, over masks, schedules and kinds of builds."""
    full, causal, local = (False, False), (True, False), (False, True)
    return [
        CompileKey(get_config(head_dim, *mask), registry.load(name), dtype, **options)
        for head_dim, mask, name, dtype, options in (
            (32, full, "shift", "bfloat16", {}),
            (32, local, "shortest_first", "bfloat16", dict(varlen=True)),
            (40, full, "unordered", "bfloat16", dict(varlen=True, grouped=True)),
            (48, causal, "hybrid", "float16", dict(grouped=True)),
            (56, causal, "symmetric_shift", "bfloat16", {}),
            (72, causal, "hybrid", "bfloat16", dict(varlen=True, grouped=True)),
            (72, local, "baseline", "bfloat16", {}),
            (80, full, "shift", "bfloat16", dict(grouped=True)),
            (88, local, "hybrid", "bfloat16", dict(varlen=True)),
            (88, full, "unordered", "float16", {}),
            (104, full, "baseline", "bfloat16", {}),
            (112, local, "hybrid", "bfloat16", dict(grouped=True)),
            (120, full, "longest_first", "bfloat16", dict(varlen=True)),
            (112, causal, "passes", "bfloat16", dict(grouped=True)),
            (136, causal, "hybrid", "bfloat16", {}),
            (152, causal, "passes", "bfloat16", dict(varlen=True)),
            (160, local, "shortest_first", "bfloat16", dict(varlen=True)),
            (184, full, "shift", "float16", {}),
            (200, causal, "hybrid", "bfloat16", dict(varlen=True, grouped=True)),
            (224, local, "hybrid", "bfloat16", {}),
            (248, full, "unordered", "bfloat16", {}),
        )
    ]


def describe(key):
    keys96 = "-keys96" if key.config.tile_n == 96 else ""
    return key.describe().replace(" ", "-") + keys96 + ("-cooperative" if key.cooperative else "")


PADDED_KEYS = padded_keys()
RELEASE_KEYS = release_keys() + other_keys() + PADDED_KEYS
DEBUG_KEYS = [
    CompileKey(config, registry.load("shortest_first"), "bfloat16", debug=True)
    for config in CONFIGS[3:] + OTHER_CONFIGS
]
every_release = pytest.mark.parametrize("key", RELEASE_KEYS, ids=describe)
every_build = pytest.mark.parametrize("key", RELEASE_KEYS + DEBUG_KEYS, ids=describe)
every_config = pytest.mark.parametrize(
    "config", CONFIGS + OTHER_CONFIGS, ids=lambda config: f"hd{config.head_dims}-{config.mask}-keys{config.tile_n}"
)


def expected_hgmma_shapes(config: BwdConfig) -> Counter[tuple[int, int, int]]:
    """(M, N, K) of the warpgroup MMAs that one warpgroup issues for one step, K = 16 for 16-bit operands."""
    rows, columns, columns_v = config.tile_m, config.head_dim_padded, config.head_dim_v_padded
    if config.tile_n == 96:
        # S and dP, and the three times 64 rows of dK^T and of dV^T of 192, by 48 keys; dV^T of 128 by rows
        num_by_keys = (columns + columns_v) // 16 + 3 * rows // 16 * (1 if columns_v == 128 else 2)
        num_dV = rows // 16 if columns_v == 128 else 0
        return Counter({(64, 48, 16): num_by_keys, (64, 96, 16): num_dV + config.tile_n // 16})  # and dQ
    by_columns = config.tile_n == 64
    queries, share = (config.tile_m // 2, 2) if by_columns else (config.tile_m, 1)
    split_rows = rows >= 128
    dQ_shape = (64, columns if split_rows else columns // 2, 16)
    num_dQ = rows // (128 if split_rows else 64) * config.tile_n // 16
    return (
        Counter({(64, queries, 16): (columns + columns_v) // 16 + num_stats_mmas(config)})  # S^T and dP^T
        + Counter({(64, columns_v // share, 16): config.tile_m // 16})  # dV
        + Counter({(64, columns // share, 16): config.tile_m // 16})  # dK
        + Counter({dQ_shape: num_dQ * num_kinds_of_steps(config)})
    )


def num_kinds_of_steps(config):
    """One or, with a kind of its own for steps that hide a warpgroup's keys, two; both compute dQ."""
    return 2 if config.skip_hidden_keys else 1


def num_stats_mmas(config):
    """The k-steps that bring LSE into S^T and dPsum into dP^T, where they come through the GEMMs."""
    return 2 if config.stats_by_gemm else 0


def finishes_dQ(key):
    """Whether the main kernel finishes dQ, which takes an order: the last contributor must know that it is."""
    return key.config.fuse_dQ and key.schedule.ordered


def test_padded_head_dims_are_all_here():
    """Those up to 128, and of each of the wider tiles the narrowest, the widest and one between."""
    head_dims = {key.config.head_dim for key in PADDED_KEYS}
    assert head_dims >= {d for d in SUPPORTED_HEAD_DIMS if d <= 128} - set(TILE_HEAD_DIMS)
    assert head_dims > {136, 184, 200, 248} and not head_dims & set(TILE_HEAD_DIMS)


@pytest.mark.parametrize("key", PADDED_KEYS, ids=describe)
def test_padding_costs_no_instruction(key):
    """But for the preprocess kernel, which has to leave out the columns beyond: the rest is in the TMA descriptors."""
    config = key.config
    tuned = replace(key, config=get_config(config.head_dim_padded, config.causal, config.local))
    kernels, expected = build_and_disassemble(key), build_and_disassemble(tuned)
    assert kernels["main"] == expected["main"]
    assert kernels.get("post") == expected.get("post")
    assert kernels["pre"].count("LDG") == expected["pre"].count("LDG")
    assert kernels["pre"].count("STG") == expected["pre"].count("STG")


@pytest.mark.parametrize("key", dlse_keys(), ids=describe)
def test_a_gradient_of_the_lse_costs_one_load_and_one_subtraction_for_each_row(key):
    kernels, expected = build_and_disassemble(key), build_and_disassemble(replace(key, dlse=False))
    assert kernels["main"] == expected["main"]
    assert kernels.get("post") == expected.get("post")
    pre, expected_pre = kernels["pre"], expected["pre"]
    rows_per_thread = -(-key.config.tile_m // (256 * 8 // key.config.head_dim_padded))
    assert pre.count("LDG") == expected_pre.count("LDG") + rows_per_thread
    assert pre.count("STG") == expected_pre.count("STG")
    num_adds, expected_adds = (kernel.count("FADD") for kernel in (pre, expected_pre))
    assert num_adds == expected_adds + rows_per_thread


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("head_dims", [*((d, d) for d in (32, 64, 72, 128, 136, 200)), UNEQUAL_HEAD_DIMS], ids=str)
def test_tma_tensors_end_at_head_dim_and_boxes_do_not(head_dims, varlen, monkeypatch):
    """The hardware clips at the tensors' extents; a box has its width and brings its bytes whatever it clips."""
    config = get_config(head_dims[0], True, head_dim_v=head_dims[1])
    found = []
    make_atom = cpasync.make_tiled_tma_atom

    def record(operation, tensor, *arguments):
        atom, coordinates = make_atom(operation, tensor, *arguments)
        found.append((tensor.shape[1], str(atom.type)))
        return atom, coordinates

    monkeypatch.setattr(cpasync, "make_tiled_tma_atom", record)
    build(CompileKey(config, registry.load("hybrid"), "bfloat16", varlen=varlen))
    names = ("Q", "K", "V", "dO", "K", "V", "dQ")  # dK and dV lie like K and V
    for name, (columns, atom) in zip(names, found, strict=True):
        is_values = name in ("V", "dO")
        width = (config.head_dim_v_padded if is_values else config.head_dim_padded) // num_boxes(config)[name]
        box = re.search(r'copy_bits = (\d+), tma_gbasis = <"\((\d+),(\d+),1,1', atom)
        copy_bits, box_columns, box_rows = map(int, box.groups())
        assert columns == head_dims[is_values] and box_columns == width
        assert copy_bits == width * box_rows * 16


@every_build
def test_kernels_of_a_call(key):
    assert set(build_and_disassemble(key)) == {"pre", "main"} | (set() if finishes_dQ(key) else {"post"})


@every_release
def test_nothing_is_spilled(key):
    for role, kernel in build_and_disassemble(key).items():
        assert kernel.frame_bytes == 0, f"{role} has a stack frame"
        assert kernel.count("LDL") + kernel.count("STL") == 0, f"{role} uses local memory"


@every_build
def test_warpgroup_mmas_are_those_of_the_config(key):
    main = build_and_disassemble(key)["main"]
    assert main.hgmma_shapes() == expected_hgmma_shapes(key.config)
    assert main.count("HGMMA") == main.hgmma_shapes().total()
    num_bf16 = sum(opcode.endswith("x16.F32.BF16") for opcode in main.opcodes if opcode.startswith("HGMMA"))
    num_fp16 = sum(opcode.endswith("x16.F32") for opcode in main.opcodes if opcode.startswith("HGMMA"))
    # the statistics are split into bf16 whatever the dtype
    assert num_bf16 == (main.count("HGMMA") if key.dtype == "bfloat16" else num_stats_mmas(key.config))
    assert num_bf16 + num_fp16 == main.count("HGMMA")


@every_build
def test_no_multiplication_is_done_twice(key):
    """Five products of tile_m x tile_n x a head dim per step, and a k-step per statistic, however each is split."""
    shapes = build_and_disassemble(key)["main"].hgmma_shapes()
    per_warpgroup = sum(m * n * k * count for (m, n, k), count in shapes.items())
    config = key.config
    per_step = config.num_mma_warpgroups * per_warpgroup
    stats = num_stats_mmas(config) * 16 * config.tile_m * config.tile_n
    columns = (2 + num_kinds_of_steps(config)) * config.head_dim_padded + 2 * config.head_dim_v_padded
    assert per_step == config.tile_m * config.tile_n * columns + stats


def test_K_in_registers():
    """Read once per work tile, and the products are the same: still asynchronous, nothing is spilled."""
    config = get_config(96, True)
    assert config.K_in_regs
    for options in ({}, dict(grouped=True, varlen=True)):
        main = build_and_disassemble(CompileKey(config, registry.load("hybrid"), "bfloat16", **options))["main"]
        assert main.hgmma_shapes() == expected_hgmma_shapes(config)
        num_products = 4 + num_kinds_of_steps(config)
        assert main.count("WARPGROUP.ARRIVE") == main.count("WARPGROUP.DEPBAR") == num_products
        assert main.count("LDL") == main.count("STL") == main.frame_bytes == 0
        first = next(i for i, opcode in enumerate(main.opcodes) if opcode.startswith("HGMMA"))
        loads = [i for i, opcode in enumerate(main.opcodes) if opcode.startswith("LDSM")]
        assert len(loads) == config.head_dim_padded // 16 and max(loads) < first


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_K_and_V_load_while_dK_and_dV_leave(head_dim):
    """As much is loaded and stored as without; one more barrier keeps steps from writing over what leaves."""
    shipped = get_config(head_dim, True)
    assert shipped.prefetch_KV
    main, other = (
        build_and_disassemble(CompileKey(c, registry.load("hybrid"), "bfloat16"))["main"]
        for c in (shipped, replace(shipped, prefetch_KV=False))
    )
    for opcode in ("UTMASTG", "UTMALDG", "STSM"):
        assert main.count(opcode) == other.count(opcode)
    storage = FlashAttentionBackwardSm90(shipped, cutlass.BFloat16, registry.load("hybrid")).shared_storage()
    assert storage.size_in_bytes() <= shipped.smem_bytes <= SMEM_CAPACITY_BYTES
    assert main.count("BAR.SYNC") == other.count("BAR.SYNC") + 1


@every_build
def test_every_matrix_product_is_a_warpgroup_mma(key):
    for role, kernel in build_and_disassemble(key).items():
        assert kernel.count("HMMA") + kernel.count("IMMA") + kernel.count("DMMA") == 0, role
        assert role == "main" or kernel.count("HGMMA") == 0
    # scale and subtract of the softmax: one per value of this thread's part of S^T, nothing else
    config = key.config
    num_values = 0 if config.stats_by_gemm else config.tile_n * config.tile_m // (2 * WARPGROUP_THREADS)
    assert build_and_disassemble(key)["main"].count("FFMA") == num_values


@every_release
def test_warpgroup_mmas_stay_asynchronous(key):
    """Where ptxas must serialize them, it puts WARPGROUP.ARRIVE before and a wait behind each single one."""
    main = build_and_disassemble(key)["main"]
    # one per matrix product, S^T, dP^T, dV, dQ and dK, or dQ alone, and until it is there
    num_products = 4 + num_kinds_of_steps(key.config)
    assert main.count("WARPGROUP.ARRIVE") == main.count("WARPGROUP.DEPBAR") == num_products


@every_release
def test_registers(key):
    """As many as the launch can give; setmaxnreg then moves them from the producers to the consumers."""
    config = key.config
    num_mma_threads = config.num_mma_warpgroups * WARPGROUP_THREADS
    main = build_and_disassemble(key)["main"]
    per_thread = REGISTERS_PER_SM // (WARPGROUP_THREADS + num_mma_threads) // 8 * 8
    assert main.num_registers == per_thread == 168
    after = WARPGROUP_THREADS * config.num_producer_regs + num_mma_threads * config.num_mma_regs
    assert after <= (WARPGROUP_THREADS + num_mma_threads) * main.num_registers
    assert main.count("USETMAXREG.DEALLOC") == main.count("USETMAXREG.TRY_ALLOC") == 1


def test_a_window_costs_a_second_mask_and_one_more_claim():
    """The local kernel beside the causal one of the same tiles and schedule: same products, loads and exponentials."""
    schedule = registry.load("shortest_first")
    for head_dim in TUNED_HEAD_DIMS:
        local, causal = (
            build_and_disassemble(CompileKey(get_config(head_dim, *mask), schedule, "bfloat16"))["main"]
            for mask in ((False, True), (True, False))
        )
        for opcode in ("HGMMA", "MUFU.EX2", "UTMALDG", "UTMASTG", "UBLKRED"):
            assert local.count(opcode) == causal.count(opcode), opcode
        # a selection per score for either end of the window, each behind a branch of its own
        assert local.count("FSEL") == 2 * causal.count("FSEL") == get_config(head_dim, True).tile_m
        # the first claim, those before and with the last turn, and under a window the one after a tile without steps
        assert (local.count("ATOMG"), causal.count("ATOMG")) == (4, 3)


def num_boxes(config):
    """Boxes of the tiles: as wide as the swizzle, of which the columns that a wgmma takes must be a multiple."""
    columns, columns_v = config.head_dim_padded, config.head_dim_v_padded
    widths = {  # elements
        64: dict.fromkeys(("Q", "K", "V", "dO", "dQ"), 64),
        96: dict(Q=32, V=32, dO=32, K=16, dQ=16),  # dQ is shared out in two halves of 48 columns
        128: dict.fromkeys(("Q", "K", "V", "dO", "dQ"), 64),
        192: dict(Q=32, K=32, dQ=32, V=32, dO=32),  # 96 columns for each warpgroup
        256: dict.fromkeys(("Q", "K", "V", "dO", "dQ"), 64),
    }
    if config.tile_n == 96:  # dQ by columns, of which 96 are no multiple of 64; the rest by 64 rows of a wgmma
        widths[192], widths[128] = dict(Q=64, K=32, dQ=32, V=64, dO=64), dict(V=64, dO=64)
    width, width_v = widths[columns], widths[columns_v]
    return {name: columns // width[name] for name in ("Q", "K", "dQ")} | {
        name: columns_v // width_v[name] for name in ("V", "dO")
    }


@every_build
def test_bulk_transfers(key):
    kernels = build_and_disassemble(key)
    main = kernels["main"]
    boxes = num_boxes(key.config)
    rank = "5D" if key.varlen else "4D"
    assert main.count(f"UTMALDG.{rank}") == main.count("UTMALDG") == sum(boxes[name] for name in ("Q", "K", "V", "dO"))
    # dK and dV lie like K and V; of a finished dQ tile there is a piece from each warpgroup, rows or columns of it
    num_pieces = key.config.num_mma_warpgroups if finishes_dQ(key) else 0
    boxes_of_piece = boxes["dQ"] if key.config.tile_m == 128 else boxes["dQ"] // 2
    num_stores = boxes["K"] + boxes["V"] + num_pieces * boxes_of_piece
    assert main.count(f"UTMASTG.{rank}") == main.count("UTMASTG") == num_stores
    # the row statistics, and the sum so far of each piece, one of which ptxas sometimes lays out twice
    assert main.count("UBLKCP.S.G") in (1 + num_pieces, 2 + num_pieces if num_pieces else 1)
    assert main.count("UBLKRED.G.S.ADD.F32.RN") == main.count("UBLKRED") == key.config.num_mma_warpgroups
    # the first contributor of an ordered schedule stores
    assert main.count("UBLKCP.G.S") == (key.config.num_mma_warpgroups if key.schedule.ordered else 0)
    if not finishes_dQ(key):
        assert kernels["post"].count(f"UTMASTG.{rank}") == boxes["dQ"]


@every_release
def test_turnstile(key):
    """Polled with acquire, passed on with release, both for the whole GPU; no trace of it without an order."""
    main = build_and_disassemble(key)["main"]
    if not key.schedule.ordered:
        assert main.count("REDG") == main.count("LDG.E.STRONG") == main.count("MEMBAR.ALL.GPU") == 0
        return
    # the first look and the loop, before an addition and before the sum so far is loaded; and whether to claim early
    looks_ahead = not key.cooperative
    assert main.count("LDG.E.STRONG.GPU") == (4 if finishes_dQ(key) else 2) + looks_ahead
    # the additions have completed, the proxy fence, and the release: a fence and a reduction
    release = ["DEPBAR.LE", "FENCE.VIEW.ASYNC.G", "MEMBAR.ALL.GPU", "REDG.E.ADD.S32.STRONG.GPU"]
    assert main.count("MEMBAR.ALL.GPU") == main.count("REDG") == 1
    before = main.opcodes[: main.opcodes.index(release[-1]) + 1]
    assert [opcode for opcode in before if opcode in release][-4:] == release


@every_config
@pytest.mark.parametrize("dtype", [cutlass.BFloat16, cutlass.Float16], ids=["bf16", "fp16"])
def test_shared_memory(config, dtype):
    """`smem_bytes` holds the kernel's storage, with at most the rounding of one alignment to spare."""
    storage = FlashAttentionBackwardSm90(config, dtype, registry.load("baseline")).shared_storage()
    assert storage.size_in_bytes() <= config.smem_bytes <= SMEM_CAPACITY_BYTES == 227 * 1024
    assert config.smem_bytes - storage.size_in_bytes() < 1024
