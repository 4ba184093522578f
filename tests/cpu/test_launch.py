"""What of the launch can be tested without a GPU."""

import contextlib
import itertools
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_dash import attention_backward, forward, launch, ops, registry, validation
from cute_dash.config import SUPPORTED_HEAD_DIMS, get_config
from cute_dash.device import on_device
from cute_dash.kernels.workspace import ALIGNMENT, WorkspaceLayout, get_num_tiles
from cute_dash.testing import random_inputs
from schedules.longest_first import LongestFirst


@pytest.fixture(params=[False, True], ids=["", "deterministic mode"])
def deterministic_mode(request):
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_outputs_are_contiguous_and_own_their_memory(dtype, deterministic_mode):
    q, k, v = (torch.zeros(2, n, 3, dtype=dtype).transpose(1, 2) for n in (5, 6, 7))
    *grads, workspace = launch.allocate(q, k, v, torch.zeros(3), 9)
    for x, like in zip(grads, (q, k, v), strict=True):
        assert x.shape == like.shape and x.dtype == dtype and x.is_contiguous() and x.storage_offset() == 0
        assert x.untyped_storage().nbytes() == like.nbytes
    assert workspace.shape == (9,) and workspace.dtype == torch.float32
    assert workspace.untyped_storage().nbytes() == 36


def test_outputs_have_the_strides_of_their_shapes(deterministic_mode):
    """Of an extent 1 torch keeps any stride, and calls the tensor contiguous all the same."""
    like = torch.zeros(64).as_strided((1, 2, 1, 32), (2**33, 32, 8, 1))
    for x in launch.allocate(like, like, like, torch.zeros(3), 1)[:3]:
        assert x.stride() == (64, 32, 32, 1)


# malloc maps such sizes afresh, so that nothing is found in them that another test left behind
LARGE = 1 << 24


def test_outputs_are_not_filled_in_deterministic_mode():
    """torch fills what `torch.empty` returns; the kernels write all of it anyway."""
    like = torch.zeros(LARGE)
    torch.use_deterministic_algorithms(True)
    try:
        allocated = launch.allocate(like, like, like, like, LARGE)
        y = torch.empty(LARGE)
    finally:
        torch.use_deterministic_algorithms(False)
    assert y.isnan().all()
    assert not any(x.isnan().all() for x in allocated)


def test_outputs_are_plain_tensors_where_torch_fills_none(monkeypatch):
    monkeypatch.setattr(torch, "UntypedStorage", lambda *_, **__: pytest.fail("a storage was made"))
    tensors = 4 * (torch.zeros(3),)
    launch.allocate(*tensors, 5)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        launch.allocate(*tensors, 5)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(False)


def test_a_device_that_is_current_stays_so(monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or contextlib.nullcontext())
    with on_device(torch.device("cuda:1")), on_device(torch.device("cuda:1")):  # one inside the other
        assert not entered
    with on_device(torch.device("cuda:0")):
        assert entered == [torch.device("cuda:0")]


