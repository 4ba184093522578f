"""Attention over several devices: context parallelism over a DeviceMesh, and DTensor sharding rules of the ops.

Importing this package needs nothing; its functions need torch and are loaded on first use. docs/distributed.md says how
to use them and what is promised.
"""

from importlib import import_module
from typing import Any

# public name -> module that defines it
_LAZY = {
    "context_parallel_attention": "cute_dash.distributed.context_parallel",
    "register_sharding_rules": "cute_dash.distributed.dtensor",
    "sequence_positions": "cute_dash.distributed.sequence",
    "shard_sequence": "cute_dash.distributed.sequence",
    "unshard_sequence": "cute_dash.distributed.sequence",
}

__all__ = [*_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
