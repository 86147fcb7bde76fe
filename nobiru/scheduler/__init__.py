"""Planning of steps, pure."""

from nobiru.scheduler.plan import Plan, Sequence
from nobiru.scheduler.scheduler import Scheduler

__all__ = ["Plan", "Scheduler", "Sequence"]
