"""Sequences of different lengths on CPU tensors: gradients, isolation, what is refused, numbering of tiles."""

import contextlib
import math
import random
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from cute_dash import (
    attention_varlen_backward,
    emulator,
    flash_attn_varlen_func,
    forward,
    interface,
    launch,
    ops,
    registry,
    validation,
)
from cute_dash.config import get_config
from cute_dash.ints import where
from cute_dash.kernels.workspace import WorkspaceLayout, get_first_tile, get_num_tiles
from cute_dash.problem import ProblemShape, Window, normalize_mask
from cute_dash.schedule import DenseSchedule, SelectingSchedule, SelectorRow, needs_one_cta
from cute_dash.testing import (
    AttentionInputs,
    assert_bitwise_equal,
    attention_backward_ref,
    attention_forward_ref,
    random_inputs,
    relative_error,
)
from schedules.longest_first import LongestFirst
from schedules.shift import Shift
from schedules.shortest_first import ShortestFirst

FP32_TOLERANCE = 2e-6
SCALE = 1 / 8
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
# queries and keys of each sequence: equal and not, one token, none on either side or both, at the ends too
LENGTHS = [(0, 0), (150, 150), (1, 200), (0, 40), (129, 1), (40, 0), (200, 130), (0, 0), (30, 260), (70, 0)]


@dataclass(frozen=True)
class Packed:
    """Inputs of sequences one behind the other, with `behind` more tokens; cu_seqlens and the longest lengths."""

    inputs: AttentionInputs
    cu_seqlens: tuple[torch.Tensor, torch.Tensor]
    max_seqlens: tuple[int, int]

    @property
    def qkv(self):
        return self.inputs.q, self.inputs.k, self.inputs.v

    @property
    def lengths(self):
        return *self.cu_seqlens, *self.max_seqlens

    def slices(self):
        """Queries and keys of each sequence."""
        starts_q, starts_k = (cu.tolist() for cu in self.cu_seqlens)
        return [
            (slice(*q), slice(*k))
            for q, k in zip(
                zip(starts_q, starts_q[1:], strict=False), zip(starts_k, starts_k[1:], strict=False), strict=True
            )
        ]


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def pack(lengths=LENGTHS, num_heads=2, num_heads_kv=None, *, behind=(0, 0), dtype=torch.float32, seed=0, head_dim=64):
    """A sequence's tokens depend on its place in LENGTHS alone."""
    heads = {"q": num_heads, "k": num_heads_kv or num_heads, "v": num_heads_kv or num_heads, "dout": num_heads}

    def normal(name, length, number):
        generator = torch.Generator().manual_seed(seed + 100 * number + "qkv".find(name))
        return torch.randn(length, heads[name], head_dim, generator=generator).to(dtype)

    def tokens(name):
        side = name in "kv"
        parts = [normal(name, pair[side], LENGTHS.index(pair)) for pair in lengths]
        return torch.cat([*parts, torch.full((behind[side], heads[name], head_dim), math.nan, dtype=dtype)])

    inputs = AttentionInputs(*(tokens(name) for name in ("q", "k", "v", "dout")))
    sides = list(zip(*lengths, strict=True))
    return Packed(inputs, tuple(cumulative(side) for side in sides), tuple(max(side) for side in sides))


def backward(packed, causal, schedule="auto", **options):
    out, lse = flash_attn_varlen_func(*packed.qkv, *packed.lengths, SCALE, causal, return_lse=True, **options)
    return attention_varlen_backward(
        packed.inputs.dout, *packed.qkv, out, lse, *packed.lengths, SCALE, causal, schedule=schedule, **options
    )


