"""``RowFlow``: which values of a forward depend on several rows of its batch, seen in a trace of the batch and one of a
micro-batch.

What depends on the batch alone can be taken from the whole batch, which every rank has: a micro-batch gets its rows of it.
What depends on parameters cannot, as other micro-batches are not there.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from vescale.compat.tensor_subclasses import tree_leaves
from vescale.ops import is_elementwise
from vescale.pipeline._row_states import FIXED, UNKNOWN, Operand, RowCall, RowState, cut_dim

# For each op, how its result depends on rows of the batch: :func:`rule_of`. A rule gets a call whose operands are
# ``fixed``, ``rows`` or ``count``, one of them at least with rows. It returns the state of the result, or a list of
# those of several; None: unknown.

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
# Of a sum over rows, the sum of what these give for its terms; (``_ADDS``) if all are sums; (``_PRODUCTS``) if one is.
_ADDS = frozenset(_names("add sub rsub stack cat"))
_PRODUCTS = frozenset(_names("mul div mm mv bmm dot"))
_LINEAR = frozenset(_names("neg _to_copy to expand select slice permute transpose t sum mean copy")) | _ADDS | _PRODUCTS


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
        return call.mixed("combines rows in different dims")
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
            return [call.sum(is_mean=call.name == "mean") for _ in call.outs]
        return [call.mixed("runs along the rows") for _ in call.outs]
    keeps = bool(call.big.get("keepdim")) or call.outs[0][0].ndim == x.big.ndim
    dim = x.dim if keeps else x.dim - sum(d < x.dim for d in dims)
    return [call.rows(dim, x.outer, n) for n in range(len(call.outs))]


def _along(name: str) -> Rule:
    """Goes along a dim, and keeps the others."""

    def rule(call: RowCall) -> RowState | list[RowState]:
        places = {(o.dim, o.outer) for o in call.cut}
        first = call.operands[0]
        if len(places) > 1 or first.big.ndim != call.outs[0][0].ndim:
            return call.mixed("combines rows in different dims")
        ((dim, outer),) = places
        if dim in _dims(call, first, name):
            return [call.mixed("runs along the rows") for _ in call.outs]
        return [call.rows(dim, outer, n) for n in range(len(call.outs))]

    return rule


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
    return call.mixed("selects some of the rows")


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
        found.append(call.rows(dim, size // block, n) if fits else call.mixed("selects some of the rows"))
    return found


def _cat(call: RowCall) -> RowState:
    dim = call.big.get("dim", 0) % call.outs[0][0].ndim
    stacks = call.name == "stack"
    places = {(o.dim + (stacks and dim <= o.dim), o.outer) for o in call.cut}
    if len(places) > 1:
        return call.mixed("combines rows in different dims")
    ((place, outer),) = places
    if stacks or place != dim:
        return call.rows(place, outer)
    sizes = {o.big.shape[dim] for o in call.operands}
    if len(call.cut) != len(call.operands) or len(sizes) > 1:
        return call.mixed("appends other rows to those of the batch")
    return call.rows(dim, outer * len(call.operands))


def _permuted(call: RowCall) -> RowState:
    x = call.operands[0]
    order = list(call.big.get("dims", range(x.big.ndim)))
    if "dims" not in call.big:
        a, b = call.big.get("dim0", 0), call.big.get("dim1", -1)
        order[a], order[b] = order[b], order[a]
    return call.rows([d % x.big.ndim for d in order].index(x.dim), x.outer)


def _selected(call: RowCall) -> RowState:
    x = call.operands[0]
    dim = call.big["dim"] % x.big.ndim
    return call.mixed("takes one of the rows") if dim == x.dim else call.rows(x.dim - (dim < x.dim), x.outer)


def _repeat(call: RowCall) -> RowState:
    x, repeats = call.operands[0], call.big["repeats"]
    place = x.dim + len(repeats) - x.big.ndim
    return call.rows(place, x.outer * repeats[place])


def _index(call: RowCall) -> RowState | None:
    """Rows of one operand at indices; ``x[torch.arange(len(x)), last]`` takes of each row its own."""
    x, indices = call.operands[0], call.big["indices"]
    operands = {id(o.big): o for o in call.operands[1:]}
    given = [(n, operands.get(id(i))) for n, i in enumerate(indices) if i is not None]
    if any(o is None for _, o in given):
        return None
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return RowState("unknown", is_chosen=True)
    at = dict(given)
    cut = [o for _, o in given if o is not None and o.is_cut]
    consecutive = [n for n, _ in given] == list(range(given[0][0], given[0][0] + len(given)))
    first = given[0][0] if consecutive else 0
    width = max(o.big.ndim for _, o in given if o is not None)
    if x.is_cut and x.dim in at:
        own = at[x.dim]
        if own is None or own.kind != "count" or x.outer != 1:
            return call.mixed("selects some of the rows")
    if x.is_cut and x.dim not in at:
        if cut:
            return call.mixed("selects from each row by values of others")
        behind = sum(n < x.dim for n in at)
        return call.rows(x.dim - behind + (width if first < x.dim else 0), x.outer)
    places = {(o.dim + width - o.big.ndim, o.outer) for o in cut}
    if len(places) != 1 or (not x.is_cut and any(o.kind == "count" for o in cut)):
        return None if len(places) == 1 else call.mixed("combines rows in different dims")
    ((dim, outer),) = places
    return call.rows(first + dim, outer)


def _product(call: RowCall) -> RowState | None:
    """Matrix products, also with what is added, and distances of each vector of one operand from each of another."""
    *added, a, b = call.operands
    ndim = a.big.ndim
    if b.big.ndim != ndim or any(o.is_cut for o in added):
        return None
    of_b = {ndim - 2: ndim - 1, ndim - 1: ndim - 2} if "dist" in call.name else {}
    places = {o.dim if o is a else of_b.get(o.dim, o.dim): o.outer for o in call.cut}
    inner = {ndim - 1, ndim - 2} if not of_b else set[int]()
    if a.is_cut and b.is_cut:
        if a.outer == b.outer and a.dim == b.dim < ndim - 2:
            return call.rows(a.dim, a.outer)
        is_sum = a.outer == b.outer and inner and (a.dim, b.dim) == (ndim - 1, ndim - 2)
        return call.sum() if is_sum else call.mixed("compares each row with each")
    ((dim, outer),) = places.items()
    return call.rows(dim, outer) if call.outs[0][0].shape[dim] != call.outs[0][1].shape[dim] else None


def _class_losses(call: RowCall) -> list[RowState] | None:
    """Of each label: ``nll_loss`` without a reduction."""
    logits, labels = call.operand("self"), call.operand("target")
    if (
        call.big["reduction"]
        or logits is None
        or labels is None
        or any(o is not logits and o is not labels for o in call.cut)
    ):
        return None
    places = {(o.dim - (o is logits and o.dim > 1), o.outer) for o in call.cut}
    if (logits.is_cut and logits.dim == 1) or len(places) != 1:
        return None
    return [call.rows(*places.pop())]


def _element_losses(call: RowCall) -> RowState | None:
    return None if call.big.get("reduction", 1) else _pointwise(call)


def _normalization(call: RowCall) -> list[RowState] | None:
    """Over the last dims."""
    x = call.operands[0]
    if not x.is_cut or len(call.cut) > 1:
        return None
    if x.dim >= x.big.ndim - len(call.big["normalized_shape"]):
        return [call.mixed("runs along the rows") for _ in call.outs]
    return [call.rows(x.dim, x.outer, n) for n in range(len(call.outs))]


def _lookup(call: RowCall) -> RowState | None:
    indices = call.operand("indices")
    return call.rows(indices.dim, indices.outer) if indices and indices.is_cut and len(call.cut) == 1 else None


_POINTWISE = frozenset(
    _names(
        "expand to _to_copy copy fill masked_fill native_dropout dropout bernoulli uniform normal exponential random "
        "zero where clamp clamp_min clamp_max addcmul addcdiv lerp gelu silu where nan_to_num bitwise_not"
    )
)
_SUMS = frozenset(_names("sum mean nansum dot vdot mm bmm"))
_COPIES = frozenset(_names("_to_copy to expand"))
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
    **dict.fromkeys(_names("split split_with_sizes unbind unsafe_split chunk"), _split),
    **dict.fromkeys(_names("cat stack"), _cat),
    **dict.fromkeys(_names("mm addmm bmm baddbmm _cdist_forward _euclidean_dist"), _product),
    **dict.fromkeys(_names("nll_loss_forward nll_loss2d_forward"), _class_losses),
    **dict.fromkeys(
        _names("mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits"),
        _element_losses,
    ),
    **dict.fromkeys(_names("transpose t permute"), _permuted),
    "select": _selected,
    "native_layer_norm": _normalization,
    "embedding": _lookup,
    "slice": _slice,
    "repeat": _repeat,
    "index": _index,
}


Rows = tuple[int, int]  # the dim of a tensor that has rows, and its outer size: [outer, micro-batches, ...]

EDITS = (
    "If it does not depend on parameters, compute it before .step() and pass it in the batch; otherwise use "
    "microbatches=1 with GPipe, or, if each micro-batch may compute it from its own rows (as gradient accumulation "
    "does), rows='microbatch' in plan.pipeline(...)"
)
_NOT_USERS = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))
_APART = 12  # ops that are in one of two traces
# Of how many rows, values tell.
_CHOOSES = {"nonzero", "masked_select", "repeat_interleave", "unique_consecutive", "unique_dim", "_unique", "_unique2"}
_VIEWS = {"select", "slice", "expand", "permute", "transpose", "t", "split", "split_with_sizes", "unbind", "diagonal"}


def is_torchs(frame: FrameType) -> bool:
    """Whether the code is PyTorch's, or this library's."""
    return frame.f_code.co_filename.startswith(_NOT_USERS)


def users_line() -> str:
    """The nearest line that is neither torch's nor this library's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_torchs(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"


@dataclass(frozen=True)
class _Op:
    func: Any
    args: Any
    kwargs: Any
    outs: Sequence[torch.Tensor]
    depends: bool  # on parameters
    where: str

    @property
    def name(self) -> str:
        return self.func._schema.name.split("::")[-1]


@dataclass
class RowOps:
    """The ops of a trace in order. ``batch``: leaves of the batch. ``origins``: of functions' results, outside of gated
    modules, by id. ``calls``: of gated modules: path, stage, tensors among the arguments, and leaves of the result."""

    batch: Sequence[torch.Tensor]
    ops: list[_Op] = field(default_factory=list)
    calls: list[tuple[str, int, list[torch.Tensor], list[Any]]] = field(default_factory=list)
    origins: dict[int, Any] = field(default_factory=dict)
    entering: Mapping[int, Sequence[torch.Tensor]] = field(default_factory=dict)  # by stage
    writing: set[int] = field(
        default_factory=set
    )  # stages whose modules write to what they get, or are gone through backwards
    written_buffers: dict[int, str] = field(default_factory=dict)  # by id: the name
    buffer_writes: list[tuple[str, int, Any]] = field(default_factory=list)  # the number of the op, and the op
    writers: dict[str, int] = field(default_factory=dict)  # of buffers written around gated modules: the stage
    assigned: Sequence[str] = ()  # buffers of the state dict that the forward replaces
    reads: set[int] = field(default_factory=set)  # ids of tensors that Python has read

    def note(
        self, func: Any, args: Any, kwargs: Any, outs: list[torch.Tensor], depends: bool, inside: str | None
    ) -> None:
        if outs:
            where = f"{users_line()}{f', in {inside!r}' if inside else ''}"
            self.ops.append(_Op(func, args, kwargs, tuple(outs), depends, where))

    def computes_as(self, other: RowOps) -> bool:
        """Whether both have the same ops with the same numbers."""

        def numbers(op: _Op) -> list[Any]:
            leaves = tree_leaves((op.args, op.kwargs))
            is_constant = op.name == "lift_fresh" and not leaves[0].is_meta
            return [v for v in leaves if not isinstance(v, torch.Tensor)] + (
                leaves[0].flatten().tolist() if is_constant else []
            )

        return len(self.ops) == len(other.ops) and all(
            a.func is b.func and numbers(a) == numbers(b) for a, b in zip(self.ops, other.ops)
        )

    def buffer_that_counts(self, results: Any, alike: Container[str]) -> str:
        """The name of a buffer, none of ``alike``, that the forward writes to, and that its results depend on, or what
        Python reads."""
        for buffer, name in self.written_buffers.items():
            if name in alike:
                continue
            made: set[int] = set()
            for op in self.ops:
                if any(id(v) == buffer or id(v) in made for v in tree_leaves((op.args, op.kwargs))):
                    made.update(id(out) for out in op.outs if id(out) not in self.written_buffers)
            if not made.isdisjoint(map(id, tree_leaves(results))) or not {buffer, *made}.isdisjoint(self.reads):
                return name
        return ""


@dataclass(frozen=True)
class Substitute:
    """A value that a micro-batch takes from the whole batch: the origin of the micro-batch's; what computes the batch's;
    and the dim of which a micro-batch has a part (None: it has all)."""

    origin: Any
    value: Callable[[Mapping[str, Any]], torch.Tensor]
    dim: int | None


class RowFlow:
    """
    Args:
        means: of both traces, the means over labels by id: the mean, and what it is computed of.
        read: numbers that the forward of the batch reads from it.
        each_by_itself: micro-batches compute of their own rows what is no sum over rows.
    """

    def __init__(
        self,
        whole: RowOps,
        part: RowOps,
        count: int,
        replay: Callable[[torch.Tensor], Callable[[Mapping[str, Any]], torch.Tensor] | None],
        means: tuple[Mapping[int, Sequence[torch.Tensor]], Mapping[int, Sequence[torch.Tensor]]],
        read: Container[Any] = (),
        *,
        each_by_itself: bool = False,
    ) -> None:
        self._means, self._means_of_part = means
        self._read, self._each_by_itself = read, each_by_itself
        self._whole, self._part, self._count, self._replay = whole, part, count, replay
        self.substitutes: dict[int, Substitute] = {}
        self._states: dict[int, RowState] = {}
        self._small: dict[int, set[int]] = {}  # of a tensor that is two entries of the batch, several
        self._made: set[int] = {id(out) for op in (*whole.ops, *part.ops) for out in op.outs}
        self._roots: dict[int, torch.Tensor] = {}
        self._bases: dict[int, torch.Tensor] = {}
        for ops in (whole.ops, part.ops):
            for op in ops:
                if op.name in KEEPS_ORDER:
                    self._roots[id(op.outs[0])] = self._root(op.args[0] if op.args else op.kwargs["self"])
        for big, small in zip(whole.batch, part.batch):
            self._set(big, small, RowState("rows") if big.shape != small.shape else FIXED)
        # What ops need whose results are the same in each micro-batch, by their ids.
        self._fixed: dict[int, frozenset[int]] = {}
        for buffer in whole.written_buffers:
            self._states[buffer], self._small[buffer] = FIXED, {buffer}
        self._returned: dict[int, tuple[Any, Any, torch.Tensor, torch.Tensor]] = {}  # by gated modules
        for call, of_part in zip(whole.calls, part.calls):
            for big, small in zip(call[3], of_part[3]):
                if self._dim_by_shape(big, small) is not None and big.is_floating_point():
                    self._returned[id(self._root(big))] = call[2], of_part[2], big, small
                    self._small.setdefault(id(self._root(big)), set()).add(id(self._root(small)))
        for one, other in _aligned(
            *([op for op in ops if op.name not in KEEPS_ORDER] for ops in (whole.ops, part.ops))
        ):
            self._follow(one, other)

    def of(self, big: torch.Tensor, small: torch.Tensor) -> RowState:
        return self._operand(big, small).state

    def buffers_written_alike(self) -> tuple[frozenset[str], frozenset[int]]:
        """The buffers to which the forward of each micro-batch writes what that of the batch does, and what they need."""
        ops, needs, others = self._whole.ops, frozenset[int](), set()
        for name, n, func in self._whole.buffer_writes:
            op = ops[n] if n < len(ops) else None
            if op is not None and op.func is func and id(op) in self._fixed:
                needs |= self._fixed[id(op)]
            else:
                others.add(name)
        return frozenset(self._whole.written_buffers.values()) - others, needs

    def of_calls(self) -> tuple[frozenset[int], str]:
        """What gated modules need of the whole batch; and why one gets or returns something that is not of single rows."""
        needs: frozenset[int] = frozenset()
        for one, other in zip(self._whole.calls, self._part.calls):
            for what, bigs, smalls in (("gets", one[2], other[2]), ("returns", one[3], other[3])):
                for big, small in zip(bigs, smalls):
                    if not isinstance(big, torch.Tensor) or not isinstance(small, torch.Tensor):
                        continue
                    state = self.of(big, small)
                    needs |= state.needs
                    if state.kind in ("mixed", "sum"):
                        why = f"depends on rows of several micro-batches: {state.why or 'a sum or mean over rows'}"
                        return needs, f"what {one[0]!r} {what} {why}"
        return needs, ""

    def rows_for_loss(self, calls: Sequence[Any], last: int) -> dict[int, list[Rows | None]] | None:
        """Where rows are in what a forward computes its loss of: what the last stage's modules return, by number of the
        call, and what enters the stage, at -1. None of a leaf: it is the same in each micro-batch. None: not known."""
        pairs = zip(self._whole.calls, self._part.calls)
        leaves = {
            n: (a[3], b[3]) for n, (a, b) in enumerate(pairs) if a[1] == last and n < len(calls) and calls[n].is_read
        }
        if last in self._whole.writing or any(a[1] == last and c.hooked for a, c in zip(self._whole.calls, calls)):
            return None
        leaves[-1] = tuple(list(ops.entering.get(last, ())) for ops in (self._whole, self._part))  # type: ignore[assignment]
        found: dict[int, list[Rows | None]] = {}
        for place, (bigs, smalls) in leaves.items():
            found[place] = []
            for big, small in zip(bigs, smalls):
                operand = self._operand(big, small) if isinstance(big, torch.Tensor) else None
                if operand is None or operand.kind == "fixed":
                    found[place].append(None)
                elif operand.is_cut:
                    found[place].append((operand.dim, operand.outer))
                elif (
                    operand.kind != "unknown"
                    or operand.state.is_chosen
                    or (dim := self._dim_by_shape(big, small)) is None
                ):
                    return None
                else:
                    found[place].append((dim, 1))
        return found

    def _dim_by_shape(self, big: Any, small: Any) -> int | None:
        are_tensors = isinstance(big, torch.Tensor) and isinstance(small, torch.Tensor)
        return cut_dim(big.shape, small.shape, self._count) if are_tensors else None

    def _root(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._roots.get(id(tensor), tensor)

    def _set(self, big: torch.Tensor, small: torch.Tensor, state: RowState) -> None:
        root = id(self._root(big))
        self._states[root] = state
        self._small.setdefault(root, set()).add(id(self._root(small)))

    def _operand(self, big: torch.Tensor, small: torch.Tensor, *, counts: bool = False, takes: bool = False) -> Operand:
        """``takes``: from the whole batch, if it can be; also where each micro-batch computes by itself."""
        is_own = id(big) in self._states
        root, small_root = (big, small) if is_own else (self._root(big), self._root(small))
        state = self._states.get(id(root))
        if id(root) in self._returned and (state is None or (state.kind == "unknown" and not state.is_pythons)):
            state = self._of_returned(id(root), state)
        if state is None:
            is_given = id(root) not in self._made and big.shape == small.shape  # a parameter, or a constant
            return Operand(big, small, FIXED if is_given else UNKNOWN)
        if id(small_root) not in self._small[id(root)]:
            return Operand(big, small, UNKNOWN.needing(state.needs))
        found = Operand.of(big, small, state, self._count)
        takes = takes or not self._each_by_itself
        can_be_taken = takes and found.kind in ("mixed", "unknown") and not found.state.is_pythons
        if can_be_taken or (found.kind == "count" and not counts):
            for one, other in ((root, small_root), (big, small)) if takes else ():
                if found.state.is_chosen and one.shape != other.shape:
                    continue
                taken = self._substituted(one, other)
                if taken is not None:  # of a view: itself alone
                    self._states[id(one)] = taken
                    self._small.setdefault(id(one), set()).add(id(other))
                    return Operand.of(big, small, taken, self._count)
            if found.kind == "count":
                return replace(found, state=RowState("mixed", why="counts the rows"))
        return found

    def _of_returned(self, root: int, state: RowState | None) -> RowState | None:
        """The state of what a module returns and is not known: the rows of what it gets. (The trial compares them.)"""
        bigs, smalls, big, small = self._returned.pop(root)
        given = [self._operand(a, b) for a, b in zip(bigs, smalls)]
        outers = {operand.outer for operand in given if operand.is_cut}
        if len(outers) != 1 or any(operand.kind in ("mixed", "unknown", "sum") for operand in given):
            return state
        dim = self._dim_by_shape(big, small)
        found = RowState("rows", math.prod(big.shape[:dim]) * outers.pop())
        self._states[root] = found.needing(state.needs if state is not None else ())
        return self._states[root]

    def _substituted(self, big: torch.Tensor, small: torch.Tensor) -> RowState | None:
        """The state of a tensor that is taken from the whole batch; None: it cannot be."""
        origin, value = self._part.origins.get(id(small)), self._replay(big)
        dim = self._dim_by_shape(big, small)
        if origin is None or value is None or (dim is None and big.shape != small.shape):
            return None
        self.substitutes[id(big)] = Substitute(origin, value, dim)
        before = torch.Size(big.shape[:dim]).numel() if dim is not None else 1
        return RowState("fixed" if dim is None else "rows", before, needs=frozenset([id(big)]))

    def _follow(self, one: _Op, other: _Op) -> None:
        tensors = [[v for v in tree_leaves((op.args, op.kwargs)) if isinstance(v, torch.Tensor)] for op in (one, other)]
        counts = rule_of(one.func) is not None and one.name in ("index", "_to_copy", "to", "expand", "slice")
        if len(tensors[0]) != len(tensors[1]):
            states = [UNKNOWN for _ in one.outs]
        else:
            operands = [self._operand(a, b, counts=counts) for a, b in zip(*tensors)]
            if one.name.rstrip("_") in ("mul", "div") and any(o.kind == "sum" for o in operands):
                operands = [self._operand(a, b, takes=True) for a, b in zip(*tensors)]
            call = RowCall(one.name, _named(one), _named(other), list(zip(one.outs, other.outs)), operands, self._count)
            states = self._results(one, call)
        if all(state.kind == "fixed" for state in states):
            self._fixed[id(one)] = frozenset().union(*(state.needs for state in states))
        for big, small, state in zip(one.outs, other.outs, states):
            are_indices = one.depends and not (big.is_floating_point() or big.dtype is torch.bool)
            if state.kind == "mixed" and are_indices and any(v.shape == big.shape for v in tensors[0]):
                state = UNKNOWN.needing(state.needs)  # of all rows, which may come back to their places
            if id(big) in self._means and id(small) in self._means_of_part:
                state = self._mean_over_labels(big, small)
            if state.kind == "mixed" and self._each_by_itself:
                state = UNKNOWN.needing(state.needs)
            if one.func._schema.is_mutable:
                self._written(one, big, state)
            self._set(big, small, state)
            if one.name in _VIEWS and tensors[0]:
                self._bases[id(self._root(big))] = self._root(tensors[0][0])

    def _mean_over_labels(self, big: torch.Tensor, small: torch.Tensor) -> RowState:
        """It is computed with the number of labels in the batch."""
        pairs = zip(self._means[id(big)][1:], self._means_of_part[id(small)][1:])
        given = [self._operand(a, b) for a, b in pairs]
        mixed = next((o.state for o in given if o.kind == "mixed"), None)
        state = RowState("sum", scale=1 / self._count, of_labels=True) if mixed is None else mixed
        return state.needing(frozenset().union(*(o.state.needs for o in given)))

    def _written(self, op: _Op, target: torch.Tensor, state: RowState) -> None:
        """What a view has is in what it is a view of."""
        base = self._bases.get(id(self._root(target)))
        while base is not None:
            before = self._states.get(id(base), FIXED)
            if state.kind == "sum":
                self._states[id(base)] = self._added(op, [state, before], base).needing(before.needs)
            elif state.kind in ("mixed", "unknown"):
                self._states[id(base)] = state.needing(before.needs)
            else:
                self._states[id(base)] = before.needing(state.needs)
            base = self._bases.get(id(base))

    def _results(self, op: _Op, call: RowCall) -> list[RowState]:
        kinds = {operand.kind for operand in call.operands}
        shapes_differ = any(big.shape != small.shape for big, small in call.outs)
        if op.name == "lift_fresh":  # torch.tensor(...)
            return [_constant(*call.outs[0])]
        if op.name in _CHOOSES:
            return [RowState("unknown", is_pythons=True, is_chosen=True, needs=call.needs) for _ in call.outs]
        if op.name in FACTORIES or not call.operands:
            return [self._made_by_sizes(op, call, n) for n in range(len(call.outs))]
        if "mixed" in kinds:
            worst = next(operand.state for operand in call.operands if operand.kind == "mixed")
            return [worst.needing(call.needs) for _ in call.outs]
        is_known = "unknown" not in kinds
        if "sum" in kinds and (is_known or shapes_differ):  # what is not known has rows then
            return [self._of_sums(op, call, shapes_differ).needing(call.needs) for _ in call.outs]
        if not call.cut and is_known:
            if op.name in ("expand", "repeat"):  # each row is the same
                return [self._made_by_sizes(op, call, 0).needing(call.needs)]
            fixed = self._mixed(op, "has the number of rows among its arguments")
            fixed = fixed if shapes_differ or call.numbers_differ else FIXED
            return [fixed.needing(call.needs) for _ in call.outs]
        rule = rule_of(op.func) if is_known else None
        by_rule: RowState | list[RowState] | None = rule(call) if rule is not None else None
        if "batch_norm" in op.name and not op.depends:
            by_rule = call.mixed("computes statistics over rows")
        if by_rule is None and op.depends:
            by_rule = self._sum_of_unknown(call)
        origins = [operand.state for operand in call.operands]
        unknown = RowState(
            "unknown", is_pythons=any(s.is_pythons for s in origins), is_chosen=any(s.is_chosen for s in origins)
        )
        given = by_rule if isinstance(by_rule, list) else [] if by_rule is None else [by_rule]
        states = [*given, *[unknown] * (len(call.outs) - len(given))]
        pairs = call.mixed("compares each row with each")
        states = [
            pairs if s.kind == "unknown" and sum(a != b for a, b in zip(big.shape, small.shape)) > 1 else s
            for s, (big, small) in zip(states, call.outs)
        ]
        if not op.depends:  # a sum of the batch's own values is not the sum that a micro-batch has
            states = [self._mixed(op, "is a sum over rows") if s.kind == "sum" else s for s in states]
        return [
            (self._mixed(op, s.why) if s.kind == "mixed" else s).needing(call.needs) for s in states[: len(call.outs)]
        ]

    def _mixed(self, op: _Op, why: str) -> RowState:
        return RowState("mixed", why=f"{op.name} {why} ({op.where})")

    def _made_by_sizes(self, op: _Op, call: RowCall, n: int) -> RowState:
        big, small = call.outs[n]
        if big.shape == small.shape:
            return self._mixed(op, "has the number of rows among its arguments") if call.numbers_differ else FIXED
        dim = self._dim_by_shape(big, small)
        if dim is None:
            return UNKNOWN
        if op.name in FACTORIES or op.name in ("expand", "repeat"):
            return call.rows(dim, out=n)
        return call.rows(0, kind="count") if op.name == "arange" and not call.big.get("start") else UNKNOWN

    def _sum_of_unknown(self, call: RowCall) -> RowState | None:
        """Of what may be rows; the trial will tell."""
        if any(o.state.is_chosen for o in call.operands):
            return None
        shapes = [(o.big.shape, o.small.shape) for o in call.operands if o.big.shape != o.small.shape]
        is_sum = call.name in _SUMS or "reduction" in call.big
        if (
            not shapes
            or not is_sum
            or any(a.numel() != self._count * b.numel() for a, b in shapes)
            or any(a.shape != b.shape for a, b in call.outs)
            or any(o.kind == "sum" for o in call.operands)
        ):
            return None
        return call.sum(is_mean=call.name == "mean" or call.big.get("reduction") == 1).needing(call.needs)

    def _of_sums(self, op: _Op, call: RowCall, shapes_differ: bool) -> RowState:
        """Of sums over rows, or means."""
        sums = [operand for operand in call.operands if operand.kind == "sum"]
        name = op.name.rstrip("_") if op.func._schema.is_mutable else op.name
        if shapes_differ or call.cut:
            return self._mixed(op, "applies a sum or mean over rows to the rows")
        if name not in _LINEAR or (
            name in _PRODUCTS and (len(sums) > 1 or (name == "div" and call.operands[0] is not sums[0]))
        ):
            return self._mixed(op, "is computed from a sum or mean over rows")
        if name in _PRODUCTS:
            return self._times_number(op, call, sums[0].state)
        if name not in _ADDS:
            return sums[0].state
        adds_number = isinstance(call.big.get("other"), int | float) and call.big["other"] != 0
        states = [operand.state for operand in call.operands]
        return self._added(op, states, *(o.big for o in call.operands if o.kind == "fixed"), adds_number=adds_number)

    def _added(self, op: _Op, states: Sequence[RowState], *fixed: torch.Tensor, adds_number: bool = False) -> RowState:
        """What is the same in each micro-batch is the mean of theirs."""
        sums = [state for state in states if state.kind == "sum"]
        if len(sums) + sum(state.kind == "fixed" for state in states) < len(states):
            return self._mixed(op, "combines a sum or mean over rows with rows")
        constant = adds_number or any(
            one.is_meta or bool((one != 0).any()) for one, state in zip(fixed, [s for s in states if s.kind == "fixed"])
        )
        scales = [state.scale for state in sums] + [1 / self._count] * constant
        if max(scales) - min(scales) > 1e-9 * max(scales):
            return self._mixed(op, "adds a mean over rows, or what does not depend on them, to a sum")
        return replace(sums[0], of_labels=not constant and all(state.of_labels for state in sums))

    def _times_number(self, op: _Op, call: RowCall, state: RowState) -> RowState:
        """A sum, multiplied or divided."""
        numbers = [call.big.get("other"), call.small.get("other")]
        if not all(isinstance(v, int | float) for v in numbers) or numbers[0] == numbers[1]:
            return state
        ratio = numbers[0] / numbers[1] if numbers[1] else 0.0
        if ratio != self._count or numbers[0] in self._read:
            return self._mixed(op, "has a number that is read from the batch")
        scale = state.scale / ratio if call.name.startswith("div") else state.scale * ratio  # the number of rows
        return replace(state, scale=scale, of_labels=False)


def _constant(big: torch.Tensor, small: torch.Tensor) -> RowState:
    if big.shape == small.shape and not big.is_meta and not small.is_meta and torch.equal(big, small):
        return FIXED
    return RowState("unknown", is_pythons=True)


def _aligned(whole: Sequence[_Op], part: Sequence[_Op]) -> Iterator[tuple[_Op, _Op]]:
    """The ops of both that are the same. (By its sizes, a linear layer is one op or two.) Results of others are unknown."""
    n = k = 0
    while n < len(whole) and k < len(part):
        steps = ((a, total - a) for total in range(_APART) for a in range(total + 1))
        for a, b in steps:
            one, other = whole[n + a : n + a + 1], part[k + b : k + b + 1]
            if one and other and one[0].func is other[0].func and one[0].where == other[0].where:
                yield one[0], other[0]
                n, k = n + a + 1, k + b + 1
                break
        else:
            return


def _named(op: _Op) -> dict[str, Any]:
    """The arguments by name, with defaults."""
    arguments = op.func._schema.arguments
    found = {a.name: a.default_value for a in arguments if a.has_default_value()}
    found |= dict(zip((a.name for a in arguments), op.args))
    return found | op.kwargs
