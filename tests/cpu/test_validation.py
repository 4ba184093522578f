"""Bad input raises before anything runs, naming the argument, its value and what is allowed."""

import itertools
import math
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

import cute_dash
import schedules
from cute_dash import emulator, ops, registry, validation
from cute_dash.check import ScheduleError, check_sample
from cute_dash.ints import maximum, where
from cute_dash.problem import ProblemShape, Window
from cute_dash.schedule import DenseSchedule, SelectorRow
from cute_dash.testing import random_inputs
from schedules.hybrid import Hybrid
from schedules.longest_first import LongestFirst
from schedules.shift import Shift
from schedules.shortest_first import ShortestFirst
from schedules.symmetric_shift import SymmetricShift


def tensors(dtype=torch.bfloat16, **changes):
    """Arguments of a good backward call of batch 2, 5 queries, 7 keys, 3 heads of 64, with some replaced."""
    x = random_inputs(2, 5, 7, num_heads=3, head_dim=64, dtype=dtype)
    good = dict(dout=x.dout, q=x.q, k=x.k, v=x.v, out=x.dout.clone(), lse=torch.zeros(2, 3, 5))
    return good | changes


def zeros(*shape, dtype=torch.bfloat16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


BAD_KIND = {  # never reaches an op
    "q no tensor": (dict(q=[1.0]), TypeError, "q is a list; allowed: a torch.Tensor"),
    "q sparse": (dict(q=zeros(2, 5, 3, 64).to_sparse()), TypeError, "q has layout torch.sparse_coo; allowed: a dense"),
    "k nested": (
        dict(k=torch.nested.nested_tensor([zeros(7, 3, 64), zeros(6, 3, 64)], layout=torch.jagged)),
        TypeError,
        "k has layout nested, torch.jagged; allowed: a dense tensor",
    ),
}
BAD_QKV = {
    "q 3-D": (dict(q=zeros(5, 3, 64)), ValueError, r"q has shape \(5, 3, 64\); allowed: 4-D \(batch, seqlen"),
    "v 5-D": (dict(v=zeros(1, 2, 7, 3, 64)), ValueError, r"v has shape \(1, 2, 7, 3, 64\); allowed: 4-D"),
    "q 0-D": (dict(q=torch.zeros(())), ValueError, r"q has shape \(\); allowed: 4-D"),
    "no heads": (dict(q=zeros(2, 5, 0, 64)), ValueError, "allowed: num_heads and head_dim at least 1"),
    "no KV heads": (dict(k=zeros(2, 7, 0, 64)), ValueError, "allowed: num_heads and head_dim at least 1"),
    "no batch in q": (dict(q=zeros(0, 5, 3, 64)), ValueError, r"k has shape \(2, 7, 3, 64\); allowed: \(0, 7, 3, 64\)"),
    "too many queries": (
        dict(q=zeros(1, 1, 1, 1).expand(2, 2**30, 3, 64)),
        ValueError,
        f"q has {2**30} tokens; allowed: at most {2**30 - 2**16}",
    ),
    "q fp64": (dict(q=zeros(2, 5, 3, 64, dtype=torch.float64)), TypeError, "q has dtype torch.float64; allowed on cpu"),
    "q int": (dict(q=zeros(2, 5, 3, 64, dtype=torch.int32)), TypeError, "q has dtype torch.int32; allowed on cpu"),
    "k fp16": (
        dict(k=zeros(2, 7, 3, 64, dtype=torch.float16)),
        TypeError,
        r"k has dtype torch.float16; allowed: the dtype of q \(torch.bfloat16\)",
    ),
    "v fp32": (dict(v=zeros(2, 7, 3, 64, dtype=torch.float32)), TypeError, "v has dtype torch.float32"),
    "head dim 36": (
        dict(q=zeros(2, 5, 3, 36), k=zeros(2, 7, 3, 36), v=zeros(2, 7, 3, 36)),
        ValueError,
        "q has head_dim 36; allowed: multiples of 8 from 32 to 256",
    ),
    "head dim 24": (
        dict(q=zeros(2, 5, 3, 24), k=zeros(2, 7, 3, 24), v=zeros(2, 7, 3, 24)),
        ValueError,
        "q has head_dim 24; allowed: multiples",
    ),
    "head dim 264": (
        dict(q=zeros(2, 5, 3, 264), k=zeros(2, 7, 3, 264), v=zeros(2, 7, 3, 264)),
        ValueError,
        "q has head_dim 264; allowed: multiples",
    ),
    "head dims differ": (dict(k=zeros(2, 7, 3, 128)), ValueError, r"k has shape .* allowed: \(2, 7, 3, 64\)"),
    "v head dim": (
        dict(v=zeros(2, 7, 3, 128)),
        ValueError,
        "v has head_dim 128 and q has 64; allowed: equal ones, or 128 with 192",
    ),
    "v head dim larger": (
        dict(q=zeros(2, 5, 3, 128), k=zeros(2, 7, 3, 128), v=zeros(2, 7, 3, 192)),
        ValueError,
        "v has head_dim 192 and q has 128; allowed: equal ones, or 128 with 192",
    ),
    "batches differ": (
        dict(k=zeros(1, 7, 3, 64)),
        ValueError,
        r"k has shape \(1, 7, 3, 64\); allowed: \(2, 7, 3, 64\)",
    ),
    "seqlens of k and v": (dict(v=zeros(2, 8, 3, 64)), ValueError, r"v has shape \(2, 8, 3, 64\); allowed: \(2, 7"),
    "KV heads": (
        dict(k=zeros(2, 7, 2, 64), v=zeros(2, 7, 2, 64)),
        ValueError,
        r"k has 2 heads and q has 3; allowed: a divisor of 3 \(1, 3\)",
    ),
    "more KV heads": (
        dict(k=zeros(2, 7, 6, 64), v=zeros(2, 7, 6, 64)),
        ValueError,
        r"k has 6 heads and q has 3; allowed: a divisor of 3",
    ),
    "heads of k and v": (dict(k=zeros(2, 7, 1, 64)), ValueError, r"v has shape .* allowed: \(2, 7, 1, 64\)"),
}
BAD_BACKWARD = {
    "dout shape": (dict(dout=zeros(2, 5, 3, 128)), ValueError, r"dout has shape .* allowed: \(2, 5, 3, 64\)"),
    "dout dtype": (dict(dout=zeros(2, 5, 3, 64, dtype=torch.float32)), TypeError, "dout has dtype torch.float32"),
    "out shape": (dict(out=zeros(2, 7, 3, 64)), ValueError, r"out has shape \(2, 7, 3, 64\); allowed: \(2, 5, 3, 64\)"),
    "out head dim": (
        dict(
            q=zeros(2, 5, 3, 192),
            k=zeros(2, 7, 3, 192),
            v=zeros(2, 7, 3, 128),
            dout=zeros(2, 5, 3, 128),
            out=zeros(2, 5, 3, 192),
        ),
        ValueError,
        r"out has shape \(2, 5, 3, 192\); allowed: \(2, 5, 3, 128\)",
    ),
    "lse dtype": (dict(lse=zeros(2, 3, 5)), TypeError, "lse has dtype torch.bfloat16; allowed: torch.float32"),
    "lse order": (dict(lse=torch.zeros(2, 5, 3)), ValueError, r"lse has shape \(2, 5, 3\); allowed: \(2, 3, 5\)"),
    "dlse dtype": (dict(dlse=zeros(2, 3, 5)), TypeError, "dlse has dtype torch.bfloat16; allowed: torch.float32"),
    "dlse order": (dict(dlse=torch.zeros(2, 5, 3)), ValueError, r"dlse has shape \(2, 5, 3\); allowed: \(2, 3, 5\)"),
    "dlse device": (dict(dlse=torch.zeros(2, 3, 5, device="meta")), ValueError, r"dlse is on meta; allowed: .*\(cpu\)"),
    "lse device": (dict(lse=torch.zeros(2, 3, 5, device="meta")), ValueError, r"lse is on meta; allowed: .*\(cpu\)"),
}
BAD_OPTIONS = {
    "scale nan": (dict(softmax_scale=math.nan), ValueError, "softmax_scale=nan; allowed: a finite number above 0"),
    "scale inf": (dict(softmax_scale=math.inf), ValueError, "softmax_scale=inf"),
    "scale beyond fp32": (dict(softmax_scale=1e39), ValueError, r"softmax_scale=1e\+39; allowed: .* \(in fp32\)"),
    "scale beyond float": (dict(softmax_scale=10**400), ValueError, "softmax_scale=1000"),
    "scale 0": (dict(softmax_scale=0), ValueError, "softmax_scale=0"),
    "scale 0 in fp32": (
        dict(softmax_scale=1e-50),
        ValueError,
        r"softmax_scale=1e-50; .* \(in fp32\), at least 1.18e-38",
    ),
    "scale subnormal": (
        dict(softmax_scale=1.1e-38),
        ValueError,
        "softmax_scale=1.1e-38; allowed: .* at least 1.18e-38",
    ),
    "scale fraction": (dict(softmax_scale=Fraction(1, 10**60)), ValueError, "softmax_scale=Fraction.*; allowed: a fin"),
    "scale bool of numpy": (dict(softmax_scale=np.True_), TypeError, "softmax_scale=.* is a numpy.bool_?; allowed"),
    "causal of numpy": (dict(causal=np.True_), TypeError, "causal=.* is a numpy.bool_?; allowed: True or False"),
    "window of numpy": (
        dict(window_size=(np.True_, 0)),
        TypeError,
        "window_size=.* holds a numpy.bool_?; allowed: ints",
    ),
    "softcap of numpy": (dict(softcap=np.False_), TypeError, "softcap=.* is a numpy.bool_?; allowed: the number 0"),
    "scale negative": (dict(softmax_scale=-0.1), ValueError, "softmax_scale=-0.1"),
    "scale text": (dict(softmax_scale="1"), TypeError, "softmax_scale='1' is a str"),
    "scale bool": (dict(softmax_scale=True), TypeError, "softmax_scale=True is a bool"),
    "causal None": (dict(causal=None), TypeError, "causal=None is a NoneType; allowed: True or False"),
    "window left": (
        dict(window_size=(-2, 0)),
        ValueError,
        r"window_size=\(-2, 0\); allowed: tokens, at least 0, or -1 for no limit",
    ),
    "window right": (dict(window_size=(None, -128)), ValueError, r"window_size=\(None, -128\); allowed: tokens"),
    "window float": (dict(window_size=(128.0, 0)), TypeError, r"window_size=\(128.0, 0\) holds a float; allowed: ints"),
    "window bool": (dict(window_size=(True, 0)), TypeError, r"window_size=\(True, 0\) holds a bool"),
    "window text": (dict(window_size=("8", 0)), TypeError, r"window_size=\('8', 0\) holds a str"),
    "window int": (dict(window_size=128), TypeError, r"window_size=128; allowed: a pair \(left, right\)"),
    "window of three": (dict(window_size=(1, 2, 3)), TypeError, r"window_size=\(1, 2, 3\); allowed: a pair"),
    "window of one": (dict(window_size=(1,)), TypeError, r"window_size=\(1,\); allowed: a pair"),
    "softcap": (dict(softcap=30.0), ValueError, "softcap=30.0: a softcap is not there yet; allowed: 0"),
    "schedule unknown": (dict(schedule="basline"), ValueError, "unknown schedule 'basline': did you mean 'baseline'"),
    "schedule module": (dict(schedule="no_such_module:X"), ValueError, "no_such_module"),
    "schedule number": (
        dict(schedule=3),
        TypeError,
        "schedule=3 is a int; allowed: a name, 'module:ATTR' or a Schedule",
    ),
    "schedule class": (dict(schedule=Shift), TypeError, "schedule is the class Shift, not an instance of it; allowed"),
    "schedule without a name": (
        dict(schedule=DenseSchedule()),
        TypeError,
        r"schedule=DenseSchedule\(.*\) is a DenseSchedule, which lacks name; allowed: a name, 'module:ATTR'",
    ),
    "schedule shape": (
        dict(schedule="shift", causal=True),
        ValueError,
        "schedule='shift' cannot implement ProblemShape",
    ),
    "schedule window": (
        dict(schedule="symmetric_shift", causal=True, window_size=(2, 0)),
        ValueError,
        r"cannot implement ProblemShape\(.*window=Window\(left=2, right=0\).*: it orders the causal mask only",
    ),
}


def parametrize(cases):
    return pytest.mark.parametrize(("changes", "error", "message"), cases.values(), ids=cases.keys())


@pytest.fixture
def no_work(monkeypatch):
    """Fails the test if the emulator is reached."""

    def reached(*args, **options):
        raise AssertionError("validation let a bad call through")

    monkeypatch.setattr(emulator, "forward", reached)
    monkeypatch.setattr(emulator, "backward", reached)


@parametrize(BAD_KIND | BAD_QKV | BAD_OPTIONS)
def test_forward_refuses(changes, error, message, no_work):
    arguments = tensors(**changes)
    for name in ("dout", "out", "lse"):
        del arguments[name]
    with pytest.raises(error, match=message):
        cute_dash.flash_attn_func(**arguments)


@pytest.mark.parametrize("return_lse", ["no", 1, None])
def test_return_lse_is_a_bool(return_lse):
    x = tensors()
    with pytest.raises(TypeError, match=r"return_lse=.*; allowed: True or False"):
        cute_dash.flash_attn_func(x["q"], x["k"], x["v"], return_lse=return_lse)


@parametrize(BAD_KIND | BAD_QKV | BAD_BACKWARD | BAD_OPTIONS)
def test_backward_refuses(changes, error, message, no_work):
    with pytest.raises(error, match=message):
        cute_dash.attention_backward(**tensors(**changes))


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse"])
def test_only_optional_tensors_may_be_none(name, no_work):
    with pytest.raises(TypeError, match=f"{name} is a NoneType; allowed: a torch.Tensor"):
        cute_dash.attention_backward(**tensors(**{name: None}))
    if name in "qkv":
        with pytest.raises(TypeError, match=f"{name} is a NoneType; allowed: a torch.Tensor"):
            cute_dash.flash_attn_func(**{x: tensors(**{name: None})[x] for x in "qkv"})


def test_optional_tensors_are_dense_too(no_work):
    x = tensors()
    for name in ("dout", "dlse"):
        arguments = x | {name: x["lse" if name == "dlse" else name].to_sparse()}
        with pytest.raises(TypeError, match=f"{name} has layout torch.sparse_coo; allowed: a dense tensor"):
            cute_dash.attention_backward(**arguments)
    with pytest.raises(TypeError, match="learnable_sink has layout torch.sparse_coo; allowed: a dense tensor"):
        cute_dash.flash_attn_func(x["q"], x["k"], x["v"], learnable_sink=torch.ones(3).to_sparse())


@parametrize(BAD_QKV | BAD_BACKWARD)
def test_raw_backward_op_refuses(changes, error, message, no_work):
    with pytest.raises(error, match=message):
        torch.ops.cute_dash.attention_backward(
            **tensors(**changes), softmax_scale=0.1, causal=False, window_left=-1, window_right=-1, schedule="auto"
        )


@pytest.mark.parametrize("window_size", [(-1, -1), (None, None), (-1, None), [-1, -1], None], ids=str)
def test_unlimited_windows_are_accepted(window_size):
    x = tensors()
    out = cute_dash.flash_attn_func(x["q"], x["k"], x["v"], window_size=window_size)
    assert torch.equal(out, cute_dash.flash_attn_func(x["q"], x["k"], x["v"]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_good_input_is_accepted_in_every_cpu_dtype(dtype):
    grads = cute_dash.attention_backward(**tensors(dtype))
    assert [grad.dtype for grad in grads] == 3 * [dtype]


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="q is on meta; allowed: cpu, or cuda on a Hopper GPU"):
        validation.check_device(torch.device("meta"))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], ids=str)
