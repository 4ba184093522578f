"""What things are called. Host only, imports nothing of this package."""

import sys


def name_type(value: object) -> str:
    """The name of a value's type; numpy's, some of which are called like Python's own, with the package.

    By a comparison, which torch.compile can trace on the way to an error's message.
    """
    kind = type(value)
    return f"numpy.{kind.__name__}" if kind.__module__ == "numpy" else kind.__name__


def is_found_by_name(cls: type) -> bool:
    """Whether the module and the qualified name of a class lead to it, as they do in another process."""
    found: object = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is cls
