"""What forward-mode differentiation asks of a tensor and its tangent."""

from __future__ import annotations

from typing import Any

from vescale.compat import HAS_SAME_STORAGE, is_tracing
from vescale.errors import TransformError
from vescale.ops._registry import handles


@handles(HAS_SAME_STORAGE)
def _has_same_storage_numel(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Asked of every tensor that gets a tangent, by ``make_dual`` and so by ``torch.func.jvp``; strides are compared
    separately. The answer is the same on every rank. Communication: none.

    Raises TransformError while ``torch.fx`` traces, as ``torch.func.linearize`` does: a trace records the ops on local
    tensors without the DTensors that they belong to, and takes these tensors for constants.
    """
    primal, tangent = args
    if is_tracing():
        raise TransformError(
            f"torch.func.linearize of a function of DTensors (here of shape {tuple(primal.shape)}): its trace takes their "
            "local tensors for constants, and the function that it returns would not depend on the tangent. Expected "
            "torch.func.jvp(function, primals, tangents), which computes the same for one tangent"
        )
    return bool(primal.numel() == tangent.numel())
