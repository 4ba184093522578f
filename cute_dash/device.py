"""What the host needs to know of a CUDA device, asked once."""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch

_NOTHING_TO_DO = nullcontext()


@lru_cache
def num_sms(device_index: int) -> int:
    """Multiprocessors of a device: as many CTAs of the main kernel can be resident."""
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Makes a CUDA device the current one; nothing to do where it is, which spares 3 us."""
    if device.index == torch.cuda.current_device():
        return _NOTHING_TO_DO
    return torch.cuda.device(device)
