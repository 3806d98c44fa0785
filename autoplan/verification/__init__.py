"""Verification: a plan's program compiled ahead of time, and compared with the plan.

`ahead` compiles, `hlo` reads the compiled program, `traffic` and `flops` count what it does, `replay` times its
schedule, and `result` sets all that against the plan.
"""

from .result import Unplanned, Verification, verify
from .traffic import CompiledCollective

__all__ = ["CompiledCollective", "Unplanned", "Verification", "verify"]
