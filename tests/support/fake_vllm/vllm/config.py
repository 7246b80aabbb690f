"""The part of vllm.config that the adapter uses."""

import types
from typing import Any

from vllm import bind


def PoolerConfig(**fields: Any) -> types.SimpleNamespace:
    return bind("PoolerConfig", **fields)