@MASKS
@pytest.mark.parametrize(("num_heads_kv", "head_dim"), [(4, 64), (2, 64), (1, 64), (2, 40), (2, 96), (2, 256)])
def test_every_sequence_has_the_gradients_of_attention(num_heads_kv, head_dim, causal):
    x = pack(num_heads=4, num_heads_kv=num_heads_kv, head_dim=head_dim)
    q, k, v = (t.clone().requires_grad_() for t in x.qkv)
    out, lse = flash_attn_varlen_func(q, k, v, *x.lengths, causal=causal, return_lse=True)
    out.backward(x.inputs.dout)
    assert out.shape == q.shape and lse.shape == (4, len(q))
    for rows, keys in x.slices():
        if keys.start == keys.stop:
            assert (out[rows] == 0).all() and (lse[:, rows] == -math.inf).all() and (q.grad[rows] == 0).all()
            continue
        if rows.start == rows.stop:
            assert (k.grad[keys] == 0).all() and (v.grad[keys] == 0).all()
            continue
        one = [x.inputs.q[None, rows], x.inputs.k[None, keys], x.inputs.v[None, keys]]
        ref_out, ref_lse = attention_forward_ref(*one, head_dim**-0.5, causal)
        assert relative_error(out[None, rows], ref_out) < FP32_TOLERANCE
        torch.testing.assert_close(lse[None, :, rows].double(), ref_lse, rtol=1e-5, atol=1e-5)
        refs = attention_backward_ref(x.inputs.dout[None, rows], *one, head_dim**-0.5, causal)
        scale = max(ref.norm().item() for ref in refs)  # with a single key dq and dk are exactly 0
        for grad, ref in zip((q.grad[rows], k.grad[keys], v.grad[keys]), refs, strict=True):
            assert (grad[None].double() - ref).norm().item() < FP32_TOLERANCE * scale


@MASKS
@pytest.mark.parametrize("name", sorted(validation.TESTED_SCHEDULES - {"shift", "symmetric_shift"}))
def test_a_sequences_bits_depend_on_it_alone(name, causal):
    order = [8, 1, 4, 3, 6]
    x, y = pack(num_heads=4, num_heads_kv=2), pack([LENGTHS[i] for i in order], 4, 2, behind=(50, 90))
    whole, other = backward(x, causal, name), backward(y, causal, name)
    for (rows, keys), number in zip(y.slices(), order, strict=True):
        rows_there, keys_there = x.slices()[number]
        pairs = zip(other, whole, (rows, keys, keys), (rows_there, keys_there, keys_there), strict=True)
        for grad, grad_there, here, there in pairs:
            assert_bitwise_equal(grad[here], grad_there[there], f"sequence {number}")
    for grad, last in zip(other, (y.slices()[-1][0], *2 * [y.slices()[-1][1]]), strict=True):
        assert len(grad) > last.stop and (grad[last.stop :] == 0).all()


@pytest.mark.parametrize(("head_dim", "causal", "longest"), [(128, True, 1100), (128, False, 4200), (64, True, 1100)])
def test_a_batch_invariant_selector_keeps_a_sequences_bits_beside_a_longer_one(head_dim, causal, longest):
    tokens = [x[0] for x in random_inputs(1, 600 + longest, 600 + longest, 1, head_dim, dtype=torch.bfloat16)]
    both = Packed(AttentionInputs(*tokens), (cumulative([600, longest]),) * 2, (longest, longest))
    alone = Packed(AttentionInputs(*(x[:600] for x in tokens)), (cumulative([600]),) * 2, (600, 600))
    packed, own = (backward(x, causal, "auto_invariant") for x in (both, alone))
    for name, grad, other in zip(("dq", "dk", "dv"), own, packed, strict=True):
        assert_bitwise_equal(grad, other[:600], name)


@MASKS
def test_a_sequence_alone_is_a_batch_of_one(causal):
    x = pack([(200, 130)], dtype=torch.bfloat16)
    q, k, v, dout = (t[None] for t in x.inputs)
    out, lse = emulator.forward(q, k, v, SCALE, causal)
    grads = backward(x, causal, "longest_first")
    config = get_config(64, causal)
    expected = emulator.backward(dout, q, k, v, out, lse, SCALE, causal, "longest_first", config=config)
    for name, a, b in zip(("dq", "dk", "dv"), grads, expected, strict=True):
        assert_bitwise_equal(a, b[0], name)


