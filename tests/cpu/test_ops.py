"""The torch side on CPU tensors: gradients through autograd, opcheck, fake tensors, schedules as strings, layouts."""

import contextlib
import importlib
import itertools
import json
import math
import sys
import threading
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import cute_dash
import schedules
from cute_dash import emulator, forward, interface, ops
from cute_dash.problem import normalize_mask
from cute_dash.testing import (
    assert_bitwise_equal,
    attention_backward_ref,
    attention_forward_ref,
    random_inputs,
    relative_error,
)
from schedules.longest_first import LongestFirst
from schedules.shortest_first import SCHEDULE as SHORTEST_FIRST

FP32_TOLERANCE = 2e-6
NAMES = ("dq", "dk", "dv")
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
WINDOWS = pytest.mark.parametrize("window", [(-1, -1), (20, 5)], ids=["", "window"])
LENGTHS = pytest.mark.parametrize("lengths", [(130, 130), (40, 150), (150, 40)], ids=str)


def inputs(seqlen_q=130, seqlen_k=130, *, dtype=torch.float32, head_dim=64, head_dim_v=None):
    return random_inputs(2, seqlen_q, seqlen_k, 2, head_dim, head_dim_v=head_dim_v, dtype=dtype)


@pytest.mark.parametrize("head_dims", [(d, d) for d in (32, 80, 96, 120, 136, 192, 256)] + [(192, 128)], ids=str)
def test_any_head_dim_has_the_gradients_and_the_scale_of_its_own(head_dims):
    """The scale is that of Q and K."""
    head_dim, head_dim_v = head_dims
    x = random_inputs(2, 130, 150, 4, head_dim, num_heads_kv=2, head_dim_v=head_dim_v, dtype=torch.float32)
    leaves = [t.clone().requires_grad_() for t in x[:3]]
    out = cute_dash.flash_attn_func(*leaves, causal=True)
    assert out.shape == (2, 130, 4, head_dim_v)
    out.backward(x.dout)
    scale = head_dim**-0.5
    assert relative_error(out, attention_forward_ref(*x[:3], scale, True)[0]) < FP32_TOLERANCE
    for leaf, ref in zip(leaves, attention_backward_ref(x.dout, *x[:3], scale, True), strict=True):
        assert relative_error(leaf.grad, ref) < FP32_TOLERANCE


def leaves(x):
    return [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]


@MASKS
@LENGTHS
def test_autograd_gives_the_gradients_of_attention(lengths, causal):
    x = inputs(*lengths)
    q, k, v = leaves(x)
    out, lse = cute_dash.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    out.backward(x.dout)
    scale = 1 / math.sqrt(64)  # the default
    ref_out, ref_lse = attention_forward_ref(x.q, x.k, x.v, scale, causal)
    assert relative_error(out, ref_out) < FP32_TOLERANCE
    torch.testing.assert_close(lse.double(), ref_lse, rtol=1e-5, atol=1e-5)
    for leaf, ref in zip((q, k, v), attention_backward_ref(x.dout, x.q, x.k, x.v, scale, causal), strict=True):
        assert relative_error(leaf.grad, ref) < FP32_TOLERANCE


@MASKS
@LENGTHS
@pytest.mark.parametrize("window_size", [(20, 5), (0, None), (None, 9), [30, 0], (-1, 50), (0, 0)], ids=str)
def test_autograd_gives_the_gradients_of_a_window(window_size, lengths, causal):
    x = inputs(*lengths)
    q, k, v = leaves(x)
    out, lse = cute_dash.flash_attn_func(q, k, v, causal=causal, window_size=window_size, return_lse=True)
    out.backward(x.dout)
    sides = tuple(-1 if side is None else side for side in window_size)
    ref_out, ref_lse = attention_forward_ref(x.q, x.k, x.v, 1 / 8, causal, sides)
    assert relative_error(out, ref_out) < FP32_TOLERANCE
    torch.testing.assert_close(lse.double(), ref_lse, rtol=1e-5, atol=1e-5)
    grads = cute_dash.attention_backward(x.dout, x.q, x.k, x.v, out, lse, causal=causal, window_size=window_size)
    refs = attention_backward_ref(x.dout, x.q, x.k, x.v, 1 / 8, causal, sides)
    scale = max(ref.norm().item() for ref in refs)
    for name, leaf, grad, ref in zip(NAMES, (q, k, v), grads, refs, strict=True):
        assert_bitwise_equal(leaf.grad, grad, name)
        assert (grad.double() - ref).norm().item() < FP32_TOLERANCE * scale


