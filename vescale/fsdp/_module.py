"""``FSDPModule``: the methods of a module that was given to ``fully_shard``, those of PyTorch's FSDP2."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import UnshardHandle as StockUnshardHandle

from vescale.comm import group_of_ranks
from vescale.compat import note, split_backwards_by
from vescale.errors import ArgumentTypeError, FullyShardError, NotPicklableError, UnsupportedSettingError, kind_of
from vescale.fsdp._bucket import GRADIENT_PLACE, PlaceOfGradient
from vescale.fsdp._contract import Stage
from vescale.fsdp._group import ParameterGroup
from vescale.fsdp._parameter import leaf_of
from vescale.fsdp._state import ModuleState, state_of
from vescale.fsdp._unfilled import mark_unfilled, places_on_meta

# Linear layers that compute their weight's gradient where it is reduced from: no copy at all.


def use_direct_gradients(group: ParameterGroup, enable: bool) -> None:
    """Switch the layers that run ``nn.Linear``'s forward and whose weight is in the group; others are left alone."""
    for parameter in group.parameters:
        for module, name in parameter.slots:
            if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
                continue  # a class that fully_shard has made of Linear does run it
            if name != "weight" or parameter.unsharded_spec is not None:
                continue
            own = module.__dict__.get("forward")
            if enable and own is None:
                note("fsdp._module:instance", module)
                module.forward = types.MethodType(_forward, module)  # type: ignore[method-assign]
            elif not enable and getattr(own, "__func__", None) is _forward:
                del module.forward


def _forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    weight = self.weight
    place: PlaceOfGradient | None = weight.__dict__.get(GRADIENT_PLACE)
    unreduced = None if place is None else place.unreduced
    if (
        place is None
        or unreduced is None
        or not (torch.is_grad_enabled() and weight.requires_grad)
        or torch.is_autocast_enabled(input.device.type)
    ):
        return nn.functional.linear(input, weight, self.bias)
    return _Linear.apply(input, weight, self.bias, (unreduced, place.index))


