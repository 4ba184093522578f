"""What things are called in messages. Host only, imports nothing."""


def name_type(value: object) -> str:
    """The name of a value's type; numpy's, some of which are called like Python's own, with the package."""
    kind = type(value)
    return f"numpy.{kind.__name__}" if kind.__module__.partition(".")[0] == "numpy" else kind.__name__