def test_the_window_is_the_widest_int_or_none():
    """What would overflow the op's schema is no limit, as for every number beyond the sequence."""
    x = inputs(40, 40)
    expected = cute_dash.flash_attn_func(x.q, x.k, x.v)
    for window_size in ((2**63, 10**30), (np.int32(100), np.int64(100)), None, (None, None)):
        assert_bitwise_equal(cute_dash.flash_attn_func(x.q, x.k, x.v, window_size=window_size), expected, "out")


@MASKS
@WINDOWS
@pytest.mark.parametrize("num_heads_kv", [2, 1])
def test_grouped_heads_through_autograd(num_heads_kv, window, causal):
    x = random_inputs(2, 40, 150, num_heads=4, num_heads_kv=num_heads_kv, head_dim=64, dtype=torch.float32)
    q, k, v = leaves(x)
    out, lse = cute_dash.flash_attn_func(q, k, v, causal=causal, window_size=window, return_lse=True)
    assert out.shape == x.q.shape and lse.shape == (2, 4, 40)
    out.backward(x.dout)
    for leaf, ref in zip((q, k, v), attention_backward_ref(x.dout, x.q, x.k, x.v, 1 / 8, causal, window), strict=True):
        assert relative_error(leaf.grad, ref) < FP32_TOLERANCE


@WINDOWS
def test_opcheck_with_grouped_heads(window):
    x = random_inputs(2, 40, 150, num_heads=4, num_heads_kv=2, head_dim=64)
    torch.library.opcheck(torch.ops.cute_dash.attention_forward.default, (*leaves(x), 0.1, True, *window, "baseline"))
    out, lse = cute_dash.flash_attn_func(x.q, x.k, x.v, causal=True, window_size=window, return_lse=True)
    arguments = (x.dout, x.q, x.k, x.v, out, lse, None, True, *window, "baseline")
    torch.library.opcheck(torch.ops.cute_dash.attention_backward.default, arguments)


def test_softmax_scale_reaches_forward_and_backward():
    x = inputs()
    q, k, v = leaves(x)
    cute_dash.flash_attn_func(q, k, v, softmax_scale=0.5).backward(x.dout)
    for leaf, ref in zip((q, k, v), attention_backward_ref(x.dout, x.q, x.k, x.v, 0.5, False), strict=True):
        assert relative_error(leaf.grad, ref) < FP32_TOLERANCE


def test_attention_backward_uses_the_out_and_lse_it_is_given():
    """Two halves of the keys with the whole problem's out and LSE: what ring attention does on two ranks."""
    x = inputs(130, 256)
    out, lse = cute_dash.flash_attn_func(x.q, x.k, x.v, return_lse=True)
    whole = cute_dash.attention_backward(x.dout, x.q, x.k, x.v, out, lse)
    halves = [
        cute_dash.attention_backward(x.dout, x.q, x.k[:, rank], x.v[:, rank], out, lse)
        for rank in (slice(0, 128), slice(128, 256))
    ]
    assert relative_error(halves[0][0] + halves[1][0], whole[0]) < FP32_TOLERANCE
    for i in (1, 2):
        assert relative_error(torch.cat([halves[0][i], halves[1][i]], dim=1), whole[i]) < FP32_TOLERANCE


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_inputs_without_requires_grad(wanted):
    x = inputs()
    full = leaves(x)
    cute_dash.flash_attn_func(*full).backward(x.dout)
    some = [t.clone().requires_grad_(i in wanted) for i, t in enumerate((x.q, x.k, x.v))]
    cute_dash.flash_attn_func(*some).backward(x.dout)
    for i, (leaf, expected) in enumerate(zip(some, full, strict=True)):
        if i in wanted:
            assert_bitwise_equal(leaf.grad, expected.grad, "qkv"[i])
        else:
            assert leaf.grad is None


def test_an_undefined_gradient_of_out_is_passed_on():
    class Dropped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    q, k, v = leaves(inputs(8, 8))
    Dropped.apply(cute_dash.flash_attn_func(q, k, v)).sum().backward()
    assert q.grad is k.grad is v.grad is None