def test_tokens_behind_the_last_sequence():
    x = pack([(150, 150)], behind=(3, 5))
    out, lse = flash_attn_varlen_func(*x.qkv, *x.lengths, return_lse=True)
    assert (out[150:] == 0).all() and (lse[:, 150:] == -math.inf).all() and torch.isfinite(out).all()


@pytest.mark.parametrize("lengths", [[(0, 0)], [(0, 40)], [(40, 0), (0, 40)]], ids=str)
def test_no_pair_of_a_query_and_a_key(lengths):
    for grad in backward(pack(lengths), True):
        assert (grad == 0).all()


def test_max_seqlen_as_a_tensor():
    x = pack()
    expected = flash_attn_varlen_func(*x.qkv, *x.lengths)
    lengths = (torch.tensor(length) for length in x.max_seqlens)
    assert torch.equal(flash_attn_varlen_func(*x.qkv, *x.cu_seqlens, *lengths), expected)


@pytest.mark.parametrize("much", [2**31, 10**30, torch.tensor(2**62)], ids=str)
def test_max_seqlen_may_be_beyond_every_number_of_tokens(much):
    x = pack(LENGTHS[:3], num_heads=2)
    expected = flash_attn_varlen_func(*x.qkv, *x.cu_seqlens, *x.max_seqlens)
    assert torch.equal(flash_attn_varlen_func(*x.qkv, *x.cu_seqlens, much, much), expected)


def test_max_seqlen_of_numpy():
    x = pack()
    expected = flash_attn_varlen_func(*x.qkv, *x.lengths)
    assert torch.equal(flash_attn_varlen_func(*x.qkv, *x.cu_seqlens, *map(np.int64, x.max_seqlens)), expected)


def test_opcheck():
    x = pack(LENGTHS[1:6], dtype=torch.bfloat16)
    leaves = [t.clone().requires_grad_() for t in x.qkv]
    torch.library.opcheck(
        torch.ops.cute_dash.attention_varlen_forward.default, (*leaves, *x.lengths, 0.1, True, -1, -1, "baseline")
    )
    out, lse = flash_attn_varlen_func(*x.qkv, *x.lengths, 0.1, True, return_lse=True)
    arguments = (x.inputs.dout, *x.qkv, out, lse, *x.lengths, None, True, 40, -1, "baseline")
    torch.library.opcheck(torch.ops.cute_dash.attention_varlen_backward.default, arguments)


def test_torch_compile_keeps_the_bits():
    x = pack(LENGTHS[1:6], dtype=torch.bfloat16)
    eager, compiled = ([t.clone().requires_grad_() for t in x.qkv] for _ in range(2))

    def attention(q, k, v, cu_q, cu_k):
        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, *x.max_seqlens)

    attention(*eager, *x.cu_seqlens).backward(x.inputs.dout)
    torch.compile(attention, fullgraph=True, backend="aot_eager")(*compiled, *x.cu_seqlens).backward(x.inputs.dout)
    for a, b in zip(compiled, eager, strict=True):
        assert_bitwise_equal(a.grad, b.grad, "grad")


# Schedules


@pytest.mark.parametrize("name", ["auto", "auto_invariant"])
@MASKS
@pytest.mark.parametrize("longest", [1, 1000, 100_000])
def test_selectors_choose_what_needs_one_cta(name, causal, longest):
    shape = ProblemShape(1, 4, longest, longest, 64, 128, causal)
    schedule = registry.load(name).select_varlen(shape)
    assert needs_one_cta(schedule) and schedule.can_implement(shape)
    assert schedule.batch_invariant or name == "auto"


