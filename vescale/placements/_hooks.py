"""The hooks of DTensor (:class:`vescale.compat.DTensorHooks`) for our placements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vescale.compat import DTensorHooks
from vescale.placements._custom_placement import CUSTOM_TYPES, has_custom
from vescale.placements._local_conversion import distribute_tensor, from_local, local_gradient
from vescale.placements._redistribute import full_tensor, normalize_placements, redistribute, redistribute_local


def dtensor_hooks(
    run_op: Callable[..., Any],
    keeps_operands: Callable[..., Any],
    set_item: Callable[..., None],
    has_user_rules: Callable[[Any], bool],
) -> DTensorHooks:
    """What runs instead of stock DTensor where one of our placements is involved; changes nothing by itself.

    ``run_op``, ``keeps_operands`` and ``set_item`` run ops on DTensors, tell which of them run on the local tensors as they
    are, and assign to items; ``has_user_rules`` tells whether any argument may decide; see
    :class:`vescale.compat.DTensorHooks`.
    """
    # Imported with the first placement instead of with the package: torch.distributed.checkpoint is slow to import.
    from vescale.placements._checkpoint import HOOKS

    return DTensorHooks(
        has_custom=has_custom,
        custom_types=CUSTOM_TYPES,
        redistribute=redistribute,
        redistribute_local=redistribute_local,
        local_gradient=local_gradient,
        full_tensor=full_tensor,
        from_local=from_local,
        distribute_tensor=distribute_tensor,
        checkpoint=HOOKS,
        run_op=run_op,
        keeps_operands=keeps_operands,
        set_item=set_item,
        has_user_rules=has_user_rules,
        normalize=normalize_placements,
    )