def test_double_backward_raises():
    x = inputs()
    q, k, v = leaves(x)
    out = cute_dash.flash_attn_func(q, k, v)
    (dq,) = torch.autograd.grad(out, q, x.dout, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dq.sum().backward()


def test_the_backward_function_has_no_derivative():
    x = inputs(8, 8)
    q, k, v = leaves(x)
    out, lse = cute_dash.flash_attn_func(x.q, x.k, x.v, return_lse=True)
    dq, _, _ = cute_dash.attention_backward(x.dout, q, k, v, out, lse)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dq.sum().backward()


@pytest.mark.parametrize("name", ["dout", "q", "k", "v", "out", "lse", "dlse"])
def test_a_derivative_of_the_backward_is_asked_for_by_any_of_its_tensors(name):
    x = inputs(8, 8)
    out, lse = cute_dash.flash_attn_func(x.q, x.k, x.v, return_lse=True)
    arguments = dict(dout=x.dout, q=x.q, k=x.k, v=x.v, out=out, lse=lse, dlse=torch.ones_like(lse))
    arguments[name] = arguments[name].clone().requires_grad_()
    assert all(grad.requires_grad for grad in cute_dash.attention_backward(**arguments))
    with torch.no_grad():
        assert not any(grad.requires_grad for grad in cute_dash.attention_backward(**arguments))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_keeps_the_gradients():
    x = inputs(8, 8)
    q, k, v = leaves(x)
    one_head = [t.unflatten(2, (2, 1)) for t in (q, k, v)]
    out = torch.func.vmap(cute_dash.flash_attn_func, in_dims=2, out_dims=2)(*one_head)
    grads = torch.autograd.grad(out.flatten(2, 3), (q, k, v), x.dout)
    expected = torch.autograd.grad(cute_dash.flash_attn_func(q, k, v), (q, k, v), x.dout)
    for name, grad, wanted in zip(NAMES, grads, expected, strict=True):
        assert_bitwise_equal(grad, wanted, name)


@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp"])
def test_transforms_that_need_a_derivative_are_refused(transform):
    x = inputs(8, 8)
    call = {
        "grad": lambda f: torch.func.grad(lambda q: f(q).sum())(x.q),
        "vjp": lambda f: torch.func.vjp(f, x.q),
        "jvp": lambda f: torch.func.jvp(f, (x.q,), (x.q,)),
    }[transform]
    with pytest.raises(RuntimeError, match=r"cute_dash::attention_forward has no derivative for torch.func"):
        call(lambda q: cute_dash.flash_attn_func(q, x.k, x.v))


def test_forward_mode_is_refused_where_there_is_a_tangent():
    x = inputs(8, 8)
    out, lse = cute_dash.flash_attn_func(x.q, x.k, x.v, return_lse=True)
    with forward_ad.dual_level():
        assert_bitwise_equal(cute_dash.flash_attn_func(x.q, x.k, x.v), out, "out")
        k = forward_ad.make_dual(x.k, x.k)
        with pytest.raises(RuntimeError, match="attention_forward has no derivative for torch.func or forward-mode AD"):
            cute_dash.flash_attn_func(x.q, k, x.v)
        with pytest.raises(
            RuntimeError, match="attention_backward has no derivative for torch.func or forward-mode AD"
        ):
            cute_dash.attention_backward(x.dout, x.q, k, x.v, out, lse)


def see_by_mode(function, tmp_path):
    names = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    with Mode():
        function()
    return names


def see_by_profiler(function, tmp_path):
    with torch.profiler.profile() as profile:
        function()
    return [event.key for event in profile.key_averages()]


def see_by_execution_trace(function, tmp_path):
    """Nothing in torch tells that this observer is at work."""
    path = tmp_path / "trace.json"
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))
    observer.start()
    function()
    observer.stop()
    observer.unregister_callback()
    return [node["name"] for node in json.loads(path.read_text())["nodes"]]


@pytest.mark.parametrize("see", [see_by_mode, see_by_profiler, see_by_execution_trace])
def test_whoever_watches_sees_the_ops(see, tmp_path):
    """Also where no gradient is asked for, a path that `run_op` shortens."""
    x = inputs(8, 8)
    out, lse = cute_dash.flash_attn_func(x.q, x.k, x.v, return_lse=True)
    q, k, v = leaves(x)
    out_of_leaves = cute_dash.flash_attn_func(q, k, v)
    calls = (
        ("forward", lambda: cute_dash.flash_attn_func(x.q, x.k, x.v)),
        ("backward", lambda: cute_dash.attention_backward(x.dout, x.q, x.k, x.v, out, lse)),
        ("backward", lambda: torch.autograd.grad(out_of_leaves, (q, k, v), x.dout, retain_graph=True)),
    )
    for name, call in calls:
        assert f"cute_dash::attention_{name}" in see(call, tmp_path)


def test_tensors_whose_negation_is_pending():
    """A bit that the dispatcher reads: the memory holds the negated values."""
    x = inputs(8, 8)
    out, lse = cute_dash.flash_attn_func(x.q, x.k, x.v, return_lse=True)
    expected = cute_dash.attention_backward(x.dout, x.q, x.k, x.v, out, lse)
    q = torch.complex(x.q, -x.q).conj().imag
    assert q.is_neg() and torch.equal(q, x.q)
    for name, a, b in zip(NAMES, cute_dash.attention_backward(x.dout, q, x.k, x.v, out, lse), expected, strict=True):
        assert_bitwise_equal(a, b, name)