@pytest.mark.parametrize("tiles", [(1, 1), (3, 5), (512, 7)], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "causal", "bytes_per_query"),
    [(64, True, 8), (128, True, 16), (128, False, 16), (96, True, 16), (192, True, 8), (256, False, 8)],
)
def test_workspace_parts_are_aligned_and_do_not_overlap(tiles, head_dim, causal, bytes_per_query):
    num_streams, num_m_blocks = tiles
    config = get_config(head_dim, causal)
    layout = WorkspaceLayout(num_streams, num_m_blocks, config)
    rows = num_streams * num_m_blocks * config.tile_m
    starts = [0, layout.stats, layout.semaphore, layout.counter, layout.size]
    sizes = [rows * head_dim, rows * bytes_per_query // 4, num_streams * num_m_blocks, 1]
    for start, end, size in zip(starts[:-1], starts[1:], sizes, strict=True):
        assert start % ALIGNMENT == 0
        assert start + size <= end < start + size + 2 * ALIGNMENT


@pytest.fixture
def launches(monkeypatch):
    """Every launch as (key, arguments of the compiled function), on a device of 10 SMs that is not there."""
    launched = []

    def get_backward(key):
        return lambda *arguments: launched.append((key, arguments))

    monkeypatch.setattr(launch, "get_backward", get_backward)
    monkeypatch.setattr(launch, "num_sms", lambda device_index: 10)
    monkeypatch.setattr(launch, "on_device", lambda device: contextlib.nullcontext())
    launch._plan.cache_clear()
    yield launched
    launch._plan.cache_clear()


@pytest.mark.parametrize(
    ("name", "seqlen", "causal", "cooperative", "num_ctas"),
    [("shortest_first", 1024, True, False, 10), ("shift", 512, False, True, 10), ("baseline", 100, False, False, 6)],
)
def test_launch_arguments(name, seqlen, causal, cooperative, num_ctas, launches):
    x = random_inputs(2, seqlen, seqlen, 3, 128, dtype=torch.float16)
    out, lse = x.q.clone(), torch.zeros(2, 3, seqlen)
    schedule, config = registry.load(name), get_config(128, causal)
    for _ in range(2):
        dq, dk, dv = launch.backward(x.dout, x.q, x.k, x.v, out, lse, 0.5, causal, schedule)
        assert dq.shape == x.q.shape and dk.shape == dv.shape == x.k.shape and dq.dtype == torch.float16
        key, arguments = launches.pop()
        assert not launches
        assert (key.config, key.schedule, key.dtype, key.debug) == (config, schedule, "float16", False)
        assert key.cooperative == cooperative
        tensors, workspace, rest = arguments[:9], arguments[9], arguments[10:]
        expected = (x.dout, x.q, x.k, x.v, out, lse, dq, dk, dv)
        assert all(a is b for a, b in zip(tensors, expected, strict=True))
        num_m_blocks = -(-seqlen // config.tile_m)
        assert workspace.numel() == WorkspaceLayout(6, num_m_blocks, config).size
        assert rest == (None, None, None, None, None, 0.5, 0, 0, num_ctas)


@pytest.fixture
def launches_of_op(launches, monkeypatch):
    """What `attention_backward` launches, whose CUDA implementation takes these CPU tensors for CUDA ones."""
    monkeypatch.setattr(ops, "_checked", {})
    monkeypatch.setattr(ops, "run_op", lambda op, *arguments: ops._backward_cuda(*arguments))
    return launches


def make_arguments(seqlen, batch=1, num_heads=1):
    x = random_inputs(batch, seqlen, seqlen, num_heads, 64, dtype=torch.bfloat16)
    lse = torch.zeros(batch, num_heads, seqlen)
    return dict(dout=x.dout, q=x.q, k=x.k, v=x.v, out=x.q.clone(), lse=lse)


def test_arguments_that_look_alike_are_checked_once(launches_of_op, monkeypatch):
    checks = []
    check = validation.check_backward_tensors
    monkeypatch.setattr(validation, "check_backward_tensors", lambda *tensors: checks.append(check(*tensors)))
    for seqlen in (40, 40, 50, 40, 50):
        arguments = make_arguments(seqlen)
        attention_backward(**arguments)
        assert all(a is b for a, b in zip(launches_of_op.pop()[1], arguments.values(), strict=False))
    assert len(checks) == 2


def test_a_plan_is_made_once_for_arguments_that_look_alike(launches_of_op, monkeypatch):
    plans = []
    make = launch.plan_backward
    monkeypatch.setattr(
        launch, "plan_backward", lambda *args, **options: plans.append(options) or make(*args, **options)
    )
    for seqlen, dlse in ((40, False), (40, True), (300, False)) * 2:
        arguments = make_arguments(seqlen)
        attention_backward(**arguments, dlse=arguments["lse"] if dlse else None)
        key, launched = launches_of_op.pop()
        assert key.dlse == dlse
        num_m_blocks = -(-seqlen // key.config.tile_m)
        assert launched[9].numel() == WorkspaceLayout(1, num_m_blocks, key.config).size
    assert [options["dlse"] for options in plans] == [False, True, False]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("dout", lambda x: x[:, :, :, :32]),
        ("q", lambda x: x.half()),
        ("k", lambda x: x.to("meta")),
        ("out", lambda x: x[:, 1:]),
        ("lse", lambda x: x.double()),
        ("lse", lambda x: x[:, :, 1:]),
        ("softmax_scale", lambda _: -1.0),
        ("schedule", lambda _: "shfit"),
    ],
    ids=["dout's shape", "q's dtype", "k's device", "out's shape", "lse's dtype", "lse's shape", "scale", "schedule"],
)
def test_a_good_call_does_not_let_a_bad_one_pass(name, change, launches_of_op):
    arguments = make_arguments(40)
    attention_backward(**arguments)
    arguments[name] = change(arguments.get(name))
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)):
            attention_backward(**arguments)
    assert len(launches_of_op) == 1