@pytest.mark.parametrize("window", [None, Window(100, 0)], ids=str)
@MASKS
@pytest.mark.parametrize("tile_m", [64, 128])
def test_a_batch_invariant_selector_chooses_by_mask_and_tile_alone(tile_m, causal, window):
    causal = causal and window is None
    shapes = [ProblemShape(1, 4, n, n, tile_m, 128, causal, window) for n in (200, 600, 1100, 5000, 1 << 20)]
    assert {registry.load("auto_invariant").select_varlen(shape) for shape in shapes} == {ShortestFirst()}


def test_rows_for_a_length_are_not_for_batch_invariant_selectors_of_sequences_of_different_lengths():
    @dataclass(frozen=True)
    class Selects(SelectingSchedule):
        name: ClassVar[str] = "selects"
        version: ClassVar[int] = 1
        batch_invariant: ClassVar[bool] = False
        table: ClassVar[tuple[SelectorRow, ...]] = (
            SelectorRow("full", 8, ShortestFirst()),
            SelectorRow("full", None, LongestFirst()),
            SelectorRow("causal", 8, ShortestFirst()),
        )

    @dataclass(frozen=True)
    class Invariant(Selects):
        batch_invariant: ClassVar[bool] = True

    short = ProblemShape(1, 4, 600, 600, 64, 128, False)
    assert (Selects().select_varlen(short), Invariant().select_varlen(short)) == (ShortestFirst(), LongestFirst())
    with pytest.raises(ValueError, match="no row of 'selects''s table fits sequences of different lengths"):
        Invariant().select_varlen(replace(short, causal=True))


@pytest.mark.parametrize("name", sorted(validation.TESTED_SCHEDULES))
def test_needs_one_cta_says_so_of_those_that_do_for_every_shape(name):
    schedule = registry.load(name)
    residents = set()
    for causal in (False, True):
        for lengths in ((1, 1), (512, 512), (4096, 4096), (300, 9000), (9000, 300)):
            shape = ProblemShape(1, 4, *lengths, 64, 128, causal)
            if schedule.can_implement(shape):
                residents.add(schedule.min_resident_ctas(shape))
    assert needs_one_cta(schedule) == (residents == {1})


@pytest.mark.parametrize("schedule", ["shift", Shift(window=1)], ids=str)
def test_schedules_that_may_need_several_ctas_are_refused(schedule):
    with pytest.raises(
        ValueError, match="schedule='shift' may need several resident CTAs.*allowed with cu_seqlens: 'auto'"
    ):
        backward(pack(), False, schedule)


@dataclass(frozen=True)
class WaitsWhenLong(DenseSchedule):
    """Fine for two KV tiles; with more the first claimed waits for the next."""

    name: ClassVar[str] = "waits_when_long"

    def get_lock_value(self, m_block, tile, shape):
        count = shape.get_n_block_max(m_block)
        return where(count > 2, count - 1 - tile.n_block, tile.n_block)


def test_a_schedule_of_ones_own_is_proven_for_each_pair_of_lengths():
    @dataclass(frozen=True)
    class Fine(DenseSchedule):
        name: ClassVar[str] = "fine"

    assert backward(pack(), True, Fine()) is not None
    assert interface.last_schedule().schedule == Fine()
    backward(pack(LENGTHS[1:4]), False, WaitsWhenLong())
    with pytest.raises(ValueError, match="deadlock"):
        backward(pack(), False, WaitsWhenLong())


# What is refused


def bad(**changes):
    x = pack([(150, 150), (40, 0)], num_heads=4)
    good = dict(zip("qkv", x.qkv, strict=True))
    good |= dict(cu_seqlens_q=x.cu_seqlens[0], cu_seqlens_k=x.cu_seqlens[1], max_seqlen_q=150, max_seqlen_k=150)
    return good | changes


