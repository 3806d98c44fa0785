"""Verification: a plan's program compiled ahead of time, and compared with the plan.

`ahead` compiles, `hlo` reads the compiled program, `traffic` and `flops` count what it does, `replay` times its
schedule, `result` sets all that against the plan, and `gate` plans until the compiled program fits.
"""

from .gate import plan_that_fits
from .result import Unplanned, Verification, verify
from .traffic import CompiledCollective

__all__ = ["CompiledCollective", "Unplanned", "Verification", "plan_that_fits", "verify"]