def test_tensors_that_tma_cannot_read_are_copied_on_every_call(launches_of_op):
    good = make_arguments(40, batch=2, num_heads=2)
    q, k = good["q"], good["k"]
    strided = good | dict(q=q.transpose(1, 3).contiguous().transpose(1, 3))
    # of the same metadata as the good one
    odd = good | dict(k=torch.cat([k.new_zeros(1), k.flatten()])[1:].view(k.shape))
    for arguments, copied in ((good, None), (strided, "q"), (odd, "k")) * 2:
        attention_backward(**arguments)
        for name, launched in zip(arguments, launches_of_op.pop()[1], strict=False):
            assert torch.equal(launched, good[name])
            assert (launched is arguments[name]) == (name != copied)
            assert launched.data_ptr() % 16 == 0 and launched.is_contiguous()


def test_the_memory_of_checked_calls_is_bounded(launches_of_op, monkeypatch):
    monkeypatch.setattr(ops, "_MAX_CHECKED", 3)
    for seqlen in range(1, 10):
        attention_backward(**make_arguments(seqlen))
        assert 1 <= len(ops._checked) <= 3


@pytest.mark.parametrize(("num_heads_kv", "grouped", "num_ctas"), [(4, False, 8), (2, True, 4), (1, True, 2)])
def test_grouped_heads_have_a_kernel_of_their_own(num_heads_kv, grouped, num_ctas, launches):
    x = random_inputs(1, 200, 256, 4, 64, num_heads_kv=num_heads_kv)
    schedule, config = registry.load("baseline"), get_config(64, False)
    _, dk, dv = launch.backward(x.dout, x.q, x.k, x.v, x.q, torch.zeros(1, 4, 200), 0.5, False, schedule)
    assert dk.shape == dv.shape == x.k.shape
    key, arguments = launches.pop()
    assert key.grouped == grouped
    assert arguments[9].numel() == WorkspaceLayout(4, 2, config).size  # of the query heads
    assert arguments[-1] == num_ctas  # of the KV heads


def test_another_shape_or_configuration_is_another_plan(launches):
    schedule = registry.load("shortest_first")
    other = replace(get_config(128, True), stats_by_gemm=False)
    keys, sizes = [], []
    for seqlen, config in ((256, None), (512, None), (512, other), (512, None)):
        x = random_inputs(1, seqlen, seqlen, 1, 128, dtype=torch.bfloat16)
        launch.backward(x.dout, x.q, x.k, x.v, x.q, torch.zeros(1, 1, seqlen), 0.5, True, schedule, config)
        key, arguments = launches.pop()
        keys.append(key.config.stats_by_gemm)
        sizes.append(arguments[9].numel())
    assert keys == [True, True, False, True]
    assert len(set(sizes)) == 3 and sizes[1] == sizes[3]


def test_a_smaller_head_dim_of_v_is_another_kernel_with_outputs_of_its_own(launches):
    schedule = registry.load("shortest_first")
    for head_dim_v in (128, 192):
        x = random_inputs(1, 256, 256, 1, 192, head_dim_v=head_dim_v, dtype=torch.bfloat16)
        grads = launch.backward(x.dout, x.q, x.k, x.v, x.dout, torch.zeros(1, 1, 256), 0.5, True, schedule)
        key, _ = launches.pop()
        assert (key.config.head_dim, key.config.head_dim_v) == (192, head_dim_v)
        assert [grad.shape[-1] for grad in grads] == [192, 192, head_dim_v]


def test_a_window_travels_as_two_arguments_of_one_local_kernel(launches):
    schedule, x = registry.load("shortest_first"), random_inputs(1, 512, 400, 1, 64, dtype=torch.bfloat16)
    tensors = (x.dout, x.q, x.k, x.v, x.q, torch.zeros(1, 1, 512))
    sent = []
    for causal, window_size in ((False, (64, 32)), (True, (64, 32)), (False, (-1, 7)), (False, (7, -1))):
        launch.backward(*tensors, 0.5, causal, schedule, window_size=window_size)
        key, arguments = launches.pop()
        assert key.config == get_config(64, False, local=True)
        sent.append(arguments[16:18])
    assert sent == [(64, 32), (64, 0), (399, 7), (7, 511)]
    for causal, window_size in ((False, (1000, 1000)), (True, (-1, 5)), (False, (400, 0))):
        launch.backward(*tensors, 0.5, causal, schedule, window_size=window_size)
        key, arguments = launches.pop()
        assert key.config == get_config(64, causal or window_size[1] == 0)
        assert arguments[16:18] == (0, 0)


# Large problems, whose tensors have no memory here