def test_no_gradient_is_recorded_where_none_is_asked_for():
    x = inputs(8, 8)
    q, k, v = leaves(x)
    with torch.no_grad():
        assert not cute_dash.flash_attn_func(q, k, v).requires_grad
    assert not cute_dash.flash_attn_func(x.q, x.k, x.v).requires_grad
    with torch.inference_mode():
        assert cute_dash.flash_attn_func(x.q, x.k, x.v).is_inference()


def test_names_and_schemas_of_the_ops_are_those_that_graphs_are_saved_with():
    tensors = "Tensor q, Tensor k, Tensor v"
    options = "float? softmax_scale, bool causal, SymInt window_left, SymInt window_right, str schedule"
    rows = "Tensor out, Tensor lse"
    for op, schema in (
        ("forward", f"({tensors}, {options}, Tensor? learnable_sink=None) -> (Tensor, Tensor)"),
        ("backward", f"(Tensor dout, {tensors}, {rows}, {options}, Tensor? dlse=None) -> (Tensor, Tensor, Tensor)"),
        ("sink_backward", f"(Tensor dout, {rows}, Tensor learnable_sink, Tensor? dlse=None) -> Tensor"),
    ):
        overload = getattr(torch.ops.cute_dash, f"attention_{op}").default
        assert str(overload._schema) == f"cute_dash::attention_{op}{schema}"
        assert torch.Tag.pt2_compliant_tag in overload.tags


@pytest.mark.parametrize("warn_only", [False, True], ids=["strict", "warn only"])
def test_torchs_deterministic_mode_changes_nothing(warn_only, recwarn):
    """Neither an error nor a warning: the op is deterministic anyway."""
    x = inputs(dtype=torch.bfloat16)
    expected_leaves, actual_leaves = leaves(x), leaves(x)
    cute_dash.flash_attn_func(*expected_leaves, causal=True).backward(x.dout)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        cute_dash.flash_attn_func(*actual_leaves, causal=True).backward(x.dout)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(actual_leaves, expected_leaves, strict=True):
        assert_bitwise_equal(a.grad, b.grad, "grad")
    assert not recwarn.list


@MASKS
@WINDOWS
def test_opcheck_forward(causal, window):
    x = inputs(40, 150, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.cute_dash.attention_forward.default, (*leaves(x), 0.1, causal, *window, "baseline"))


@MASKS
@WINDOWS
def test_opcheck_backward(causal, window):
    x = inputs(40, 150, dtype=torch.bfloat16)
    out, lse = cute_dash.flash_attn_func(x.q, x.k, x.v, causal=causal, window_size=window, return_lse=True)
    arguments = (x.dout, x.q, x.k, x.v, out, lse, None, causal, *window, "baseline")
    torch.library.opcheck(torch.ops.cute_dash.attention_backward.default, arguments)


def test_opcheck_of_a_smaller_head_dim_of_v():
    x = inputs(40, 150, dtype=torch.bfloat16, head_dim=192, head_dim_v=128)
    options = (None, True, -1, -1, "baseline")
    torch.library.opcheck(torch.ops.cute_dash.attention_forward.default, (*leaves(x), *options))
    out, lse = cute_dash.flash_attn_func(x.q, x.k, x.v, causal=True, return_lse=True)
    arguments = (x.dout, x.q, x.k, x.v, out, lse, *options)
    torch.library.opcheck(torch.ops.cute_dash.attention_backward.default, arguments)


@pytest.mark.parametrize("schedule", ["auto", LongestFirst(heads_per_group=3)], ids=["name", "object"])
def test_torch_compile_keeps_the_bits_without_a_graph_break(schedule):
    x = inputs(dtype=torch.bfloat16)

    def attention(q, k, v):
        whole = cute_dash.flash_attn_func(q, k, v, schedule=schedule)
        return whole + cute_dash.flash_attn_func(q, k, v, causal=True, window_size=(20, None), schedule=schedule)

    eager_leaves, compiled_leaves = leaves(x), leaves(x)
    attention(*eager_leaves).backward(x.dout)
    torch.compile(attention, fullgraph=True, backend="aot_eager")(*compiled_leaves).backward(x.dout)
    if not isinstance(schedule, str):
        assert interface.last_schedule().schedule == schedule
    for a, b in zip(compiled_leaves, eager_leaves, strict=True):
        assert_bitwise_equal(a.grad, b.grad, "grad")