def test_gpus_other_than_hopper_are_refused(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ValueError, match=rf"cuda:1, of compute capability \({capability[0]}, .*allowed: \(9, 0\)"):
        validation.check_device(torch.device("cuda:1"))


def test_hopper_is_accepted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    validation.check_device(torch.device("cuda:1"))


def test_a_schedule_that_needs_more_ctas_than_sms_is_refused():
    shape = ProblemShape(1, 1, 4096, 4096, 128, 128, causal=False)  # 32 x 32 tiles: rings of 32 CTAs
    validation.check_residency(Shift(), shape, num_sms=32)
    with pytest.raises(ValueError, match="schedule='shift' needs 32 resident CTAs .* at most 31, one for each SM"):
        validation.check_residency(Shift(), shape, num_sms=31)


def test_residency_is_checked_against_the_sms_of_the_tensors_device(monkeypatch):
    class OnCuda:
        """What validation reads of a CUDA tensor."""

        device = torch.device("cuda:1")
        shape = (1, 512, 1, 64)

    monkeypatch.setattr(validation, "num_sms", {0: 132, 1: 2}.get)
    with pytest.raises(ValueError, match="needs 4 resident CTAs .* at most 2"):
        validation.resolve_schedule("shift", OnCuda(), OnCuda(), causal=False)
    assert validation.resolve_schedule("baseline", OnCuda(), OnCuda(), causal=False).name == "baseline"