def large(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_the_workspace_of_a_large_batch(launches):
    q, lse = large(1600, 729, 16, 72), large(1600, 16, 729, dtype=torch.float32)
    dq, dk, dv = launch.backward(q, q, q, q, q, lse, 0.5, False, registry.load("shortest_first"))
    assert dq.shape == dk.shape == dv.shape == q.shape
    _, arguments = launches.pop()
    config = get_config(72, False)
    num_tiles = 1600 * 16 * -(-729 // config.tile_m)
    assert arguments[9].numel() == WorkspaceLayout(1600 * 16, num_tiles // (1600 * 16), config).size
    assert arguments[9].nbytes > 4 * num_tiles * config.tile_m * config.head_dim_padded > 2**32


def test_the_workspace_of_many_packed_tokens(launches):
    q, lse = large(1_100_000, 16, 128), large(16, 1_100_000, dtype=torch.float32)
    cu_seqlens = large(301, dtype=torch.int32)
    schedule, config = registry.load("shortest_first"), get_config(128, True)
    launch.backward_varlen(q, q, q, q, q, lse, cu_seqlens, cu_seqlens, 0.5, True, schedule)
    _, arguments = launches.pop()
    layout = WorkspaceLayout(16, get_num_tiles(1_100_000, 300, config.tile_m), config)
    assert arguments[9].numel() == layout.size > 2**31


TOO_LARGE = {
    "tiles": (
        lambda: (large(2**20, 64, 2**11, 64), {}),
        rf"{2**31} tiles in its longer direction; allowed: at most {2**30}",
    ),
    "queries": (lambda: (large(1, 2**30, 1, 64), {}), rf"q has {2**30} tokens; allowed: at most {2**30 - 2**16}"),
    "groups": (
        lambda: (large(1, 2**20, 1, 64), dict(schedule=LongestFirst(heads_per_group=2**18))),
        rf"heads_per_group={2**18} has groups of {2**31} tiles; allowed: at most {2**30}, here heads_per_group={2**17}",
    ),
}


@pytest.mark.parametrize(("make", "message"), TOO_LARGE.values(), ids=TOO_LARGE.keys())
def test_too_many_to_count_is_refused(make, message, monkeypatch):
    monkeypatch.setattr(validation, "check_device", lambda device: None)
    q, options = make()
    with pytest.raises(ValueError, match=message):
        spec = ops.spec_of(options.get("schedule", "shortest_first"))
        ops._check(validation.check_qkv, (q, q, q), q, q, None, True, (-1, -1), spec)


@pytest.mark.parametrize(
    ("num_tokens", "num_sequences", "num_heads", "allowed"),
    [(2**20, 2**10, 16, True), (2**20, 2**23, 1, False), (2**29, 2**10, 1, True), (2**29, 2**10, 2**9, False)],
)
def test_too_many_packed_tiles_are_refused(num_tokens, num_sequences, num_heads, allowed):
    longest = get_config(64, True).make_shape(1, num_heads, 2**20, 2**20)
    totals = num_tokens, num_tokens
    if allowed:
        assert validation.resolve_varlen_schedule("shortest_first", longest, totals, num_sequences).name
        return
    with pytest.raises(ValueError, match=rf"tiles; allowed: at most {2**30}, and {2**23} of a head"):
        validation.resolve_varlen_schedule("shortest_first", longest, totals, num_sequences)


def test_statistics_of_a_heads_tiles_are_found_in_32_bits():
    for head_dim, mask in itertools.product(SUPPORTED_HEAD_DIMS, [(False, False), (True, False), (False, True)]):
        assert validation.MAX_VARLEN_TILES * get_config(head_dim, *mask).stats_size <= 2**31


@pytest.mark.parametrize("batch", [65_535, 65_536])
def test_the_forwards_own_limits(batch):
    with FakeTensorMode():
        q = torch.empty(batch, 64, 2, 64, dtype=torch.bfloat16, device="cuda")
        if batch == 65_535:
            assert forward.forward(q, q, q, 0.1, True)[0].shape == q.shape
            return
        with pytest.raises(ValueError, match="65536 sequences .* allowed in a forward pass: at most 65535 sequences"):
            forward.forward(q, q, q, 0.1, True)


def test_cudnn_gets_no_tensor_that_it_may_not_be_able_to_count(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)

    def applies(q, k, causal):
        return forward._cudnn_applies(q, k, k, causal)

    assert applies(large(2, 2**20, 8, 64), large(2, 2**20, 8, 64), True)
    assert not applies(large(2, 2**20, 16, 64), large(2, 2**20, 8, 64), True)
    assert not applies(large(2, 2**19, 8, 64), large(2, 2**21, 16, 64), False)