@pytest.mark.parametrize("head_dims", [(64, 64), (192, 128)], ids=str)
def test_fake_tensors_have_the_real_shapes_dtypes_and_strides(head_dims):
    x = inputs(40, 150, dtype=torch.float16, head_dim=head_dims[0], head_dim_v=head_dims[1])
    real = cute_dash.flash_attn_func(x.q, x.k, x.v, return_lse=True)
    real += cute_dash.attention_backward(x.dout, x.q, x.k, x.v, *real)
    with FakeTensorMode() as mode:
        dout, q, k, v = (mode.from_tensor(t) for t in (x.dout, x.q, x.k, x.v))
        fake = cute_dash.flash_attn_func(q, k, v, return_lse=True)
        fake += cute_dash.attention_backward(dout, q, k, v, *fake)
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize("dims", [(1, 2), (1, 3), (0, 3)], ids=["heads first", "last dim strided", "batch last"])
def test_strides_do_not_change_the_bits(dims):
    x = inputs()
    out, lse = cute_dash.flash_attn_func(x.q, x.k, x.v, return_lse=True)
    expected = cute_dash.attention_backward(x.dout, x.q, x.k, x.v, out, lse)

    def permuted(t):
        return t.transpose(*dims).contiguous().transpose(*dims)

    q, k, v, dout = (permuted(t) for t in x)
    assert torch.equal(cute_dash.flash_attn_func(q, k, v), out)
    for name, a, b in zip(
        NAMES, cute_dash.attention_backward(dout, q, k, v, permuted(out), lse), expected, strict=True
    ):
        assert a.is_contiguous()
        assert_bitwise_equal(a, b, name)


def test_expanded_dout_of_a_sum():
    x = inputs()
    q, k, v = leaves(x)
    cute_dash.flash_attn_func(q, k, v).sum().backward()
    ref = attention_backward_ref(torch.ones_like(x.dout), x.q, x.k, x.v, 1 / 8, False)
    assert relative_error(v.grad, ref[2]) < FP32_TOLERANCE


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (lambda x: x, True),
        (lambda x: x.transpose(1, 2), True),
        (lambda x: x[:, 1:, ::2], True),
        (lambda x: x.transpose(1, 3), False),
        (lambda x: x[:1].expand(2, -1, -1, -1), False),
        (lambda x: x[..., 4:36], False),  # 8 bytes off
        (lambda x: x[..., 8:40], True),  # 16 bytes off
        (lambda x: torch.zeros(2 * 8 * 4 * 65, dtype=x.dtype).view(2, 8, 4, 65)[..., :64], False),
        # contiguous to torch, which ignores the stride of an extent 1
        (lambda x: x.as_strided((1, 8, 4, 64), (3, 256, 64, 1)), False),
        (lambda x: x.as_strided((1, 8, 4, 64), (0, 256, 64, 1)), False),
        (lambda x: x.as_strided((1, 8, 4, 64), (2**40, 256, 64, 1)), False),
        (lambda x: x.as_strided((1, 8, 4, 64), (2**33, 256, 64, 1)), True),
    ],
    ids=[
        "contiguous",
        "heads first",
        "sliced",
        "last dim",
        "expanded",
        "8 bytes",
        "16 bytes",
        "rows of 65",
        "1 by 3",
        "1 by 0",
        "1 by 2**40",
        "1 by 2**33",
    ],
)
def test_aligned_copies_exactly_what_tma_cannot_read(make, kept):
    x = make(torch.randn(2, 8, 4, 64).bfloat16())
    y = ops.aligned(x)
    assert (y is x) == kept
    assert torch.equal(x, y)
    assert y.data_ptr() % 16 == 0
    assert y.stride(-1) == 1 and all(stride > 0 and stride % 8 == 0 for stride in y.stride()[:-1])


def schedule_that_ran(schedule, causal=False):
    x = inputs(8, 8)
    cute_dash.attention_backward(x.dout, x.q, x.k, x.v, x.q, torch.zeros(2, 2, 8), causal=causal, schedule=schedule)
    return interface.last_schedule()


def test_the_record_names_the_schedule_that_ran():
    record = schedule_that_ran("shortest_first")
    assert record == ("shortest_first", "shortest_first", SHORTEST_FIRST.version, SHORTEST_FIRST)


@MASKS
def test_the_record_holds_the_concrete_schedule_of_auto(causal):
    record = schedule_that_ran("auto", causal)
    assert record.requested == "auto"
    assert record.name not in ("auto", "auto_invariant", "unordered")
    assert record.schedule.name == record.name and record.schedule.version == record.version