class _Linear(torch.autograd.Function):
    """``linear`` whose backward multiplies into the place of the weight's gradient, if that is free."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, place: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.place = place
        return nn.functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        for_input = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            for_input = grad @ weight
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[1]:
            unreduced, index = ctx.place
            # With a graph of the backward itself (create_graph) the gradient must be an ordinary, differentiable result.
            out = None if torch.is_grad_enabled() else unreduced.place_for(index, rows.dtype)
            columns = input.reshape(-1, input.shape[-1])
            # Autograd keeps a gradient tensor that nobody else refers to, and adds into copies of others.
            for_weight = torch.mm(rows.t(), columns) if out is None else torch.mm(rows.t(), columns, out=out)
        if ctx.needs_input_grad[2]:
            for_bias = rows.sum(0)
        return for_input, for_weight, for_bias, None


class GradientReductionHandle:
    """A reduction in flight, from ``module.finalize_backward(async_op=True)``."""

    def __init__(self, state: ModuleState | None) -> None:
        self._state = state

    def wait(self) -> None:
        """Complete the gradients; the current stream can use them."""
        state, self._state = self._state, None
        if state is not None:
            state.conclude_accumulation()


class UnshardHandle(StockUnshardHandle):
    """An unshard in flight, from ``module.unshard(async_op=True)``."""

    def __init__(self, groups: Sequence[ParameterGroup] = ()) -> None:
        self._groups = tuple(groups)

    def wait(self) -> None:
        """The unsharded parameters are registered, and the current stream can use them."""
        for group in self._groups:
            group.wait_for_unshard()
            group.memory.is_held = True
        self._groups = ()


class FSDPModule:
    """Mixed into the class of a module by :func:`fully_shard`: ``FSDPLinear(FSDPModule, Linear)``.

    Methods that take ``recurse`` act on all such modules below, too. What is set holds until it is set again.
    """

    _original: type[nn.Module]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """The original class, unsharded: what containers construct when they are sliced."""
        original: Any = cls._original
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    # Unshard and reshard

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own groups (not those of modules below), in ``param_dtype``.

        With ``async_op`` returns a handle at once; forward waits by itself. One all-gather a bucket.
        """
        self._state.unshard_by_hand()
        handle = UnshardHandle(self._state.groups)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's own gathered parameters and register the sharded ones; inside of its forward
        according to ``reshard_after_forward``."""
        in_forward = self._state.stage is Stage.FORWARD
        for group in self._state.groups:
            if in_forward:
                group.reshard_in_forward()
            else:
                group.reshard()

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: forget the iteration, its gradients included; on the root only.

        Raises RuntimeError on a module that is not the root.
        """
        self._state.abandon_iteration()

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: this module's parameters are not needed in backward (an embedding's).
        ``unshard_in_backward``: whether backward gathers them. Default: True.
        """
        for group in self._state.groups:
            group.unshard_in_backward = unshard_in_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change ``reshard_after_forward``, the root's, too. Raises ValueError for anything but a bool."""
        if not isinstance(reshard_after_forward, bool):
            raise FullyShardError(
                f"set_reshard_after_forward got {reshard_after_forward!r}; expected a bool (only fully_shard itself "
                "takes a number of ranks)"
            )
        for state in self._states(recurse):
            state.reshard_root = reshard_after_forward
            for group in state.groups:
                group.reshard_after_forward, group.is_kept_by_default = reshard_after_forward, False

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False keeps parameters gathered until the next forward, for gradient accumulation.
        ``reshard_after_backward``: whether backward drops the gathered copy. Default: True.
        """
        for group in self._groups(recurse):
            group.reshard_after_backward = reshard_after_backward

    # Prefetch

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Start to gather these modules when this one's forward starts.
        ``modules``: sharded by ``fully_shard``, in the order of their forwards.
        """
        self._state.forward_prefetch = _states_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Start to gather these modules when this one's backward starts, instead of the one that ran before it.
        ``modules``: sharded by ``fully_shard``, in the order of their backwards.
        """
        self._state.backward_prefetch = _states_of(modules)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """What the next forward's gathers wait for, instead of all that the current stream has been given; used once.
        ``event``: recorded on the stream of the optimizer's step.
        """
        self._state.iteration.post_optimizer_event = event

    # Gradients

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: the next backward does not wait for its reductions; more microbatches follow.
        ``is_last_backward``: whether the next backward is the step's last one.
        """
        split_backwards_by(leaf_of)  # such stages call this before each backward
        self._state.iteration.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Announce calls of :meth:`finalize_backward`. A backward that synchronizes reduces at its end either way.
        ``enabled``: whether they will come.
        """
        if enabled:
            split_backwards_by(leaf_of)  # such stages call this before each forward

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce what backwards without sync have left, of the whole tree that this module is the root of; nothing where
        they have left nothing. Communication: one reduction a group; every rank calls it.

        ``async_op``: return a handle, whose ``wait()`` completes the gradients; by default they are complete.
        """
        state = self._state
        has_left = state.comm.has_accumulated
        if has_left:
            for each in state.tree_states():
                each.reduce_accumulated()
        handle = GradientReductionHandle(state if has_left else None)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: gradients accumulate unreduced, in ``reduce_dtype``, without communication.
        ``requires_gradient_sync``: whether backward reduces gradients. Default: True.
        """
        for group in self._groups(recurse):
            group.reduce_gradients = requires_gradient_sync
            group.options.all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """HSDP. False: gradients are reduce-scattered, and their sum over the replicas stays pending.
        ``requires_all_reduce``: whether backward adds the replicas' sums, too. Default: True.
        """
        for group in self._groups(recurse):
            group.options.all_reduce = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by this instead of the number of data-parallel ranks. ``factor``: the divisor."""
        for group in self._state.groups:
            group.options.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of :meth:`set_gradient_divide_factor`. ``factor``: the divisor."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Communicate sums, and divide in a separate step. ``enable``: whether backends only compute sums."""
        for group in self._state.groups:
            group.options.sum_only = enable

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """True: a parameter without a gradient gets zeros. False: it gets what other ranks contributed, None where no
        rank did. Communication is the same on every rank either way.

        ``reduce_scatter_unused_params``: whether a parameter that nobody used gets a gradient of zeros.
        """
        for group in self._groups(recurse):
            group.options.unused_as_zero = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many groups' unreduced gradients may be in flight at once. Raises TypeError, or ValueError below 1.
        ``max_input_buffers``: at least 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise ArgumentTypeError(f"max_input_buffers is {max_input_buffers!r}; expected an int of at least 1")
        if max_input_buffers < 1:
            raise FullyShardError(f"max_input_buffers is {max_input_buffers}; expected at least 1")
        for state in self._states(recurse):
            state.max_gradient_buffers = max_input_buffers
            state.comm.max_gradient_buffers = max(state.comm.max_gradient_buffers, max_input_buffers)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """``hook(piece)`` is called with each bucket's reduced flat piece: after the all-reduce of HSDP, else after the
        reduce-scatter, before division by a custom factor. ``stream``: where, without HSDP. Raises ValueError with it."""
        groups = self._single_group("set_all_reduce_hook")
        for group in groups:
            if stream is not None and group.axes.replicate:
                raise FullyShardError(
                    "set_all_reduce_hook got a stream, but the all-reduce of HSDP already has one; leave stream out"
                )
            group.options.hook, group.options.hook_stream = hook, stream

    def set_direct_linear_gradients(self, enable: bool = True, *, recurse: bool = True) -> None:
        """True: ``nn.Linear`` layers compute the gradient of their weight where the reduce-scatter takes it from, a buffer
        of its own, instead of copying it there. No effect on tensor subclasses, where ``reduce_dtype`` is not the dtype of
        the computation, and on gradients that are added to earlier ones (accumulation without sync, a layer used twice), or
        differentiated (``create_graph``).

        ``enable``: True turns it on, False off.
        """
        for group in self._groups(recurse):
            use_direct_gradients(group, enable)

    def set_in_place_gradients(self, enable: bool = True, *, recurse: bool = True) -> None:
        """True: a gradient takes the place of the gathered parameter, and is reduced from there, as soon as autograd has
        completed it, and not only when the module is resharded: less memory in backward by the gradients of one module.

        Ops that contribute to a parameter's gradient have run by then. What reads a parameter later in the same backward
        without contributing is refused where autograd can tell (a saved ``detach()``: RuntimeError, "modified by an inplace
        operation"; two gradients in one backward, from reentrant checkpointing inside of the module: RuntimeError) and
        reads a gradient where it cannot: ``.data``, or a hook that reads the parameter. So it is off by default.

        No effect on tensor subclasses, where ``reduce_dtype`` is not the dtype of the computation, where parameters stay
        (``set_reshard_after_backward(False)``), in backwards that accumulate without sync, and on modules with reentrant
        checkpointing. Weights of ``set_direct_linear_gradients`` are copied, too. Must be the same on all ranks.

        ``enable``: True turns it on, False off.
        """
        for group in self._groups(recurse):
            group.options.in_place = enable

    # How to communicate

    def set_custom_all_gather(self, comm: Any) -> None:
        """``comm(output_tensor=, input_tensor=, group=, async_op=)`` gathers, between the buffers of this engine;
        ``comm.allocate`` is not called, for parameters are views of the output."""
        for group in self._single_group("set_custom_all_gather"):
            group.memory.custom_all_gather = comm

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """``comm(output_tensor=, input_tensor=, group=, op=, async_op=)`` reduces, between the buffers of this engine;
        ``comm.allocate`` is not called."""
        for group in self._single_group("set_custom_reduce_scatter"):
            group.options.custom_reduce_scatter = comm

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce-scatter on a separate process group, so that it can overlap with all-gathers; modules over the same
        ranks share it. Collective: one rendezvous for each distinct set of ranks.

        ``enable``: True turns it on, False off.
        """
        for group in self._groups(recurse):
            ranks = dist.get_process_group_ranks(group.axes.shard_group)
            group.options.group = group_of_ranks(tuple(sorted(ranks)), "reduce-scatter") if enable else None

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take communication buffers from the process group's own memory where its backend has such (NCCL): a memory pool
        on its allocator. Other backends have none, and nothing changes.

        ``enable``: True turns it on, False off.
        """
        for group in self._state.groups:
            group.memory.use_backend_memory(enable)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Not supported: raises NotImplementedError for True, and changes nothing. Gathered parameters share one buffer a
        group, which each gather allocates anew.

        ``keep``: whether memory outlives :meth:`reshard`.
        """
        if keep:
            raise UnsupportedSettingError(
                f"set_keep_unsharded_storage(True) on {kind_of(self)}: a group is gathered into one buffer, which is "
                "freed when it is resharded. Delete this call; to keep the addresses, call unshard() once before a "
                "capture, or pass reshard_after_forward=False to fully_shard"
            )

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Not supported, whatever the backend: raises NotImplementedError, and changes nothing.

        FSDP2 gathers into a staging buffer in symmetric memory and copies out of it. Here parameters are views of what is
        gathered into, so that memory would have to be symmetric while it is used, by ranks that free it when they like;
        every allocation would need a rendezvous, which is collective, in the middle of a backward.

        ``backend``: of symmetric memory, as FSDP2 takes it.
        """
        raise UnsupportedSettingError(
            f"set_symm_mem_for_comm({backend!r}) on {kind_of(self)}: its parameters are views of the buffer that an "
            "all-gather writes, which is freed and reallocated each time, but symmetric memory needs a rendezvous of "
            "all ranks for each allocation. Delete this call, or replace it by "
            "set_allocate_memory_from_process_group_for_comm(True), which registers the buffers with NCCL"
        )

    # Inside

    @property
    def _state(self) -> ModuleState:
        state = state_of(self)  # type: ignore[arg-type]
        assert state is not None
        return state

    def _states(self, recurse: bool) -> Iterator[ModuleState]:
        seen: set[int] = set()
        modules: Any = self.modules() if recurse else [self]  # type: ignore[attr-defined]
        for module in modules:
            state = state_of(module)
            if state is not None and id(state) not in seen:
                seen.add(id(state))
                yield state

    def _groups(self, recurse: bool) -> Iterator[ParameterGroup]:
        for state in self._states(recurse):
            yield from state.groups

    def _single_group(self, what: str) -> list[ParameterGroup]:
        groups = self._state.groups
        if len(groups) > 1:
            raise FullyShardError(
                f"{what} on a module with {len(groups)} groups over different meshes (from shard_placement_fn), for "
                "which it would have different meanings; pass the modules of each mesh to fully_shard separately"
            )
        return groups

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A sharded copy with buffers of its own, at rest, without gradients: for an EMA of the weights."""
        states = [state for state in self._states(True) if id(state) not in memo]
        made = ModuleState.copy_into(states, memo)
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for key, value in self.__getstate__().items():  # type: ignore[attr-defined]  # as for any module: without what is called in place of its call
            twin.__dict__[key] = copy.deepcopy(value, memo)
        for state in made:
            state.take_place(memo)
        return twin

    def __copy__(self) -> Any:
        twin = object.__new__(type(self))
        state: Any = self.__getstate__()
        twin.__dict__.update(state)
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotPicklableError(
            f"a {type(self).__name__}, which fully_shard or a unit of a plan gathers, cannot be pickled: its parameters are "
            "parts in the buffers of this process. Save model.state_dict() (torch.distributed.checkpoint), and shard a "
            "fresh model before loading"
        )

    def _get_name(self) -> str:
        """Of the module's own class. Tools choose by it what they compute: Trainer, whether labels are shifted."""
        return type(self)._original.__name__

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.reshard()
        without_values = places_on_meta(self)  # type: ignore[arg-type]
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for group in self._state.groups:
            group.rebuild()
        mark_unfilled(without_values)
        return result


