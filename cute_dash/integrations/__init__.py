"""cute-dash inside other libraries, one module for each. None of them is a dependency: a module needs its library."""

TRANSFORMERS_MIN_VERSION = "5.24"  # that of the `transformers` extra: the oldest that the tests have run with