def test_fp32_is_refused_on_cuda():
    class OnCuda:
        device = torch.device("cuda")
        dtype = torch.float32

    with pytest.raises(TypeError, match="q has dtype torch.float32; allowed on cuda: torch.bfloat16, torch.float16$"):
        validation._check_dtype("q", OnCuda())


def test_a_refused_call_leaves_the_record_alone():
    cute_dash.attention_backward(**tensors(), schedule="baseline")
    before = ops.last_schedule()
    with pytest.raises(ValueError, match="softcap"):
        cute_dash.attention_backward(**tensors(), schedule="descending", softcap=1.0)
    assert ops.last_schedule() is before


@dataclass(frozen=True)
class Waits(DenseSchedule):
    """Adds in descending order while tiles are claimed in ascending order: the first CTA waits for ever."""

    name: ClassVar[str] = "waits"

    def get_lock_value(self, m_block, tile, shape):
        return shape.get_n_block_max(m_block) - 1 - tile.n_block


@pytest.mark.parametrize("seqlen", [512, 4096, 65536])
def test_a_schedule_of_ones_own_is_proven_before_it_runs(seqlen):
    shape = ProblemShape(4, 16, seqlen, seqlen, 64, 128, causal=True)
    with pytest.raises(ValueError, match="deadlock"):
        validation._resolve(Waits(), shape)
    assert validation._resolve(DenseElsewhere(), shape) == DenseElsewhere()


