"""Automatic parallelization planner and compiler for JAX."""

import importlib.metadata

from .api import Compiled, Parallelized, Traced, parallelize
from .errors import (
    ClusterError,
    CompilerError,
    DeviceError,
    MemoryLimitError,
    PinError,
    PlanError,
    PlanFileError,
    ShardingError,
    StateError,
)
from .plan import Plan

__version__ = importlib.metadata.version("autoplan")

__all__ = [
    "ClusterError",
    "Compiled",
    "CompilerError",
    "DeviceError",
    "MemoryLimitError",
    "Parallelized",
    "PinError",
    "Plan",
    "PlanError",
    "PlanFileError",
    "ShardingError",
    "StateError",
    "Traced",
    "__version__",
    "parallelize",
]
