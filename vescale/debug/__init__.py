"""Debugging on many ranks: breakpoints, hang report, communication trace, ``verify``, ``monitor``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vescale.debug._breakpoint import breakpoint, on_exception
from vescale.debug._host_profile import dispatch_stats
from vescale.debug._locations import place_of_traceback, running_place
from vescale.debug._model_flops import flops_per_token
from vescale.debug._monitor import Monitor, StepRecord, monitor
from vescale.debug._prompt import newest_socket
from vescale.debug._trace import CommBudgetError, CommTrace, assert_comms, comm_trace
from vescale.debug._verify import Verification, verify
from vescale.debug._verify_job import Divergence
from vescale.debug._watchdog import hang_report, start_from_environment

if TYPE_CHECKING:
    from vescale.debug._host_profile import HostProfile, profile_host
    from vescale.estimation import compare as compare_estimate

__all__ = [
    "CommBudgetError",
    "CommTrace",
    "HostProfile",
    "Monitor",
    "StepRecord",
    "Verification",
    "assert_comms",
    "breakpoint",
    "comm_trace",
    "compare_estimate",
    "dispatch_stats",
    "flops_per_token",
    "hang_report",
    "monitor",
    "on_exception",
    "profile_host",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Estimates are imported when they are used: a run without them does not pay for them."""
    if name == "compare_estimate":
        from vescale.estimation import compare

        return compare
    if name in ("HostProfile", "profile_host"):
        from vescale.debug import _host_profile

        return getattr(_host_profile, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