def test_what_a_shipped_selector_selects_is_proven_too_if_it_is_not_shipped(monkeypatch):
    auto = registry.load("auto")
    monkeypatch.setattr(type(auto), "table", (SelectorRow("causal", None, Waits()),))
    with pytest.raises(ValueError, match="deadlock"):
        validation._resolve(auto, ProblemShape(4, 16, 512, 512, 64, 128, causal=True))


@dataclass(frozen=True)
class DenseElsewhere(DenseSchedule):
    name: ClassVar[str] = "dense_elsewhere"


def test_the_tested_schedules_are_those_that_the_package_ships():
    tested = validation.TESTED_SCHEDULES | validation.TESTED_SELECTORS
    assert set(registry.available()) >= tested
    assert {path.stem for path in Path(schedules.__file__).parent.glob("*.py")} >= tested
    for selector in map(registry.load, validation.TESTED_SELECTORS):
        assert {row.schedule.name for row in selector.table} <= validation.TESTED_SCHEDULES


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "streams"), [(1, 1, 5), (8192, 8192, 64), (100_000, 100_000, 2), (64, 1_000_000, 1)]
)
def test_the_part_that_is_proven_keeps_the_mask_and_fits(seqlen_q, seqlen_k, streams):
    shape = ProblemShape(1, streams, seqlen_q, seqlen_k, 64, 128, causal=True)
    part = validation._part_to_prove(shape)
    assert part.num_streams * part.num_m_blocks * part.num_n_blocks <= 5 * validation.MAX_PROVEN_STEPS
    assert 1 <= part.num_streams <= streams
    if max(seqlen_q, seqlen_k) <= 10_000:
        assert (part.seqlen_q, part.seqlen_k) == (seqlen_q, seqlen_k)
    if seqlen_q == seqlen_k:
        assert part.seqlen_q == part.seqlen_k


