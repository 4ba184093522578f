"""Extras that tests need, and the reason for which they are skipped without."""

import pytest

from cute_dash.integrations import TRANSFORMERS_MIN_VERSION


def require_transformers():
    """The library; skips the test, or the module that is being collected, where it is not there or too old."""
    reason = "transformers, the extra of that name, is not installed"
    return pytest.importorskip("transformers", minversion=TRANSFORMERS_MIN_VERSION, reason=reason)