BAD = {
    "q 4-D": (dict(q=torch.zeros(1, 9, 4, 64)), ValueError, r"q has shape .* allowed: 3-D \(total tokens"),
    "v longer": (dict(v=torch.zeros(151, 4, 64)), ValueError, r"v has shape \(151, 4, 64\); allowed: \(150, 4, 64\)"),
    "heads": (dict(k=torch.zeros(150, 3, 64)), ValueError, "k has 3 heads and q has 4; allowed: a divisor of 4"),
    "cu no tensor": (dict(cu_seqlens_q=[0, 1]), TypeError, "cu_seqlens_q is a list; allowed: a torch.Tensor"),
    "cu missing": (dict(cu_seqlens_k=None), TypeError, "cu_seqlens_k is a NoneType; allowed: a torch.Tensor"),
    "cu int64": (dict(cu_seqlens_q=torch.tensor([0, 1, 2])), TypeError, "cu_seqlens_q has dtype torch.int64; allowed"),
    "cu elsewhere": (  # one fake tensor makes torch call the fake implementation
        dict(cu_seqlens_q=torch.zeros(3, dtype=torch.int32, device="meta")),
        ValueError,
        r"cu_seqlens_q is on meta; allowed: the device of q \(cpu\)",
    ),
    "cu 2-D": (dict(cu_seqlens_k=torch.zeros(1, 3, dtype=torch.int32)), ValueError, "cu_seqlens_k has shape .* 1-D"),
    "no sequence": (dict(cu_seqlens_k=cumulative([])), ValueError, "cu_seqlens_k has shape .* one more than"),
    "cu differ": (dict(cu_seqlens_k=cumulative([150])), ValueError, r"cu_seqlens_k has shape \(2,\); allowed: \(3,\)"),
    "cu descends": (dict(cu_seqlens_q=cumulative([150, -1])), ValueError, "cu_seqlens_q is .* not descending"),
    "cu too long": (dict(cu_seqlens_q=cumulative([150, 41])), ValueError, "cu_seqlens_q is .* to at most 190 tokens"),
    "cu from 1": (dict(cu_seqlens_q=cumulative([150, 40]) + 1), ValueError, "cu_seqlens_q is .* allowed: from 0"),
    "max short": (
        dict(max_seqlen_q=149),
        ValueError,
        r"max_seqlen_q=149; allowed: at least the longest sequence \(150\)",
    ),
    "max negative": (dict(max_seqlen_k=-1), ValueError, "max_seqlen_k=-1; allowed: at least 0"),
    "max float": (dict(max_seqlen_k=150.0), TypeError, "max_seqlen_k=150.0 is a float"),
    "max very negative": (dict(max_seqlen_k=-(10**30)), ValueError, r"max_seqlen_k=-10{30}; allowed: at least 0"),
    "max bool of numpy": (dict(max_seqlen_k=np.True_), TypeError, "max_seqlen_k=.* is a numpy.bool_?; allowed: an int"),
    "max float tensor": (
        dict(max_seqlen_k=torch.tensor(150.0)),
        TypeError,
        r"max_seqlen_k is a tensor of shape \(\), torch.float32; allowed: an int, or a 0-d tensor of an integer dtype",
    ),
    "max on meta": (
        dict(max_seqlen_k=torch.tensor(150, device="meta")),
        ValueError,
        "max_seqlen_k is on meta; allowed: an int, or a 0-d tensor on cpu or cuda",
    ),
    "max 1-D": (dict(max_seqlen_k=torch.tensor([150])), TypeError, r"max_seqlen_k is a tensor of shape \(1,\)"),
    "softcap": (dict(softcap=1.0), ValueError, "softcap=1.0"),
    "window": (dict(window_size=(-2, 0)), ValueError, "window_size=.-2, 0."),
}