@pytest.mark.parametrize("seqlen", [512, 65536])
def test_a_schedule_of_ones_own_is_proven_for_windows(seqlen):
    shape = ProblemShape(4, 16, seqlen, seqlen, 64, 128, False, Window(200, 100))
    with pytest.raises(ValueError, match="deadlock"):
        validation._resolve(Waits(), shape)
    assert validation._resolve(DenseElsewhere(), shape) == DenseElsewhere()
    part = validation._part_to_prove(shape)
    assert part.window == (200, 100) and part.seqlen_q == part.seqlen_k <= seqlen


def test_the_part_of_an_unlimited_side_is_unlimited():
    shape = ProblemShape(1, 1, 100_000, 100_000, 64, 128, False, Window(99_999, 100))
    part = validation._part_to_prove(shape)
    assert part.seqlen_k < 100_000 and part.window == (part.seqlen_k - 1, 100)


def test_raw_ops_refuse_a_bad_window(no_work):
    x = tensors()
    for call in (
        lambda: torch.ops.cute_dash.attention_forward(x["q"], x["k"], x["v"], None, False, -2, 0, "auto"),
        lambda: torch.ops.cute_dash.attention_backward(*x.values(), None, False, 0, -3, "auto"),
    ):
        with pytest.raises(ValueError, match=r"window_size=\(.*\); allowed: tokens"):
            call()


