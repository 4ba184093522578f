"""Shared by all tests: repeatable hypothesis examples without deadlines, and one torch thread.

The CPU tests multiply small tiles: a second thread gains nothing there, and on a busy machine the threads' spinning
makes them ten times slower.
"""

import torch

try:
    from hypothesis import settings
except ModuleNotFoundError:  # on a GPU host, say: the tests in tests/gpu need none, the others fail by themselves
    pass
else:
    settings.register_profile("cute_dash", deadline=None, derandomize=True)
    settings.load_profile("cute_dash")

torch.set_num_threads(1)