def test_schedules_are_taken_as_module_and_attribute_or_as_objects():
    assert schedule_that_ran("schedules.shortest_first:SCHEDULE").schedule is SHORTEST_FIRST
    tuned = LongestFirst(heads_per_group=3)
    assert schedule_that_ran(tuned).schedule == tuned != schedule_that_ran("longest_first").schedule


RELOADED = """
from dataclasses import dataclass
from typing import ClassVar
from cute_dash.schedule import DenseSchedule

@dataclass(frozen=True)
class Reloaded(DenseSchedule):
    name: ClassVar[str] = "reloaded"
    version: ClassVar[int] = {}

SCHEDULE = Reloaded()
"""


def varlen_schedule_that_ran(schedule):
    x, cu_seqlens = inputs(8, 8), torch.tensor([0, 8], dtype=torch.int32)
    dout, q, k, v = x.dout[0], x.q[0], x.k[0], x.v[0]
    lengths = cu_seqlens, cu_seqlens, 8, 8
    cute_dash.attention_varlen_backward(dout, q, k, v, q, torch.zeros(2, 8), *lengths, schedule=schedule)
    return interface.last_schedule()


@pytest.mark.parametrize("get_record", [schedule_that_ran, varlen_schedule_that_ran])
@pytest.mark.parametrize("spec", ["reloaded:SCHEDULE", "reloaded"])
def test_a_string_names_what_its_module_has_now(spec, get_record, tmp_path, monkeypatch):
    """Where the file was edited and its module loaded again, in a notebook say."""
    path = tmp_path / "reloaded.py"
    if spec == "reloaded":
        monkeypatch.setattr(schedules, "__path__", [*schedules.__path__, str(tmp_path)])
    else:
        monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # both versions are of the same second and size
    path.write_text(RELOADED.format(1))
    name = "schedules.reloaded" if spec == "reloaded" else "reloaded"
    assert get_record(spec).version == 1
    first = get_record(spec).schedule
    assert get_record(spec).schedule is first
    path.write_text(RELOADED.format(2))
    importlib.reload(sys.modules[name])
    assert get_record(spec).version == 2
    del sys.modules[name]


def test_equal_objects_share_a_handle_and_unequal_ones_do_not():
    one, other = LongestFirst(heads_per_group=5), LongestFirst(heads_per_group=6)
    assert ops.spec_of(one) == ops.spec_of(replace(one))
    assert ops.spec_of(one) != ops.spec_of(other)
    assert ops.spec_of("baseline") == "baseline"


def make_local_schedule():
    """Of a class of its own, which has the name of every other that this makes."""

    @dataclass(frozen=True)
    class Local(LongestFirst):
        name: ClassVar[str] = "local"

    return Local()


def test_a_pending_backward_runs_the_schedule_of_its_forward():
    """Not one of another class of the same name that came in between."""
    first, second = make_local_schedule(), make_local_schedule()
    x = inputs(8, 8)
    q, k, v = leaves(x)
    outs = [cute_dash.flash_attn_func(q, k, v, schedule=schedule) for schedule in (first, second)]
    for schedule, out in zip((first, second), outs, strict=True):
        out.backward(x.dout)
        assert type(interface.last_schedule().schedule) is type(schedule)
    assert ops.spec_of(first) == ops.spec_of(replace(first)) != ops.spec_of(second)


@dataclass(frozen=True)
class LookAlike(LongestFirst):
    name: ClassVar[str] = "look_alike"
    inner: object = None


def test_fields_that_only_look_equal_make_another_handle():
    first, second = LookAlike(inner=make_local_schedule()), LookAlike(inner=make_local_schedule())
    assert repr(first) == repr(second)
    assert ops.spec_of(first) != ops.spec_of(second)


@dataclass(frozen=True)
class Redefined(LongestFirst):
    name: ClassVar[str] = "redefined"


def test_a_class_that_is_defined_anew_leaves_the_handles_of_the_old_one(monkeypatch):
    """As in a cell of a notebook that is run again."""
    plain = f"{__name__}.Redefined@[('heads_per_group', 0)]"
    old = Redefined()
    assert ops.spec_of(old) == plain
    anew = dataclass(frozen=True)(type("Redefined", (LongestFirst,), {"__module__": __name__, "name": "redefined"}))
    monkeypatch.setattr(sys.modules[__name__], "Redefined", anew)
    handle = ops.spec_of(anew())
    assert handle.startswith(f"{plain}#")
    assert [schedule_that_ran(spec).schedule for spec in (plain, handle)] == [old, anew()]
    assert [ops.spec_of(schedule) for schedule in (old, replace(old), anew())] == [plain, plain, handle]


