"""Installs the DTensor hooks of :class:`vescale.compat.DTensorHooks` for our placements and the ops on them."""

from __future__ import annotations

from vescale.compat import begin_world, install_part
from vescale.ops._dispatch import keeps_operands, run_op, set_item
from vescale.ops._sizes import sizes_of
from vescale.placements import dtensor_hooks

__all__ = ["install"]


def install() -> None:
    """Teach DTensor our placements; does nothing when it has been done. Called by the first placement that is constructed,
    and by what begins with a new default group.

    Programs that use none of our placements are not affected: every hook then calls PyTorch's original.

    Raises UnsupportedTorchError when this torch lacks something that the hooks build on; nothing is changed then.
    """
    install_part("placements", dtensor_hooks(run_op, keeps_operands, set_item, sizes_of))
    begin_world()