def _states_of(modules: Sequence[FSDPModule]) -> list[ModuleState]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise FullyShardError(
                f"expected modules to which fully_shard has been applied, got {type(module).__name__}; shard it "
                "first, or leave it out"
            )
    return [module._state for module in modules]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of ``module`` gather and reshard as ``forward`` does. Nothing happens for other modules.

    Raises ValueError when there is no such method.

    ``method_name``: of a method other than ``forward``, such as ``"generate"``.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise FullyShardError(
            f"{type(module).__name__} has no method {method_name!r}; pass the name of one of its methods"
        )

    function = getattr(method, "__func__", None)  # of whichever module it is called on: modules can be copied

    def with_parameters(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._state
        args, kwargs = state.before_forward(self, args, kwargs)
        try:
            output = function(self, *args, **kwargs) if function is not None else method(*args, **kwargs)
        except BaseException:
            state.after_exception(self, args, None)
            raise
        return state.after_forward(self, args, output)

    with_parameters.__name__, with_parameters.__doc__ = method_name, getattr(method, "__doc__", None)
    setattr(module, method_name, with_parameters.__get__(module, type(module)))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots, such as the stages of a pipeline, share streams and memory in flight.

    Raises ValueError for a module to which ``fully_shard`` has not been applied.

    ``modules``: roots to which ``fully_shard`` has been applied.
    """
    if not modules:
        return
    first, *others = _states_of(modules)
    for root in others:
        root.iteration.comm = first.comm
        for state in root.tree_states():
            for group in state.groups:
                group.memory.comm = first.comm
