"""Debugging on many ranks: hang report, communication trace."""

from vescale.debug._hang_report import HangReport, hang_report, start_from_environment
from vescale.debug._trace import CommBudgetError, CommTrace, assert_comms, comm_trace
from vescale.plans import PlanMismatchError

__all__ = [
    "CommBudgetError",
    "CommTrace",
    "HangReport",
    "PlanMismatchError",
    "assert_comms",
    "comm_trace",
    "hang_report",
    "start_from_environment",
]