def test_handles_of_classes_found_by_name_are_the_same_in_every_process():
    assert ops.spec_of(LongestFirst(5)) == "schedules.longest_first.LongestFirst@[('heads_per_group', 5)]"


def test_a_schedule_object_without_a_hash_is_named():
    @dataclass(frozen=True)
    class Listed(LongestFirst):
        order: list = field(default_factory=list)

    with pytest.raises(ValueError, match="Listed.* is not hashable"):
        schedule_that_ran(Listed())


def test_the_record_is_seen_from_other_threads():
    thread = threading.Thread(target=schedule_that_ran, args=("descending",))
    thread.start()
    thread.join()
    assert interface.last_schedule().name == "descending"


def test_autograd_runs_the_schedule_named_in_the_forward():
    x = inputs(8, 8)
    q, k, v = leaves(x)
    out = cute_dash.flash_attn_func(q, k, v, schedule="descending")
    schedule_that_ran("baseline")
    out.backward(x.dout)
    assert interface.last_schedule().name == "descending"


def have_cudnn(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)


@pytest.mark.parametrize("lengths", [(1, 200), (200, 1), (127, 127), (128, 128), (200, 300), (300, 200)], ids=str)
@MASKS
def test_library_forward_takes_the_backend_with_the_right_mask(monkeypatch, causal, lengths):
    """Which library runs, where cuDNN would take everything; the libraries themselves need a GPU."""
    x = inputs(*lengths, dtype=torch.bfloat16)
    called = []

    def library(name):
        return lambda q, k, v, scale, causal: called.append(name) or emulator.forward(q, k, v, scale, causal)

    have_cudnn(monkeypatch)
    monkeypatch.setattr(forward, "_cudnn_forward", library("cudnn"))
    monkeypatch.setattr(forward, "_flash_forward", library("flash"))
    forward.forward(x.q, x.k, x.v, 0.1, causal)
    unequal, short = lengths[0] != lengths[1], min(lengths) < 128
    assert called == ["flash" if short or (causal and unequal) else "cudnn"]


@pytest.mark.parametrize("switch", ["sdpa_kernel", "deterministic"])
def test_torchs_switches_do_not_change_the_library(monkeypatch, switch):
    """Another library would be other bits."""
    have_cudnn(monkeypatch)
    q = torch.zeros(1, 256, 2, 64)
    if switch == "deterministic":
        torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.MATH) if switch == "sdpa_kernel" else contextlib.nullcontext():
            assert forward._cudnn_applies(q, q, q, False)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("head_dims", "version", "expected"),
    [
        ((128, 128), 90100, "cudnn"),
        ((136, 136), 91500, "flash"),
        ((256, 256), 91500, "flash"),
        ((192, 192), 91500, "flash"),
        ((192, 128), 91100, "cudnn"),
        ((192, 128), 91002, "flash"),
    ],
    ids=str,
)
def test_library_forward_by_head_dim(monkeypatch, head_dims, version, expected):
    have_cudnn(monkeypatch)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    called = []
    for name in ("cudnn", "flash"):
        monkeypatch.setattr(forward, f"_{name}_forward", lambda q, k, v, *_, name=name: (called.append(name) or v, v))
    q, v = (torch.zeros(1, 256, 2, head_dim) for head_dim in head_dims)
    forward.forward(q, q, v, 0.1, False)
    assert called == [expected]


def flash_sees(seqlen_q, seqlen_k, causal, window_left, window_right):
    """Which pairs FlashAttention-2 takes for visible, as its flash_api.cpp and mask.h read the arguments."""
    if causal:
        window_right = 0
    window_left, window_right = (-1 if side >= seqlen_k else side for side in (window_left, window_right))
    if window_left < 0 <= window_right:
        window_left = seqlen_k
    elif window_right < 0 <= window_left:
        window_right = seqlen_k
    in_line = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    keys = np.arange(seqlen_k)[None, :]
    if window_left < 0:
        return np.ones((seqlen_q, seqlen_k), bool)
    return (keys >= in_line - window_left) & (keys <= in_line + window_right)


def test_flash_runs_windows_in_parts_that_it_reads_as_the_contract_does():
    several = 0
    for seqlen_q, seqlen_k, left, right in itertools.product(range(1, 12), range(1, 9), range(-1, 12), range(-1, 12)):
        causal, window = normalize_mask(False, (left, right), seqlen_q, seqlen_k)
        if window is None:
            continue
        in_line = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
        keys = np.arange(seqlen_k)[None, :]
        expected = (keys >= in_line - window.left) & (keys <= in_line + window.right)
        parts = forward._split_queries(seqlen_q, seqlen_k, window)
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == seqlen_q and all(part.start < part.stop for part in parts)
        for start, stop, *mask in parts:
            assert (flash_sees(stop - start, seqlen_k, *mask) == expected[start:stop]).all(), (
                seqlen_q,
                seqlen_k,
                window,
            )
        several += len(parts) > 1
        assert len(parts) == 1 or seqlen_q > seqlen_k
    assert several > 100