@pytest.mark.parametrize(("changes", "error", "message"), BAD.values(), ids=BAD.keys())
def test_refused(changes, error, message):
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(**bad(**changes))
    arguments = bad(**changes)
    q = arguments["q"]
    with pytest.raises(error, match=message):
        attention_varlen_backward(dout=q, out=q, lse=torch.zeros(4, len(q)), **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(lse=torch.zeros(190, 4)), r"lse has shape \(190, 4\); allowed: \(4, 190\)"),
        (dict(dout=torch.zeros(150, 4, 64)), r"dout has shape .* allowed: \(190, 4, 64\)"),
    ],
    ids=["lse", "dout"],
)
def test_backward_refuses(changes, message):
    arguments = bad()
    own = dict(dout=arguments["q"], out=arguments["q"], lse=torch.zeros(4, 190)) | changes
    with pytest.raises(ValueError, match=message):
        attention_varlen_backward(**own, **arguments)


# Without a device: the libraries' forward, the launch, the numbering of tiles


# Windows

# narrow and wide, open on one side, beyond some of the sequences and beyond all of them
WINDOWS = [(20, 10), (0, 0), (140, 70), (-1, 30), (30, -1), (5, 199), (1000, 15), (259, 199)]


@pytest.mark.parametrize("window_size", WINDOWS, ids=str)
@MASKS
def test_windows(causal, window_size):
    """Each sequence has its own window, which may leave KV tiles no query and queries no key."""
    x = pack(num_heads=4, num_heads_kv=2, behind=(20, 150))
    q, k, v = (t.clone().requires_grad_() for t in x.qkv)
    out, lse = flash_attn_varlen_func(q, k, v, *x.lengths, SCALE, causal, window_size, return_lse=True)
    out.backward(x.inputs.dout)
    for rows, keys in x.slices():
        if rows.start == rows.stop or keys.start == keys.stop:
            assert all((grad == 0).all() for grad in (q.grad[rows], k.grad[keys], v.grad[keys]))
            continue
        one = [x.inputs.q[None, rows], x.inputs.k[None, keys], x.inputs.v[None, keys]]
        ref_out, ref_lse = attention_forward_ref(*one, SCALE, causal, window_size)
        assert relative_error(out[None, rows], ref_out) < FP32_TOLERANCE
        torch.testing.assert_close(lse[None, :, rows].double(), ref_lse, rtol=1e-5, atol=1e-5)
        refs = attention_backward_ref(x.inputs.dout[None, rows], *one, SCALE, causal, window_size)
        scale = max(ref.norm().item() for ref in refs)
        for grad, ref in zip((q.grad[rows], k.grad[keys], v.grad[keys]), refs, strict=True):
            assert (grad[None].double() - ref).norm().item() <= FP32_TOLERANCE * scale
    for grad, last in zip((q.grad, k.grad, v.grad), (x.slices()[-1][0], *2 * [x.slices()[-1][1]]), strict=True):
        assert len(grad) > last.stop and (grad[last.stop :] == 0).all()


def test_a_window_beyond_all_lengths_is_none():
    x = pack(dtype=torch.bfloat16)
    for window_size, causal in (((259, 199), False), ((259, 0), True), ((10**6, 0), True)):
        for grad, expected in zip(
            backward(x, causal, window_size=window_size), backward(x, causal and window_size[1] == 0), strict=True
        ):
            assert_bitwise_equal(grad, expected, str(window_size))
        assert interface.last_schedule().schedule == registry.load("auto").select_varlen(
            ProblemShape(1, 2, 200, 260, 128, 128, causal)
        )


def test_a_wide_window_hides_nothing_of_a_short_sequence():
    """Its gradients have the bits that they have beside a longer sequence whose keys the window hides."""
    window = (70, 70)
    x, y = pack([(129, 1), (200, 130)]), pack([(129, 1)])
    whole = backward(x, False, "descending", window_size=window)
    for grad, expected, end in zip(
        whole, backward(y, False, "descending", window_size=window), (129, 1, 1), strict=True
    ):
        assert_bitwise_equal(grad[:end], expected, "grad")


