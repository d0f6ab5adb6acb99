"""``fully_shard``: parameters, gradients and optimizer state live sharded in planned buffers; call-compatible with FSDP2."""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from vescale.compat import DataParallelMeshDims
from vescale.fsdp._api import fully_shard, give_methods
from vescale.fsdp._contract import Event, Residency, ResidencyError
from vescale.fsdp._extensions import is_extended
from vescale.fsdp._group import ParameterGroup
from vescale.fsdp._module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from vescale.fsdp._parameter import ManagedParameter, Slot, managed_by, registered_of
from vescale.fsdp._report import report
from vescale.fsdp._sharded_parameters import GroupMember
from vescale.fsdp._state import ModuleState, state_of
from vescale.fsdp._unfilled import check_filled, mark_unfilled, places_on_meta, unfilled, values_are_of_no_interest
from vescale.gradients import DataParallelAxes

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ResidencyError",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "report",
    "share_comm_ctx",
]
