"""Puts the DTensor extensions in place: the hooks of :mod:`vescale.compat.install`, filled."""

from __future__ import annotations

from vescale.compat import DTensorHooks
from vescale.compat import install as install_hooks

__all__ = ["install"]

_DONE = False


def install() -> None:
    """Teach DTensor our placements; idempotent, called by the first placement that is constructed.

    Programs that use none of our placements are not affected: every wrapper then calls PyTorch's original.
    """
    global _DONE
    if _DONE:
        return
    from vescale.placements import _api, _checkpoint, _local, _ops
    from vescale.placements._custom import CUSTOM_TYPES, has_custom

    install_hooks(
        DTensorHooks(
            has_custom=has_custom,
            custom_types=CUSTOM_TYPES,
            redistribute=_api.redistribute,
            redistribute_local=_api.redistribute_local,
            local_gradient=_local.local_gradient,
            full_tensor=_api.full_tensor,
            from_local=_local.from_local,
            distribute_tensor=_api.distribute_tensor,
            checkpoint=_checkpoint.HOOKS,
            run_op=_ops.run_op,
            set_item=_ops.set_item,
        )
    )
    _DONE = True