def test_the_part_that_is_proven_keeps_the_group_or_some_of_it():
    def part_of(seqlen, num_heads, group_size):
        return validation._part_to_prove(
            ProblemShape(4, num_heads, seqlen, seqlen, 64, 128, causal=True, group_size=group_size)
        )

    small, long = part_of(4096, 8, 4), part_of(65536, 8, 16)
    assert (small.seqlen_q, small.group_size) == (4096, 4)
    assert (long.group_size, long.seqlen_q) == (2, long.seqlen_k)
    assert {(part.batch, part.num_heads) for part in (small, long)} == {(2, 2)}
    for part in (small, long):
        steps = part.num_streams * part.num_m_blocks * part.num_n_blocks * part.group_size
        assert steps <= 1.1 * validation.MAX_PROVEN_STEPS


@dataclass(frozen=True)
class Elsewhere(DenseSchedule):
    """What is wrong with the ones below is wrong only far from the first tiles."""

    name: ClassVar[str] = "elsewhere"

    def repeat(self, condition, m_block, tile, shape):
        """Lock values, two of them the same where `condition` holds."""
        value = tile.n_block - shape.get_n_block_min(m_block)
        return where(condition, maximum(value - 1, 0), value)

    def mirror(self, condition, step, tile, shape):
        """The loop order, descending where `condition` holds."""
        last = shape.get_m_block_max(tile.n_block) - 1
        return where(condition, last - step, shape.get_m_block_min(tile.n_block) + step)


