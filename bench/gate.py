"""No number without proof: a candidate is timed only after its gradients and its bits were checked in the same run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from bench.reference import GRAD_NAMES, Grads, Yardstick
from cute_dash.testing import assert_bitwise_equal


@dataclass(frozen=True)
class Verdict:
    """Outcome of the gate.

    Attributes:
        reason: why the candidate is refused, None if it may be timed.
        max_rel_err: greatest relative error of dq, dk, dv against fp64; NaN where it could not be measured.
        bitwise_runs: runs whose bits equal the first run's, itself included.
    """

    reason: str | None
    max_rel_err: float
    bitwise_runs: int

    @property
    def passed(self) -> bool:
        return self.reason is None


Call: TypeAlias = Callable[[], Grads]


def check_candidate(prepare: Callable[[], Call], yardstick: Yardstick, deterministic: bool, num_runs: int) -> Verdict:
    """Runs a candidate `num_runs` times on the same inputs.

    Args:
        prepare: makes the backward call, which returns new dq, dk, dv; it may compile.
        yardstick: of the same inputs.
        deterministic: whether changed bits refuse the candidate; otherwise they are only counted.
        num_runs: at least 2.
    Raises:
        ValueError: fewer than 2 runs.
    """
    if num_runs < 2:
        raise ValueError(f"num_runs={num_runs} must be at least 2: one run has nothing to be compared with")
    try:
        return _check(prepare(), yardstick, deterministic, num_runs)
    except Exception as error:  # a peer may raise anything; it must not take the others' results with it
        text = " ".join(str(error).split())
        return Verdict(f"{type(error).__name__}: {text[:300]}", float("nan"), 0)


def _check(call: Call, yardstick: Yardstick, deterministic: bool, num_runs: int) -> Verdict:
    poison_free_memory(yardstick.flash)
    first = call()
    wrong = yardstick.find_error(first)
    if wrong is not None:
        return Verdict(wrong, float("nan"), 1)
    max_rel_err = max(yardstick.errors(first))
    changes = []
    for _ in range(num_runs - 1):
        poison_free_memory(yardstick.flash)
        changes.append(_find_changed_bits(first, call()))
    equal_runs = 1 + changes.count(None)
    if deterministic and equal_runs < num_runs:
        example = next(change for change in changes if change)
        return Verdict(
            f"bits changed in {num_runs - equal_runs} of {num_runs} runs: {example}", max_rel_err, equal_runs
        )
    return Verdict(None, max_rel_err, equal_runs)


def _find_changed_bits(first: Grads, again: Grads) -> str | None:
    """Where two runs differ, in words; None if they do not."""
    for name, a, b in zip(GRAD_NAMES, first, again, strict=True):
        try:
            assert_bitwise_equal(a, b, name)
        except AssertionError as error:
            return str(error)
    return None


def poison_free_memory(like: Grads) -> None:
    """Leaves NaN in the blocks that the allocator hands out next.

    Without it a run that forgets to write a part of its output finds the right values of the run before.

    Args:
        like: tensors of the outputs' sizes; one fp32 block of dq's extent, the accumulator's, is poisoned as well.
    """
    blocks = [torch.full_like(t, float("nan")) for t in like]
    blocks.append(torch.full_like(like[0], float("nan"), dtype=torch.float32))
    del blocks