def test_arguments_that_look_alike_are_checked_once_but_their_values_always(monkeypatch):
    monkeypatch.setattr(ops, "_checked_varlen", {})
    checks = []
    check = validation.check_cu_seqlens
    monkeypatch.setattr(validation, "check_cu_seqlens", lambda *options: checks.append(check(*options)))
    arguments = bad()
    for _ in range(3):
        flash_attn_varlen_func(**arguments)
    flash_attn_varlen_func(**arguments | dict(max_seqlen_q=160))
    flash_attn_varlen_func(**arguments | dict(window_size=(9, 9)))
    assert len(checks) == 3
    with pytest.raises(ValueError, match="cu_seqlens_q is .* not descending"):
        flash_attn_varlen_func(**arguments | dict(cu_seqlens_q=cumulative([150, -1])))
    with pytest.raises(ValueError, match="max_seqlen_q=149"):
        flash_attn_varlen_func(**arguments | dict(max_seqlen_q=149))


@pytest.mark.parametrize("window_size", WINDOWS, ids=str)
def test_library_reads_windows_as_the_contract_does(monkeypatch, window_size):
    """FlashAttention-2 takes a side of max_k or more for no limit, and then for max_k where the other side has one."""
    x = pack([(129, 1), (150, 150), (40, 0), (200, 130)])  # more queries than keys
    causal, window = normalize_mask(False, window_size, *x.max_seqlens)

    def library(
        q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, *, is_causal, window_size_left, window_size_right, **options
    ):
        left, right = (-1 if side is None or side >= max_k else side for side in (window_size_left, window_size_right))
        right = 0 if is_causal else right
        left, right = max_k if left < 0 <= right else left, max_k if right < 0 <= left else right
        return emulator.forward_varlen(q, k, v, cum_seq_q, cum_seq_k, options["scale"], False, (left, right))

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", library)
    actual = forward.forward_varlen(*x.qkv, x.cu_seqlens, x.max_seqlens, 0.1, causal, window)
    expected = emulator.forward_varlen(*x.qkv, *x.cu_seqlens, 0.1, False, window_size)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@MASKS
@pytest.mark.parametrize("num_heads_kv", [4, 2])
@pytest.mark.parametrize("longest", [40, 1])
def test_library_call_fits_torchs_schema_and_the_ops_layout(longest, num_heads_kv, causal):
    q = torch.empty(100, 4, 64, dtype=torch.bfloat16, device="meta")
    kv = torch.empty(70, num_heads_kv, 64, dtype=torch.bfloat16, device="meta")
    cu = torch.empty(4, dtype=torch.int32, device="meta")
    out, lse = forward.forward_varlen(q, kv, kv, (cu, cu), (longest, 60), 0.1, causal)
    assert out.shape == (100, 4, 64) and out.dtype == torch.bfloat16 and out.is_contiguous()
    assert lse.shape == (4, 100) and lse.dtype == torch.float32 and lse.is_contiguous()