class RepeatsInOtherSequences(Elsewhere):
    def get_lock_value(self, m_block, tile, shape):
        return self.repeat(tile.batch_idx > 0, m_block, tile, shape)


class RepeatsInLongSequences(Elsewhere):
    def get_lock_value(self, m_block, tile, shape):
        return self.repeat(shape.num_n_blocks > 200, m_block, tile, shape)


class RepeatsInManyStreams(Elsewhere):
    def get_lock_value(self, m_block, tile, shape):
        return self.repeat(shape.batch * shape.num_heads >= 64, m_block, tile, shape)


class RepeatsInTheLastHead(Elsewhere):
    def get_lock_value(self, m_block, tile, shape):
        return self.repeat(tile.head_idx == shape.num_heads - 1, m_block, tile, shape)


class RepeatsInTheLastTile(Elsewhere):
    """Of the last of many streams, in the last m_block."""

    def get_lock_value(self, m_block, tile, shape):
        last = tile.batch_idx * shape.num_heads + tile.head_idx == 127
        return self.repeat((m_block == shape.num_m_blocks - 1) & last, m_block, tile, shape)


class MirrorsOtherSequences(Elsewhere):
    def get_m_block(self, step, tile, shape):
        return self.mirror(tile.batch_idx > 0, step, tile, shape)


class MirrorsFarSequences(Elsewhere):
    def get_m_block(self, step, tile, shape):
        return self.mirror(tile.batch_idx > 5, step, tile, shape)


