"""What DTensor's dispatcher asks and tells for parallelized models: handlers of ops, and the listener."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import WeakTensorKeyDictionary

from vescale.checks import HASHES_OF_CHECKED_MESHES, called_by_user, describe_graphs, follows_graphs, step_checks
from vescale.comm import note_locals, note_write, record
from vescale.compat import (
    DispatchListener,
    ModelHooks,
    OpHandler,
    install_part,
    is_view,
    local_of,
    make_dtensor,
    make_spec,
    map_tensors,
    no_torch_function,
    schema_of,
    spec_of,
    tensors_in,
    with_out_variants,
    written_tensors,
)
from vescale.errors import MixedTensorsError, OpPlacementError, PendingSumWarning
from vescale.ops import (
    LIVE_COPIES,
    bring,
    convert,
    decide_interleaved,
    derivative_of_sum,
    enter_local,
    entries,
    is_foreach,
    is_listed,
    misjudged_view,
    note_local,
    remember_copy,
    report_implicit_move,
    require_current,
    run_op,
    running_module,
    view_of_parts,
    write_back,
    write_through,
)
from vescale.placements import contiguous_stride, shard_dim
from vescale.runtime._activation import current_activation
from vescale.runtime._adapters import AdapterWatch, StrayWatch
from vescale.runtime._foreign_tools import refuse_export
from vescale.runtime._gradient_hooks import refuse_derivatives, refuse_edge
from vescale.runtime._input_checks import check_move, check_read, note_draw, note_plain_value
from vescale.runtime._module_calls import checkpointed, in_backward_of
from vescale.runtime._shared_memory import hand_out

# Plain tensors among DTensors outside of a parallelized model: metrics, losses and sums that a script makes of outputs.
#
# As everywhere, a plain tensor is the global one, the same on every rank, and ranks compare it with their next event.
#
# Ops on lists (``torch._foreach_*``, fused optimizers) compute each index by itself: indices with plain tensors alone, and
# those with DTensors, run apart.
#
# ===========================================  ====================================================================
# a plain tensor                               the op
# ===========================================  ====================================================================
# is read                                      runs as if it were a DTensor, Replicate on each axis
# is read, and requires a gradient             the same; its gradient is made plain: the whole value
# is written to (``total += loss.detach()``)   writes the whole value, which all ranks gather
# is written to by what requires a gradient    MixedTensorsError: autograd would have to continue through both
# ===========================================  ====================================================================
#
# Meshes without a parallelized model, and places inside of one, are not treated here: PyTorch's refusal gets advice.

_REFUSAL = "got mixed torch.Tensor and DTensor"  # PyTorch's
_ASKED = threading.local()  # whether PyTorch is being asked what it says


def run_mixed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call with plain tensors among DTensors; NotImplemented: PyTorch answers it.

    Communication: a plain tensor that is written to needs the whole value of DTensors that are cut or pending.

    Raises MixedTensorsError.
    """
    tensors = [*tensors_in(args), *tensors_in(kwargs)]
    mesh = next((x.device_mesh for x in tensors if isinstance(x, DTensor)), None)
    if mesh is None:
        return NotImplemented
    if is_listed(op):
        apart = _run_apart(op, args, kwargs)
        if apart is not _TOGETHER:
            return apart
    written = [x for x in written_tensors(op, args, kwargs) if not isinstance(x, DTensor)]
    if not written and all(isinstance(x, DTensor) or x.ndim == 0 for x in tensors):
        _keep_gradients_plain(tensors, mesh)
        return NotImplemented
    if running_module() is not None and not written:
        return _on_replicas(op, args, kwargs, mesh)
    if step_checks(mesh) is None:
        return _as_pytorch(op, args, kwargs)
    if op in _COMPARED_EARLIER:  # asked because sizes differ
        if op is not torch.ops.aten.broadcast_tensors.default or not _fit(tensors):
            _refuse_parts(_short_name(op), tensors)
        return NotImplemented
    if written:
        return _write(op, args, kwargs)
    _keep_gradients_plain(tensors, mesh)
    names = iter(_names(op, args, kwargs))

    def wrapped(x: torch.Tensor) -> torch.Tensor:
        name = next(names)
        if isinstance(x, DTensor):
            return x
        if x.ndim:
            note_plain_value(str(op), name, x, mesh)
        return make_dtensor(x.detach(), make_spec(mesh, (Replicate(),) * mesh.ndim, x.shape, x.stride(), x.dtype))

    args, kwargs = map_tensors(wrapped, tuple(args)), map_tensors(wrapped, dict(kwargs))
    try:
        return op(*args, **kwargs)
    except (RuntimeError, ValueError):
        _refuse_parts(_short_name(op), tensors)
        raise