@pytest.mark.parametrize("window_size", [(20, 5), (10, -1), (10, 60), (-1, 30), (0, 0)], ids=str)
@LENGTHS
def test_library_forward_of_a_window(monkeypatch, lengths, window_size):
    """Flash only, whatever cuDNN says; its parts put together, blind queries repaired."""
    x = inputs(*lengths)

    def flash(q, k, v, scale, causal, window_size):
        visible = torch.from_numpy(flash_sees(q.shape[1], k.shape[1], causal, *window_size))
        scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * scale
        scores = scores.masked_fill(~visible, -math.inf)
        lse = scores.logsumexp(-1)
        out = torch.einsum("bhmn,bnhd->bmhd", scores.softmax(-1).nan_to_num(7.0), v)
        return out, lse.masked_fill(lse == -math.inf, math.inf)

    have_cudnn(monkeypatch)
    monkeypatch.setattr(forward, "_cudnn_forward", None)
    monkeypatch.setattr(forward, "_flash_forward", flash)
    out, lse = forward.forward(x.q, x.k, x.v, 0.1, False, window_size)
    ref_out, ref_lse = emulator.forward(x.q, x.k, x.v, 0.1, False, window_size)
    torch.testing.assert_close(out, ref_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, ref_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("junk", [math.nan, math.inf], ids=str)
def test_library_forward_repairs_queries_without_keys(monkeypatch, junk):
    x = inputs(150, 40)
    expected = emulator.forward(x.q, x.k, x.v, 0.1, True)

    def flash(q, k, v, scale, causal):
        out, lse = (t.clone() for t in expected)
        out[:, :110], lse[:, :, :110] = junk, junk
        return out, lse

    monkeypatch.setattr(forward, "_flash_forward", flash)
    for actual, wanted in zip(forward.forward(x.q, x.k, x.v, 0.1, True), expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("seqlen_k", [5, 7])
@pytest.mark.parametrize(("batch", "num_heads"), [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_sequences_of_one_length_go_to_flash_attention_one_behind_the_other(batch, num_heads, seqlen_k, monkeypatch):
    q, k = torch.zeros(batch, 5, num_heads, 64), torch.zeros(batch, seqlen_k, num_heads, 64)
    lse = torch.arange(batch * num_heads * 5.0).view(batch, num_heads, 5)
    starts = []

    def run(q, k, v, cum_seq_q, cum_seq_k, **options):
        starts.extend((cum_seq_q.tolist(), cum_seq_k.tolist()))
        return q, lse.transpose(0, 1).reshape(num_heads, batch * 5)

    monkeypatch.setattr(forward, "_run_flash", run)
    out, batch_first = forward._flash_forward(q, k, k, 0.1, False)
    assert starts == [[5 * i for i in range(batch + 1)], [seqlen_k * i for i in range(batch + 1)]]
    assert out.shape == q.shape and torch.equal(batch_first, lse) and batch_first.stride() == lse.stride()


@MASKS
@pytest.mark.parametrize("seqlen_q", [40, 1])
@pytest.mark.parametrize("num_heads_kv", [4, 2])
@pytest.mark.parametrize("run", [forward._cudnn_forward, forward._flash_forward], ids=["cudnn", "flash"])
@pytest.mark.parametrize("head_dims", [(64, 64), (256, 256), (192, 128)], ids=str)
def test_library_calls_fit_torchs_schemas_and_the_ops_layout(run, head_dims, num_heads_kv, seqlen_q, causal):
    with FakeTensorMode():
        q = torch.empty(2, seqlen_q, 4, head_dims[0], dtype=torch.bfloat16, device="cuda")
        k, v = (torch.empty(2, 150, num_heads_kv, d, dtype=torch.bfloat16, device="cuda") for d in head_dims)
        out, lse = run(q, k, v, 0.1, causal)
        assert run is forward._cudnn_forward or run(q, k, v, 0.1, False, (10, -1))[0].shape == out.shape
    assert out.shape == (2, seqlen_q, 4, head_dims[1]) and out.dtype == torch.bfloat16 and out.is_contiguous()
    assert lse.shape == (2, 4, seqlen_q) and lse.dtype == torch.float32 and lse.is_contiguous()
