"""Planning of steps, pure."""

from nobiru.scheduler.plan import CausalState, Part, Plan, Sequence
from nobiru.scheduler.scheduler import Scheduler

__all__ = ["CausalState", "Part", "Plan", "Scheduler", "Sequence"]