_TOGETHER: Any = object()


def _run_apart(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an op on lists in which indices differ in what they hold; ``_TOGETHER`` where all are alike."""
    length = len(args[0])
    lists = [x for x in (*args, *kwargs.values()) if isinstance(x, list | tuple) and len(x) == length]
    written = {id(x) for x in written_tensors(op, args, kwargs) if not isinstance(x, DTensor)}
    kinds: dict[Any, list[int]] = {}
    for index, row in enumerate(zip(*lists)):
        mesh = next((x.device_mesh for x in row if isinstance(x, DTensor)), None)
        kinds.setdefault((mesh, mesh is not None and any(id(x) in written for x in row)), []).append(index)
    if len(kinds) < 2:
        return _TOGETHER
    results: list[Any] = [None] * length
    for indices in kinds.values():

        def chosen(name: str, value: Any, indices: list[int] = indices) -> Any:
            if isinstance(value, list | tuple):
                return [value[index] for index in indices] if len(value) == length else value
            return value[indices] if name == "scalars" and isinstance(value, torch.Tensor) else value

        names = [argument.name for argument in op._schema.arguments]
        found = op(*map(chosen, names, args), **{name: chosen(name, value) for name, value in kwargs.items()})
        for index, result in zip(indices, found or ()):
            results[index] = result
    return results if op._schema.returns else None


# Tensors that have the hook; leaves are used in every step.
_WITH_HOOK: MutableMapping[torch.Tensor, None] = WeakTensorKeyDictionary()


def _keep_gradients_plain(tensors: list[torch.Tensor], mesh: DeviceMesh) -> None:
    """Of plain tensors among DTensors, outside of a model: what made them, and their optimizer, take plain ones."""
    if not torch.is_grad_enabled() or running_module() is not None or step_checks(mesh) is None:
        return
    for x in tensors:
        if not isinstance(x, DTensor) and x.requires_grad and x not in _WITH_HOOK:
            x.register_hook(_whole_gradient)
            _WITH_HOOK[x] = None


@unserializable_hook
def _whole_gradient(grad: torch.Tensor) -> torch.Tensor | None:
    """Communication: the whole gradient, where it is pending or cut."""
    if not isinstance(grad, DTensor):
        return None
    whole = (Replicate(),) * grad.device_mesh.ndim
    return enter_local(convert(grad, whole, requester="gradient of a plain tensor"), whole)


def _on_replicas(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh) -> Any:
    """The op of C++ code that has made a tensor of global sizes, as derivatives do, which the model's function mode does not
    see: that of ``cumprod`` has zeros, that of ``trace`` indices."""
    replicated = (Replicate(),) * mesh.ndim

    def wrapped(x: torch.Tensor) -> torch.Tensor:
        is_whole = not isinstance(x, DTensor) and x.ndim > 0
        return make_dtensor(x, make_spec(mesh, replicated, x.shape, x.stride(), x.dtype)) if is_whole else x

    return op(*map_tensors(wrapped, tuple(args)), **map_tensors(wrapped, dict(kwargs)))


_COMPARED_EARLIER = (
    torch.ops.aten.cross_entropy_loss.default,
    torch.ops.aten.nll_loss_nd.default,
    torch.ops.aten.broadcast_tensors.default,
)


def _as_pytorch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What PyTorch answers where no model is parallelized; where it refuses, with what to do about parameters of
    fully_shard."""
    if getattr(_ASKED, "is_answering", False):
        return NotImplemented
    _ASKED.is_answering = True
    try:
        return op(*args, **kwargs)
    except RuntimeError as error:
        if _REFUSAL not in str(error):
            raise
        raise MixedTensorsError(
            f"{str(error).rstrip('!.')}. Parameters of fully_shard are DTensors outside of the forward of their module: "
            "call the module itself; for another method that uses them, call "
            'vescale.fsdp.register_fsdp_forward_method(module, "method") once, which gathers them there as in forward; or '
            "read the whole value, parameter.full_tensor()"
        ) from None
    finally:
        _ASKED.is_answering = False


def _fit(tensors: list[torch.Tensor]) -> bool:
    """Whether shapes broadcast."""
    sizes = itertools.zip_longest(*(reversed(x.shape) for x in tensors), fillvalue=1)
    return all(len(set(size) - {1}) < 2 for size in sizes)


def _refuse_parts(name: str, tensors: list[torch.Tensor]) -> None:
    """Raise where operands of an op do not fit together and a plain one is as large as this rank's part of a DTensor."""
    for x in tensors:
        for output in tensors:
            if isinstance(x, DTensor) or not isinstance(output, DTensor):
                continue
            part, whole = local_of(output).shape, output.shape
            cut = [d for d in range(min(x.ndim, len(whole), len(part))) if x.shape[d] == part[d] != whole[d]]
            if not cut:
                continue
            placements = tuple(p if shard_dim(p) in cut else Replicate() for p in output.placements)
            shape = tuple(whole[d] if d in cut else size for d, size in enumerate(x.shape))
            more = f"shape={shape}, stride={contiguous_stride(shape)}"
            raise MixedTensorsError(
                f"{name} of a DTensor of shape {tuple(whole)}, of which this rank holds {tuple(part)}, and a plain tensor "
                f"of shape {tuple(x.shape)}, which is as large as this rank's part: plain tensors that are combined with "
                "a model's outputs are global. Make it a part, "
                f"`DTensor.from_local(x, out.device_mesh, {placements}, {more})`, or pass it to the model's forward, as "
                'an input of the plan that is given="local"'
            )


def _short_name(op: Any) -> str:
    return str(op).removeprefix("aten.").partition(".")[0]


def _names(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The argument of each tensor, in order."""
    given = [*((argument.name, value) for argument, value in zip(op._schema.arguments, args)), *kwargs.items()]
    return [name for name, value in given for _ in tensors_in(value)]


def _write(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op on whole values, into plain tensors.

    Raises MixedTensorsError where it would write to DTensors, too, and for what requires a gradient.
    """
    found = next((x for x in tensors_in((args, kwargs)) if isinstance(x, DTensor) and x.requires_grad), None)
    if found is not None and torch.is_grad_enabled():
        raise MixedTensorsError(
            f"{_short_name(op)} writes a DTensor of shape {tuple(found.shape)} that requires a gradient to a plain "
            "tensor, across which autograd cannot continue. Write only the value (x.detach(), or x.item()), or make "
            "a new tensor (total = total + x)"
        )
    also = next((x for x in written_tensors(op, args, kwargs) if isinstance(x, DTensor)), None)
    if also is not None:
        raise MixedTensorsError(
            f"{op} writes to plain tensors and to a DTensor of shape {tuple(also.shape)} in one computation (an "
            "optimizer's state and its parameter): make all tensors that it writes to of the same kind, as in "
            "`torch.zeros_like(parameter)` does"
        )

    def whole(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, DTensor):
            return x
        if running_module() is None:
            check_read(x, str(op))
        return local_of(bring(x, (Replicate(),) * x.device_mesh.ndim, str(op), "an operand"))

    result = op(*map_tensors(whole, tuple(args)), **map_tensors(whole, dict(kwargs)))
    written = written_tensors(op, args, kwargs)
    return written[0] if len(written) == 1 and isinstance(result, torch.Tensor) else result


def install_handlers() -> None:
    """Teach DTensor's dispatcher; idempotent. Ops without a handler, and DTensors of other code, are not affected."""
    handlers = {
        op: OpHandler(entry.handler, entry.applies or (lambda op, schema: True), entry.takes_plain)
        for op, entry in entries().items()
        if entry.handler is not None
    }
    install_part(
        "models",
        ModelHooks(
            with_out_variants(handlers),
            _Listener(),
            LIVE_COPIES,
            checkpointed,
            in_backward_of,
            StrayWatch(AdapterWatch()),
        ),
    )


class _Listener(DispatchListener):
    hashes_of_checked_meshes = HASHES_OF_CHECKED_MESHES
    requires_current = staticmethod(require_current)
    exports = staticmethod(refuse_export)
    recorded_backward = staticmethod(refuse_derivatives)
    draws = staticmethod(note_draw)
    interleaved = staticmethod(decide_interleaved)
    view_of_parts = staticmethod(view_of_parts)
    misjudged_view = staticmethod(misjudged_view)
    moves_nothing = staticmethod(derivative_of_sum)

    def redistribution(self, op: Any, moves: Sequence[tuple[int, torch.Tensor, Any, Any]]) -> None:
        if running_module() is None:
            for _, _, source, target in moves:
                check_move(source, target.placements, f"an operand of {op}")
            return
        names = [argument.name for argument in op._schema.arguments]
        for position, local, source, target in moves:
            name = names[position] if position < len(names) else f"argument {position}"
            report_implicit_move(str(op), name, local, source.placements, target.placements)
            _enter_in_ledger(str(op), local, source, target)

    def placement_move(self, op: Any, operand: str, local: torch.Tensor, source: Any, target: Any) -> None:
        report_implicit_move(str(op), operand, local, source.placements, target.placements)

    def viewed_copies(self, op: Any, moves: Sequence[tuple[torch.Tensor, Any, torch.Tensor, Any]]) -> None:
        for local, source, copy, target in moves:
            remember_copy(local, source, copy, target)

    def hands_out(self, tensor: DTensor) -> None:
        if current_activation() is not None:
            note_local(tensor)
            note_locals()
        hand_out(tensor, is_local=True)

    def hands_out_memory(self, tensor: DTensor) -> None:
        hand_out(tensor)

    def hands_out_summand(self, tensor: DTensor) -> None:
        """Tell scripts and libraries that read an output; code in a forward computes with summands on purpose."""
        if current_activation() is None and hash(tensor.device_mesh) in HASHES_OF_CHECKED_MESHES and called_by_user(3):
            warnings.warn(
                f"to_local() of a DTensor of shape {tuple(tensor.shape)} placed as {tuple(tensor.placements)}, a "
                "pending sum, is this rank's summand, not a value: read the value with x.full_tensor() on every "
                "rank; or let the model return whole tensors, by the entry `<out>: R` of the plan",
                PendingSumWarning,
                stacklevel=3,
            )

    def wrote(self, tensor: DTensor) -> None:
        write_through(tensor, sees_reads=current_activation() is not None)

    def reads(self, tensor: DTensor, how: str, for_python: bool) -> None:
        if for_python:
            hand_out(tensor)
        if step_checks(tensor.device_mesh) is None:
            return
        if for_python or running_module() is None:  # inside of a forward, the model's own ops run on all ranks
            check_read(tensor, how)

    def swaps(self) -> None:
        activation = current_activation()
        if activation is not None and activation.recorder is not None:
            activation.recorder.give_up("it swaps tensors, as .to() of a module that it makes does")

    def begins_backward(self, losses: Sequence[Any], gradients: Sequence[Any], creates_graph: bool) -> None:
        if follows_graphs() and running_module() is None:
            describe_graphs(losses, gradients, creates_graph=creates_graph)

    def names_edge(self, tensor: DTensor) -> None:
        if running_module() is None:  # a recorded forward asks for those of all tensors
            refuse_edge(tensor)

    def moves(self, tensor: DTensor, placements: tuple[Any, ...], how: str) -> None:
        if step_checks(tensor.device_mesh) is not None:
            check_move(spec_of(tensor), placements, how)

    def plain_value(self, op: Any, name: str, tensor: torch.Tensor, mesh: Any) -> None:
        note_plain_value(str(op), name, tensor, mesh)

    def mixed_sizes(self, name: str, operands: Any) -> None:
        _refuse_parts(name, [*tensors_in(operands)])

    def mixed(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _refuse_collective(op, args)
        return run_mixed(op, args, kwargs)

    def plain_operand(self, op: Any, tensor: torch.Tensor) -> bool:
        """In backward too: the zeros that stand for outputs of ``split`` without a gradient are plain."""
        if op._schema.name.startswith("c10d::"):
            raise OpPlacementError(
                f"the script calls the collective {_collective(op)} with a DTensor and plain tensors. {_ARE_GLOBAL}"
            )
        return running_module() is not None

    def no_strategy(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gather, run on every rank, keep this rank's part of what was written in place; each index of lists by itself, as
        on vescale's placements."""
        if is_foreach(op):
            return run_op(op, args, kwargs, schema_of(op, args, kwargs))
        _refuse_collective(op, args)
        if running_module() is None:
            return _outside(op, args, kwargs)
        return _replicated(op, args, kwargs)


def _outside(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same outside of a model: on the mesh of one all ranks read what is cut; elsewhere of what each rank has whole."""
    found = [x for x in (*tensors_in(args), *tensors_in(kwargs)) if isinstance(x, DTensor)]
    if not found:
        return NotImplemented
    if step_checks(found[0].device_mesh) is None:
        is_whole = all(placement.is_replicate() for x in found for placement in x.placements)
        return _replicated(op, args, kwargs) if is_whole else NotImplemented
    for x in found:
        check_read(x, f"an operand of {op}")
    return _replicated(op, args, kwargs)


def _refuse_collective(op: Any, args: tuple[Any, ...]) -> None:
    """``dist.all_reduce(loss)``: a DTensor is the global tensor, of which a collective would make a multiple."""
    if not op._schema.name.startswith("c10d::"):
        return
    found = next((x for x in tensors_in(args) if isinstance(x, DTensor)), None)
    if found is not None and step_checks(found.device_mesh) is not None:
        raise OpPlacementError(
            f"the script calls the collective {_collective(op)} on a DTensor of shape {tuple(found.shape)} placed as "
            f"{tuple(found.placements)}. {_ARE_GLOBAL}"
        ) from None


def _collective(op: Any) -> str:
    return str(op._schema.name).removeprefix("c10d::").rstrip("_")


_ARE_GLOBAL = (
    "Outputs, losses and gradients of a parallelized model are already global: remove the collective, and any "
    "division by the number of ranks. x.full_tensor() is the whole value, x.to_local() this rank's part. Wrappers "
    "that broadcast parameters (DistributedDataParallel around a larger module, ZeroRedundancyOptimizer) are not "
    "needed: parallelize the whole module, and use an ordinary optimizer"
)


def _enter_in_ledger(op: str, local: torch.Tensor, source: Any, target: Any) -> None:
    """DTensor communicates by itself here; say what, axis by axis, with the bytes of the usual algorithm."""
    mesh, size = source.mesh, local.numel() * local.element_size()
    for axis, (before, after) in enumerate(zip(source.placements, target.placements)):
        num_ranks = mesh.size(axis)
        if num_ranks == 1 or before == after or before.is_replicate() or (after.is_partial() and before.is_shard()):
            continue
        if before.is_partial():
            kind, moved = ("all_reduce", 2) if after.is_replicate() else ("reduce_scatter_v", 1)
            moved = moved * size * (num_ranks - 1) // num_ranks
        elif after.is_replicate():
            kind, moved = "all_gather_v", size * (num_ranks - 1)
        else:
            kind, moved = "all_to_all_v", size * (num_ranks - 1) // num_ranks
        record(kind, num_ranks, moved, requester=f"implicit: {op}", group=mesh.get_group(axis))


def _replicated(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any op without a rule of its own: correct on every mesh, at the price of gathering its operands."""
    found = [x for x in (*args, *kwargs.values()) for x in (x if isinstance(x, list | tuple) else (x,))]
    mesh = next(x for x in found if isinstance(x, DTensor)).device_mesh
    whole = (Replicate(),) * mesh.ndim

    def whole_part(x: Any) -> Any:
        if not isinstance(x, DTensor):
            return x
        gathered = bring(x, whole, str(op), None)
        if is_view(op):
            remember_copy(local_of(x), spec_of(x), local_of(gathered), spec_of(gathered))
        return local_of(gathered)

    def wrapped(x: torch.Tensor) -> DTensor:
        return make_dtensor(x, make_spec(mesh, whole, x.shape, x.stride(), x.dtype))

    with no_torch_function():
        new_args, new_kwargs = map_tensors(whole_part, tuple(args)), map_tensors(whole_part, dict(kwargs))
        result = op(*new_args, **new_kwargs)
        written = None
        for position, argument in enumerate(op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[position] if position < len(args) else kwargs[argument.name]
                copies = new_args[position] if position < len(args) else new_kwargs[argument.name]
                for old, new in zip(tensors_in(written), tensors_in(copies)):
                    if isinstance(old, DTensor):
                        note_write(new)  # which may be what a collective gave, and is kept
                        write_back(old, new, make_spec(mesh, whole, old.shape, old.stride(), old.dtype))
                        write_through(old, sees_reads=current_activation() is not None)
        if not op._schema.returns:
            return None
        return written if written is not None else map_tensors(wrapped, result)
