"""TracedInt: a stand-in for the DSL's traced 32-bit int that needs neither cutlass nor a GPU.

Host only, imports nothing. It refuses everything that a value inside the kernel cannot do, so a schedule that runs on
it can be traced: no truth value (`if`, `and`, `or`, `min`, `max`), no use as a loop bound or an index, every result
within 32 bits, and no `%` of a negative value, which truncates on the device and floors in Python.
"""

import operator
from collections.abc import Callable

_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


class TracedBool:
    """A traced condition: combines with `&`, `|` and `~`, selects, and has no truth value."""

    def __init__(self, value: bool) -> None:
        self.value = value

    def select(self, if_true: object, if_false: object) -> "TracedInt":
        """The device's `select`: both sides are evaluated and become 32-bit ints."""
        return TracedInt(_value(if_true) if self.value else _value(if_false))

    def __bool__(self) -> bool:
        raise TypeError("a traced condition has no truth value: use cute_dash.ints.where, minimum or maximum")

    def __and__(self, other: "TracedBool | bool") -> "TracedBool":
        return TracedBool(self.value & bool(_value(other)))

    def __or__(self, other: "TracedBool | bool") -> "TracedBool":
        return TracedBool(self.value | bool(_value(other)))

    def __invert__(self) -> "TracedBool":
        return TracedBool(not self.value)

    __rand__ = __and__
    __ror__ = __or__


def _value(x: object) -> int:
    """The Python int (or bool) behind a traced or plain value."""
    if isinstance(x, TracedInt | TracedBool):
        return x.value
    if isinstance(x, int):
        return x
    raise TypeError(f"{x!r} of type {type(x).__name__} cannot be traced; allowed: ints and traced ints")


def _arithmetic(function: Callable[[int, int], int]) -> "Callable[[TracedInt, object], TracedInt]":
    return lambda self, other: TracedInt(function(self.value, _value(other)))


def _reflected(function: Callable[[int, int], int]) -> "Callable[[TracedInt, object], TracedInt]":
    return lambda self, other: TracedInt(function(_value(other), self.value))


def _comparison(function: Callable[[int, int], bool]) -> "Callable[[TracedInt, object], TracedBool]":
    return lambda self, other: TracedBool(function(self.value, _value(other)))


def _remainder(a: int, b: int) -> int:
    if a < 0 or b <= 0:
        raise ValueError(f"{a} % {b}: `%` truncates on the device and floors in Python; use cute_dash.ints.wrap")
    return a % b


class TracedInt:
    """A 32-bit int with the arithmetic of a traced value and no truth value.

    Attributes:
        value: the Python int, for the test that looks at a result.
    """

    def __init__(self, value: int) -> None:
        if not _INT32_MIN <= value <= _INT32_MAX:
            raise OverflowError(f"{value} does not fit 32 bits: the kernel's ints would wrap around")
        self.value = value

    def __repr__(self) -> str:
        return f"TracedInt({self.value})"

    def __bool__(self) -> bool:
        raise TypeError("a traced int has no truth value: use cute_dash.ints.where, minimum or maximum")

    def __index__(self) -> int:
        raise TypeError("a traced int is not known on the host: it cannot be an index, a range bound or an int()")

    def __neg__(self) -> "TracedInt":
        return TracedInt(-self.value)

    __hash__ = None  # type: ignore[assignment]
    __add__, __radd__ = _arithmetic(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _arithmetic(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _arithmetic(operator.mul), _reflected(operator.mul)
    __floordiv__, __rfloordiv__ = _arithmetic(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _arithmetic(_remainder), _reflected(_remainder)
    __and__, __rand__ = _arithmetic(operator.and_), _reflected(operator.and_)
    __rshift__, __lshift__ = _arithmetic(operator.rshift), _arithmetic(operator.lshift)
    __eq__ = _comparison(operator.eq)  # type: ignore[assignment]
    __ne__ = _comparison(operator.ne)  # type: ignore[assignment]
    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)