@MASKS
@pytest.mark.parametrize("padded", [False, True], ids=["packed LSE", "padded LSE"])
def test_library_forward_repairs_queries_without_keys(monkeypatch, padded, causal):
    x = pack(LENGTHS, behind=(20, 10), dtype=torch.bfloat16)
    expected = emulator.forward_varlen(*x.qkv, *x.cu_seqlens, 0.1, causal)

    def library(q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, **options):
        out, lse = (t.clone() for t in expected)
        blind = lse[0] == -math.inf
        out[blind], lse[:, blind] = math.nan, math.inf
        if padded:
            whole = torch.full((len(cum_seq_q) - 1, 2, max_q), math.nan)
            for b, (rows, _) in enumerate(x.slices()):
                whole[b, :, : rows.stop - rows.start] = lse[:, rows]
            lse = whole
        return out, lse

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", library)
    actual = forward.forward_varlen(*x.qkv, x.cu_seqlens, x.max_seqlens, 0.1, causal)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_launch_arguments(monkeypatch):
    launched = []
    monkeypatch.setattr(launch, "get_backward", lambda key: lambda *arguments: launched.append((key, arguments)))
    monkeypatch.setattr(launch, "num_sms", lambda device_index: 10)
    monkeypatch.setattr(launch, "on_device", lambda device: contextlib.nullcontext())
    launch._plan.cache_clear()
    x = pack(num_heads=4, num_heads_kv=2, dtype=torch.bfloat16)
    schedule, config = registry.load("hybrid"), get_config(64, True)
    q, k, v, dout = x.inputs
    grads = launch.backward_varlen(dout, q, k, v, q, torch.zeros(4, len(q)), *x.cu_seqlens, 0.5, True, schedule)
    launch._plan.cache_clear()
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
    ((key, arguments),) = launched
    assert (key.varlen, key.grouped, key.cooperative, key.config) == (True, True, False, config)
    assert all(t.shape[0] == 1 for t in arguments[:9])
    num_m_blocks = get_num_tiles(len(q), len(LENGTHS), config.tile_m)
    assert arguments[9].numel() == WorkspaceLayout(4, num_m_blocks, config).size
    assert arguments[12] is x.cu_seqlens[0] and arguments[13] is x.cu_seqlens[1]
    assert arguments[14:] == (None, 0.5, 0, 0, 10)
    tensors = dout, q, k, v, q, torch.zeros(4, len(q)), *x.cu_seqlens
    launch.backward_varlen(*tensors, 0.5, False, schedule, window=Window(70, 20))
    launch._plan.cache_clear()
    key, arguments = launched[1]
    assert key.varlen and key.config == get_config(64, False, local=True) and arguments[14:] == (None, 0.5, 70, 20, 10)


@pytest.mark.parametrize("tile", [64, 128])
def test_tiles_of_all_sequences_have_numbers_of_their_own(tile):
    rng = random.Random(tile)
    for _ in range(200):
        lengths = [rng.choice([0, 1, tile - 1, tile, tile + 1, rng.randrange(1000)]) for _ in range(rng.randint(1, 12))]
        behind = rng.choice([0, 1, 3 * tile])
        starts = [0, *cumulative(lengths).tolist()[1:], sum(lengths) + behind]
        first = [get_first_tile(start, b, tile) for b, start in enumerate(starts[:-1])]
        assert first == sorted(set(first))  # so that the last that is not beyond a tile is its sequence
        ends = [*first[1:], get_num_tiles(starts[-1], len(lengths), tile)]
        for b, (low, high) in enumerate(zip(first, ends, strict=True)):
            num_tiles = -(-(starts[b + 1] - starts[b]) // tile)
            assert num_tiles <= high - low
            assert b == len(lengths) or high - low <= num_tiles + 1


def test_scratch_memory_grows_with_the_tokens_and_not_with_the_longest_sequence():
    """1,000 sequences of 1M tokens, one of them 100k, four heads of 64: besides dQaccum 34 MB."""
    config = get_config(64, True)
    layout = WorkspaceLayout(4, get_num_tiles(1_000_000, 1000, config.tile_m), config)
    assert 4 * (layout.size - layout.stats) < 64e6
    assert 4 * layout.stats < 1.2 * 4 * 1_000_000 * 4 * 64


def test_debug_and_cooperative_builds_are_refused():
    from cute_dash.compile import CompileKey

    key = CompileKey(get_config(64, True), registry.load("hybrid"), "bfloat16", varlen=True)
    assert key.describe() == "hybrid hd64 causal bfloat16 varlen"
    for flag in ("debug", "cooperative"):
        with pytest.raises(ValueError, match="varlen=True is not supported with"):
            replace(key, **{flag: True})
