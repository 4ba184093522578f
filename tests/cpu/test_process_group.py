"""The processes of the distributed tests: a rank that fails, dies or hangs costs little, and the next test runs."""

import os
import time

import pytest
import torch.distributed as dist

from tests import process_group
from tests.process_group import ProcessGroup


def add_ranks():
    ranks = [None, None]
    dist.all_gather_object(ranks, dist.get_rank())
    return sum(ranks)


def fail_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("no luck")
    return add_ranks()


def die_on_rank_1():
    if dist.get_rank() == 1:
        os._exit(1)
    return 7


def hang():
    time.sleep(600)


def raise_everywhere():
    raise ValueError("no luck")


@pytest.fixture(scope="module")
def group():
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch is built without gloo")
    with ProcessGroup(2, "gloo", timeout_seconds=20) as group:
        yield group


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fail_on_rank_1, r"(?s)rank 0: has not answered in time; killed\nrank 1: .*no luck"),
        (die_on_rank_1, "rank 1: its process has died"),
        (raise_everywhere, r"(?s)rank 0: .*no luck.*rank 1: .*no luck"),
    ],
    ids=["one raises", "one dies", "all raise"],
)
def test_a_failure_is_named_and_the_next_function_runs(function, message, group, monkeypatch):
    monkeypatch.setattr(process_group, "GRACE_SECONDS", 1)
    assert group.run(add_ranks) == [1, 1]
    with pytest.raises(RuntimeError, match=message):
        group.run(function)
    assert group.run(add_ranks) == [1, 1]


def test_a_hang_ends_at_the_timeout(group, monkeypatch):
    group.run(add_ranks)
    monkeypatch.setattr(group, "timeout_seconds", 1)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0: has not answered in time; killed\nrank 1: has not"):
        group.run(hang)
    assert time.monotonic() - start < 10
