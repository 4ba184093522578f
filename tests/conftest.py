"""Shared by all tests: hypothesis without wall-clock deadlines and with fixed examples, so that a run is repeatable."""

from hypothesis import settings

settings.register_profile("cute_dash", deadline=None, derandomize=True)
settings.load_profile("cute_dash")
