"""What the host needs to know of a CUDA device, asked once."""

from functools import lru_cache

import torch


@lru_cache
def num_sms(device_index: int) -> int:
    """Multiprocessors of a device: as many CTAs of the main kernel can be resident."""
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)