class VisitsTwiceInLongSequences(Elsewhere):
    def get_m_block(self, step, tile, shape):
        first = shape.get_m_block_min(tile.n_block)
        return first + where(tile.n_block > 200, step // 2, step)


class ClaimsTheLastTwice(Elsewhere):
    def get_work_tile(self, work_idx, shape):
        return super().get_work_tile(where(work_idx == 2047, 2046, work_idx), shape)


class ClaimsLongSequencesBackwards(Elsewhere):
    """And adds forwards."""

    def get_work_tile(self, work_idx, shape):
        tile = super().get_work_tile(work_idx, shape)
        backwards = shape.num_n_blocks - 1 - tile.n_block
        return tile._replace(n_block=where(shape.num_n_blocks > 200, backwards, tile.n_block))


class Overflows(Elsewhere):
    def get_m_block(self, step, tile, shape):
        return super().get_m_block(step, tile, shape) + tile.batch_idx * 2**29 // 2**40


CAUSAL_4K = ProblemShape(4, 32, 4096, 4096, 64, 128, causal=True)
CAUSAL_32K = ProblemShape(1, 8, 32768, 32768, 64, 128, causal=True)
FULL_2K = ProblemShape(8, 16, 2048, 2048, 64, 128, causal=False)
FAR_OFF = {
    RepeatsInOtherSequences: (CAUSAL_4K, "rule 1 .*get_lock_value gives 0, as to n_block=0"),
    RepeatsInLongSequences: (CAUSAL_32K, "rule 1 .*get_lock_value gives 0, as to n_block=0"),
    RepeatsInManyStreams: (CAUSAL_4K, "rule 1 .*get_lock_value gives 0, as to n_block=0"),
    RepeatsInTheLastHead: (CAUSAL_4K, "rule 1 .*get_lock_value gives 0, as to n_block=0"),
    RepeatsInTheLastTile: (CAUSAL_4K, "rule 1 .*head_idx=31, batch_idx=3.*m_block=63.*gives 0, as to n_block=0"),
    MirrorsOtherSequences: (FULL_2K, "rule 3 .*step 0: m_block is 31 in this batch and 0 alone"),
    MirrorsFarSequences: (FULL_2K, "rule 3 .*batch_idx=[67].*, step 0: m_block is 31 in this batch and 0 alone"),
    VisitsTwiceInLongSequences: (CAUSAL_32K, "rule 1 .*get_m_block gives .* at step 0 and at step 1"),
    ClaimsTheLastTwice: (FULL_2K, "rule 1 .*work_idx 2046 and work_idx 2047 both claim tile"),
    ClaimsLongSequencesBackwards: (CAUSAL_32K, "rule 2 .*deadlock with 1 resident CTAs: .* waits at m_block="),
    Overflows: (FULL_2K, "rule 4 .*does not fit 32 bits"),
}


@pytest.mark.parametrize("cls", FAR_OFF, ids=lambda cls: cls.__name__)
def test_what_is_wrong_far_from_the_first_tiles_is_found(cls):
    shape, message = FAR_OFF[cls]
    start = time.process_time()
    with pytest.raises(ScheduleError, match=message):
        validation.prove(cls(), shape)
    assert time.process_time() - start < 5  # on a busy machine


EVERY_MASK = (Elsewhere(), Hybrid(), ShortestFirst(), LongestFirst(3))


@pytest.mark.parametrize(
    ("shape", "schedule"),
    [
        *itertools.product([CAUSAL_4K, CAUSAL_32K], [*EVERY_MASK, SymmetricShift()]),
        *itertools.product([FULL_2K], [*EVERY_MASK, Shift()]),
    ],
    ids=str,
)
def test_right_schedules_of_large_problems_are_proved_within_seconds(shape, schedule):
    start = time.process_time()
    validation.prove(schedule, shape)
    assert time.process_time() - start < 5  # on a busy machine


@pytest.mark.parametrize("seqlen", [2**20, 2**24, 2**29])
def test_samples_of_the_longest_sequences_take_no_longer(seqlen):
    start = time.process_time()
    check_sample(Elsewhere(), ProblemShape(1, 16, seqlen, seqlen, 64, 128, causal=True))
    check_sample(Elsewhere(), ProblemShape(1, 16, seqlen, seqlen, 64, 128, causal=False, window=Window(4096, 0)))
    assert time.process_time() - start < 5


def test_the_part_has_two_sequences_and_two_heads_where_the_problem_has():
    for batch, num_heads, seqlen in itertools.product((1, 2, 9), (1, 2, 9), (2048, 8192, 131072)):
        shape = ProblemShape(batch, num_heads, seqlen, seqlen, 64, 128, causal=True, group_size=8)
        part = validation._part_to_prove(shape)
        assert (min(part.batch, 2), min(part.num_heads, 2)) == (min(batch, 2), min(num_heads, 2))
        assert part.batch <= batch and part.num_heads <= num_heads and part.seqlen_q == part.seqlen_k <= seqlen
        assert validation._count_tiles(part) <= 1.1 * validation.MAX_PROVEN_STEPS


class OrdersOneShape(DenseElsewhere):
    def can_implement(self, shape):
        return shape.num_heads == 32

    def get_lock_value(self, m_block, tile, shape):
        return where(tile.head_idx == 30, 0, super().get_lock_value(m_block, tile, shape))


def test_a_schedule_that_cannot_order_the_part_is_proved_for_the_whole_shape():
    shape = ProblemShape(1, 32, 4096, 4096, 64, 128, causal=False)
    assert validation._part_to_prove(shape).num_heads < 32
    with pytest.raises(ScheduleError, match="rule 1 .*head_idx=30"):
        validation.prove(OrdersOneShape(), shape)


@pytest.mark.parametrize("scale", [2.0**-126, 2**-126 + 1e-50, 3.4e38, Fraction(1, 8), np.float32(0.1), 1], ids=str)
def test_scales_that_are_normal_in_fp32_are_accepted(scale):
    validation.check_scale(scale)


@pytest.mark.parametrize("softcap", [None, "x", True])
def test_softcap_must_be_a_number(softcap):
    with pytest.raises(TypeError, match="softcap"):
        validation.check_softcap(softcap)


@pytest.mark.parametrize("zero", [0, 0.0, np.float32(0), np.int64(0), Fraction(0)], ids=repr)
def test_numbers_of_any_kind_are_numbers(zero):
    validation.check_softcap(zero)
    validation.check_scale(zero + 1)
