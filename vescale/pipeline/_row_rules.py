"""For each op, how its result depends on rows of the batch: :func:`rule_of`.

A rule gets a call whose operands are ``fixed``, ``rows`` or ``count``, one of them at least with rows. It returns the state
of the result, or a list of those of several; None: unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vescale.ops import is_elementwise
from vescale.pipeline._row_states import UNKNOWN, Operand, RowCall, RowState

__all__ = ["FACTORIES", "KEEPS_ORDER", "LINEAR", "rule_of"]

Rule = Callable[[RowCall], "RowState | list[RowState] | None"]


def _names(text: str) -> list[str]:
    return text.split()


# Results have the elements of the operand, in the same order.
KEEPS_ORDER = frozenset(
    _names("view _unsafe_view reshape _reshape_alias clone contiguous alias detach unsqueeze squeeze")
)
FACTORIES = frozenset(_names("zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_ones")) | {
    "new_full", "new_empty", "rand_like", "randn_like", "new_empty_strided", "empty_strided", "scalar_tensor",
}  # fmt: skip
# Of a sum over rows, the sum of what these give for its terms.
LINEAR = frozenset(_names("neg _to_copy to expand select slice permute transpose t stack cat sum mean add sub rsub")) | {
    "add_", "sub_", "copy_", "mul", "mul_", "div", "div_",
}  # fmt: skip


def rule_of(func: Any) -> Rule | None:
    name = func._schema.name.split("::")[-1]
    found = _RULES.get(name)
    if found is None and (torch.Tag.pointwise in func.tags or is_elementwise(func) or name.rstrip("_") in _POINTWISE):
        return _pointwise
    return found


def _pointwise(call: RowCall) -> RowState:
    """Dims of operands are aligned at the end."""
    ndim = call.outs[0][0].ndim
    places = {(o.dim + ndim - o.big.ndim, o.outer) for o in call.cut}
    if len(places) > 1:
        return call.mixed("meets rows in different dims")
    if call.numbers_differ:
        return call.mixed("has the number of rows among its arguments")
    ((dim, outer),) = places
    only = call.cut[0] if call.name in _COPIES and len(call.cut) == 1 else None
    return call.rows(dim, outer, kind="rows" if only is None else only.kind)


def _dims(call: RowCall, operand: Operand, name: str = "dim") -> set[int]:
    """The dims that an op goes along."""
    given = call.big.get(name)
    if given is None or (isinstance(given, list | tuple) and not given):
        return set(range(operand.big.ndim))
    return {d % max(operand.big.ndim, 1) for d in (given if isinstance(given, list | tuple) else (given,))}


def _reduction(call: RowCall) -> RowState | list[RowState]:
    x = call.operands[0]
    dims = _dims(call, x)
    if x.dim in dims:
        if call.name in ("sum", "mean", "nansum"):
            return [RowState("sum") for _ in call.outs]
        return [call.mixed("goes along the rows") for _ in call.outs]
    keeps = bool(call.big.get("keepdim")) or call.outs[0][0].ndim == x.big.ndim
    dim = x.dim if keeps else x.dim - sum(d < x.dim for d in dims)
    return [call.rows(dim, x.outer, n) for n in range(len(call.outs))]


def _along(name: str) -> Rule:
    """Goes along a dim, and keeps the others."""

    def rule(call: RowCall) -> RowState | list[RowState]:
        places = {(o.dim, o.outer) for o in call.cut}
        first = call.operands[0]
        if len(places) > 1 or first.big.ndim != call.outs[0][0].ndim:
            return call.mixed("meets rows in different dims")
        ((dim, outer),) = places
        if dim in _dims(call, first, name):
            return [call.mixed("goes along the rows") for _ in call.outs]
        return [call.rows(dim, outer, n) for n in range(len(call.outs))]

    return rule


def _permute(call: RowCall) -> RowState:
    x = call.operands[0]
    order = list(range(x.big.ndim))
    if call.name == "permute":
        order = [d % x.big.ndim for d in call.big["dims"]]
    elif x.big.ndim > 1:
        a, b = (call.big["dim0"], call.big["dim1"]) if call.name.startswith("transpose") else (0, 1)
        order[a], order[b] = order[b], order[a]
    return call.rows(order.index(x.dim), x.outer)


def _select(call: RowCall) -> RowState:
    x = call.operands[0]
    dim = call.big["dim"] % x.big.ndim
    if dim == x.dim:
        return call.mixed("takes one row")
    return call.rows(x.dim - (dim < x.dim), x.outer)


def _slice(call: RowCall) -> RowState:
    x = call.operands[0]
    dim = call.big.get("dim", 0) % x.big.ndim
    if dim != x.dim:
        return call.rows(x.dim, x.outer, kind=x.kind)
    ranges = []
    for given, size in ((call.big, x.big.shape[dim]), (call.small, x.small.shape[dim])):
        ranges.append((*slice(given.get("start"), given.get("end"), given.get("step", 1)).indices(size), size))
    (start, end, step, size), (from_, to, _, rows) = ranges
    block, part = size // x.outer, rows // x.outer
    if (
        step == 1
        and start % block == 0
        and end % block == 0
        and (from_, to) == (start // block * part, end // block * part)
    ):
        return call.rows(x.dim, (end - start) // block) if end > start else UNKNOWN
    if x.outer == 1 and start == from_ and start < step and end == size and to == rows and rows % step == 0:
        return call.rows(x.dim)
    return call.mixed("takes some of the rows")


def _split(call: RowCall) -> list[RowState]:
    x = call.operands[0]
    dim = call.big.get("dim", 0) % x.big.ndim
    if call.name == "unbind":
        if dim == x.dim:
            return [call.mixed("takes rows apart") for _ in call.outs]
        return [call.rows(x.dim - (dim < x.dim), x.outer, n) for n in range(len(call.outs))]
    if dim != x.dim:
        return [call.rows(x.dim, x.outer, n) for n in range(len(call.outs))]
    block = x.big.shape[dim] // x.outer
    found = []
    for n, (big, _) in enumerate(call.outs):
        size = big.shape[dim]
        fits = size and size % block == 0
        found.append(call.rows(dim, size // block, n) if fits else call.mixed("takes some of the rows"))
    return found


def _cat(call: RowCall) -> RowState:
    dim = call.big.get("dim", 0) % call.outs[0][0].ndim
    stacks = call.name == "stack"
    places = {(o.dim + (stacks and dim <= o.dim), o.outer) for o in call.cut}
    if len(places) > 1:
        return call.mixed("meets rows in different dims")
    ((place, outer),) = places
    if stacks or place != dim:
        return call.rows(place, outer)
    sizes = {o.big.shape[dim] for o in call.operands}
    if len(call.cut) != len(call.operands) or len(sizes) > 1:
        return call.mixed("puts other rows behind those of the batch")
    return call.rows(dim, outer * len(call.operands))


def _repeat(call: RowCall) -> RowState:
    x, repeats = call.operands[0], call.big["repeats"]
    place = x.dim + len(repeats) - x.big.ndim
    return call.rows(place, x.outer * repeats[place])


def _matmul(call: RowCall) -> RowState | None:
    """``[.., m, k] @ [.., k, n]``, with a term to be added first or none."""
    *terms, a, b = call.operands
    ndim = call.outs[0][0].ndim
    places = {(o.dim + ndim - o.big.ndim, o.outer) for o in terms if o.is_cut}
    batched = ndim - 2 if call.name in ("bmm", "baddbmm") else 0
    summed = [
        o for o, dim in ((a, a.big.ndim - 1), (b, b.big.ndim - 2 if b.big.ndim > 1 else 0)) if o.is_cut and o.dim == dim
    ]
    if summed:
        both = a.is_cut and b.is_cut and len(summed) == 2 and a.outer == b.outer
        return RowState("sum") if both and not places else call.mixed("goes along the rows")
    if a.is_cut:
        places.add((a.dim, a.outer))
    if b.is_cut:
        places.add((b.dim if b.dim < batched else ndim - 1, b.outer))
    if len(places) != 1:
        return call.mixed("compares each row with each")
    ((dim, outer),) = places
    return call.rows(dim, outer)


def _leading(call: RowCall) -> list[RowState] | None:
    """Goes along the last dims of its first operand; others are parameters."""
    x = call.operands[0]
    if len(call.cut) != 1 or not x.is_cut:
        return None
    last = len(call.big.get("normalized_shape", ())) or (x.big.ndim - 1)
    if x.dim >= x.big.ndim - last:
        return [call.mixed("goes along the rows") for _ in call.outs]
    return [call.rows(x.dim, x.outer, n) if big.ndim > x.dim else UNKNOWN for n, (big, _) in enumerate(call.outs)]


def _pad(call: RowCall) -> RowState:
    x, pad = call.operands[0], call.big["pad"]
    place = 2 * (x.big.ndim - 1 - x.dim)
    return call.mixed("pads rows") if any(pad[place : place + 2]) else call.rows(x.dim, x.outer)


def _embedding(call: RowCall) -> RowState | None:
    weight, indices = call.operands[0], call.operands[1]
    if not indices.is_cut:
        return None
    return call.mixed("looks rows up") if weight.is_cut else call.rows(indices.dim, indices.outer)


def _index(call: RowCall) -> RowState | None:
    """Rows of one operand at indices; ``x[torch.arange(len(x)), last]`` takes of each row its own."""
    x, indices = call.operands[0], call.big["indices"]
    operands = {id(o.big): o for o in call.operands[1:]}
    given = [(n, operands.get(id(i))) for n, i in enumerate(indices) if i is not None]
    if any(o is None or (o.big.dtype in (torch.bool, torch.uint8)) for _, o in given):
        return None
    at = dict(given)
    cut = [o for _, o in given if o is not None and o.is_cut]
    consecutive = [n for n, _ in given] == list(range(given[0][0], given[0][0] + len(given)))
    first = given[0][0] if consecutive else 0
    width = max(o.big.ndim for _, o in given if o is not None)
    if x.is_cut and x.dim in at:
        own = at[x.dim]
        if own is None or own.kind != "count" or x.outer != 1:
            return call.mixed("takes some of the rows")
    if x.is_cut and x.dim not in at:
        if cut:
            return call.mixed("takes of each row what others choose")
        behind = sum(n < x.dim for n in at)
        return call.rows(x.dim - behind + (width if first < x.dim else 0), x.outer)
    places = {(o.dim + width - o.big.ndim, o.outer) for o in cut}
    if len(places) != 1 or (not x.is_cut and any(o.kind == "count" for o in cut)):
        return None if len(places) == 1 else call.mixed("meets rows in different dims")
    ((dim, outer),) = places
    return call.rows(first + dim, outer)


def _ctc_loss(call: RowCall) -> list[RowState] | None:
    """Of log probabilities ``[time, rows, classes]``."""
    x = call.operands[0]
    return [call.rows(0, x.outer), UNKNOWN] if x.dim == 1 and x.big.ndim == 3 else None


def _loss(call: RowCall) -> list[RowState]:
    x = call.operands[0]
    if call.big.get("reduction", 1):
        return [RowState("sum") for _ in call.outs]
    if call.name.startswith("nll"):
        dim = x.dim if x.dim == 0 else x.dim - 1
        return [call.rows(dim, x.outer) if n == 0 else UNKNOWN for n in range(len(call.outs))]
    return [_pointwise(call)]


_POINTWISE = frozenset(
    _names(
        "expand to _to_copy copy fill masked_fill native_dropout dropout bernoulli uniform normal exponential random "
        "zero where clamp clamp_min clamp_max addcmul addcdiv lerp gelu silu where nan_to_num bitwise_not"
    )
)
_COPIES = frozenset(_names("_to_copy to expand"))
_LOSSES = "nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy"
_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        _names(
            "sum mean nansum amax amin max min prod var std var_mean std_mean norm linalg_vector_norm logsumexp any all "
            "argmax argmin median nanmedian count_nonzero"
        ),
        _reduction,
    ),
    **dict.fromkeys(
        _names(
            "_softmax _log_softmax softmax log_softmax _safe_softmax cumsum cumprod logcumsumexp cummax cummin sort argsort "
            "topk kthvalue gather scatter scatter_ scatter_add scatter_add_ scatter_reduce index_select index_add "
            "index_add_ index_copy glu mode renorm"
        ),
        _along("dim"),
    ),
    **dict.fromkeys(_names("flip roll"), _along("dims")),
    **dict.fromkeys(_names("permute transpose t"), _permute),
    **dict.fromkeys(_names("split split_with_sizes unbind unsafe_split chunk"), _split),
    **dict.fromkeys(_names("cat stack"), _cat),
    **dict.fromkeys(_names("mm bmm addmm baddbmm matmul mv dot addmv"), _matmul),
    **dict.fromkeys(
        _names("native_layer_norm _fused_rms_norm native_group_norm convolution max_pool2d_with_indices"), _leading
    ),
    **dict.fromkeys(_names("avg_pool2d _adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d"), _leading),
    **dict.fromkeys(_names(_LOSSES), _loss),
    "_ctc_loss": _ctc_loss,
    "select": _select,
    "slice": _slice,
    "repeat": _repeat,
    "constant_pad_nd": _pad,
    "embedding": _embedding,
    "index": _index,
}
