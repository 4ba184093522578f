"""Branch-free integer helpers that mean the same for Python ints (host) and traced ints (device).

A schedule is written once and executed twice: with Python ints when it is checked, drawn or emulated, and with traced
32-bit ints while the kernel is compiled. A traced value has no truth value, so `if`, `and`, `or`, `min` and `max` do
not work on it; these helpers do. Three rules keep both worlds equal:

* `//` floors in both, so it is safe; `%` truncates on the device (-5 % 3 == -2) and floors in Python, so never take
  `%` of a value that can be negative: use `wrap`.
* every intermediate value must fit 32 bits;
* a condition is a comparison, or some joined by `&` and `|`, never by `~`, which makes an int of a Python bool.
"""

from numbers import Number
from typing import Any, TypeVar

from cute_dash.traced_int import TracedInt

NO_COMPARISON = "the condition of cute_dash.ints.where"  # what the error of such a condition begins with
T = TypeVar("T")


def where(condition: Any, if_true: T, if_false: T) -> T:
    """`if_true` where `condition` holds, else `if_false`; both are evaluated.

    Args:
        condition: a comparison, or some joined by & and |: a Python bool, a traced bool, or any object with a
            `select(if_true, if_false)` method.
        if_true, if_false: ints of either kind.

    Raises:
        TypeError: the condition is a number, as x % 2 is, and as `~` of a Python bool is.
    """
    if isinstance(condition, bool):
        return if_true if condition else if_false
    if isinstance(condition, Number | TracedInt):
        raise TypeError(f"{NO_COMPARISON} is {condition!r}; allowed: a comparison, or some joined by & and |")
    if hasattr(condition, "select"):
        return condition.select(if_true, if_false)  # type: ignore[no-any-return]
    from cutlass import Int32, select_

    # wrapped, because the bare value that select_ returns would be true in every `if`
    return Int32(select_(condition, Int32(if_true), Int32(if_false)))  # type: ignore[return-value]


def minimum(a: int, b: int) -> int:
    """The smaller of two ints of either kind."""
    return where(a < b, a, b)


def maximum(a: int, b: int) -> int:
    """The larger of two ints of either kind."""
    return where(a > b, a, b)


def wrap(x: int, n: int) -> int:
    """`x` brought into [0, n), for x in [-n, 2n): one turn around a ring of n places, without a division."""
    return where(x < 0, x + n, where(x >= n, x - n, x))


def ceil_div(a: int, b: int) -> int:
    """The number of tiles of `b` elements that cover `a` elements; a >= 0, b > 0."""
    return (a + b - 1) // b
