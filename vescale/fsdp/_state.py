"""``ModuleState``: the hooks that carry a module through an iteration, and the root of a tree of such modules."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale.compat import FSDP2State, hides_tensors, in_backward, map_tensors, tensors_in
from vescale.fsdp._calls import Call, Calls
from vescale.fsdp._context import CommContext, TreeContext
from vescale.fsdp._group import ParameterGroup
from vescale.fsdp._parameter import Slot
from vescale.fsdp._phase import Phase
from vescale.fsdp._preflight import compare_groups
from vescale.fsdp._registered import check_distinct, has_replaced, warn_of_strays

__all__ = ["ModuleState", "state_of"]

_STATES = "_vescale_fsdp_state"


def state_of(module: nn.Module) -> ModuleState | None:
    """The state of a module that was given to ``fully_shard``, else None."""
    return module.__dict__.get(_STATES)


class ModuleState(FSDP2State):
    """One call of ``fully_shard``: its modules and the groups of their parameters.

    ==================  ============================================================================================
    moment              what happens
    ==================  ============================================================================================
    before forward      (root: lanes wait for the optimizer) inputs are cast; groups are gathered; explicit prefetch;
                        a hook waits for the gradients of the inputs
    after forward       groups reshard; a hook waits for the first gradient of an output; outputs are cast
    an output's         groups are gathered again; the group that ran before is prefetched
    gradient is there
    all inputs'         groups reshard, and their gradients are reduced
    gradients are
    end of backward     whatever has not been reduced is; sharded gradients are complete
    ==================  ============================================================================================

    The first state of a tree to run forward is its root: names, prefetch order and the end of backward are the root's.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[ParameterGroup],
        *,
        mp_policy: MixedPrecisionPolicy,
        device: torch.device,
        reshard_root: bool | None,
        hooks_first: bool = True,
        ignored: Sequence[Slot] | None = None,
    ) -> None:
        self.modules = tuple(modules)
        self.groups = list(groups)
        self.mp_policy = mp_policy
        self.device = device
        self.phase = Phase.IDLE
        self.is_root: bool | None = None
        self.reshard_root = reshard_root
        """What the user said of ``reshard_after_forward``; None: the root keeps its parameters."""
        self.ignored = ignored
        """Parameters that belong to no group on purpose; None: those outside of groups are somebody else's."""
        self.tree = TreeContext()
        self.comm = CommContext(device)
        self.forward_prefetch: list[ModuleState] = []
        self.backward_prefetch: list[ModuleState] = []
        self.max_gradient_buffers = 1
        self._still_to_run: set[nn.Module] = set()
        self._calls = Calls()
        self._call: Call | None = None  # that is running forward
        for module in modules:
            module.__dict__[_STATES] = self
        self._install_hooks(hooks_first)

    # Hooks------

    def _install_hooks(self, first: bool) -> None:
        together = len(self.modules) > 1
        for module in self.modules:
            module.register_forward_pre_hook(
                self._before_one if together else self.before_forward, prepend=first, with_kwargs=True
            )
            if together:
                module.register_forward_hook(self._after_one, always_call=True)
            else:
                module.register_forward_hook(self.after_forward)
                module.register_forward_hook(self.after_exception, always_call=True)
        owners = {slot.module for group in self.groups for p in group.parameters for slot in p.slots}
        for owner in owners:
            owner.register_state_dict_pre_hook(self.to_rest)
            owner.register_load_state_dict_pre_hook(self.to_rest)
            owner.register_load_state_dict_post_hook(self._parameters_may_be_new)

    def to_rest(self, *_: Any) -> None:
        """The registered parameters are the sharded ones."""
        for group in self.groups:
            group.phase, before = Phase.IDLE, group.phase
            group.reshard()
            group.phase = before

    def _parameters_may_be_new(self, *_: Any) -> None:
        for group in self.groups:
            group.is_stale = True

    def _before_one(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Of several modules in one group: the first one of a pass begins for all."""
        if not self._still_to_run:
            self._still_to_run.update(self.modules)
        return self.before_forward(module, args, kwargs)

    def _after_one(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The last one of a pass ends for all; a module that runs once more is only cast."""
        if module in self._still_to_run:
            self._still_to_run.discard(module)
            if not self._still_to_run:
                return self.after_forward(module, args, output)
        return self._cast_outputs(output)

    # Forward

    @torch.compiler.disable
    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.tree.awaits_end_of_backward and not in_backward():  # an exception broke a backward off
            self.tree.states[0].abandon_iteration()
        if self.phase is Phase.BACKWARD:  # activation checkpointing runs this forward anew inside of its backward
            is_recorded = self._calls.are_awaited
            for group in self.groups:
                group.recompute(is_recorded=is_recorded)
            return self._cast_inputs(args, kwargs)
        begins = self.phase is not Phase.FORWARD
        if begins:
            args, kwargs = self._begin_iteration(args, kwargs)
        self.phase = Phase.FORWARD
        args, kwargs = self._cast_inputs(args, kwargs)
        for group in self.groups:
            group.before_forward()
        if begins:
            args, kwargs = self._watch_inputs(args, kwargs)
            for other in self.forward_prefetch:
                for group in other.groups:
                    group.prefetch(Phase.FORWARD)
        return args, kwargs

    @torch.compiler.disable
    def after_forward(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        if self.phase is Phase.BACKWARD:
            return self._cast_outputs(output)
        recomputing = in_backward()
        is_watched = self._watch_outputs(output)
        for group in self.groups:
            group.after_forward(recomputing=recomputing, is_watched=is_watched)
        self.phase = Phase.IDLE
        if self.tree.forward_root is self:
            output = self._conclude_incomplete(output)
            self.tree.forward_root = None
            self.comm.make_room(keep=0)
        return self._cast_outputs(output)

    def _begin_iteration(self, args: Any, kwargs: Any) -> Any:
        """What the outermost module of an iteration does once."""
        self.become_root()
        if self.tree.forward_root is not None:
            return args, kwargs
        if not in_backward():
            groups = [group for state in self.tree.states for group in state.groups]
            if any(has_replaced(group.parameters) for group in groups):
                check_distinct(parameter for group in groups for parameter in group.parameters)
            for group in groups:
                group.begin_iteration()
        self.tree.forward_root = self
        lane, event = self.comm.gather_lane, self.tree.post_optimizer_event
        if event is None:
            lane.wait_for_compute()  # for the optimizer, which may still be writing parameters
        else:
            lane.wait_event(event)
            self.tree.post_optimizer_event = None
        if self.device.type != "cpu":
            move = functools.partial(_to_device, self.device)
            args, kwargs = map_tensors(move, args), map_tensors(move, kwargs)
        return args, kwargs

    @torch.compiler.disable
    def after_exception(self, module: nn.Module, args: Any, output: Any) -> None:
        """Parameters are at rest, and the next forward begins anew. Also called when there was no exception: then the
        forward has ended already."""
        if self.phase is not Phase.FORWARD:
            return
        self._forget_forward()
        if self.tree.forward_root is self:
            self.tree.forward_root = None
            self.comm.post_forward_order.clear()
            for state in self.tree.states:
                state._forget_forward()
                state.forget_forward_order()

    def _forget_forward(self) -> None:
        self.to_rest()
        self._still_to_run.clear()
        self._call = None
        if self.phase is Phase.FORWARD:
            self.phase = Phase.IDLE
            for group in self.groups:
                group.phase = Phase.IDLE

    def _conclude_incomplete(self, output: Any) -> Any:
        """Groups of several modules of which only some have run end their forward with the root's."""
        for state in reversed(self.tree.states):
            if state is not self and state._still_to_run:
                is_watched = state._watch_outputs(output)
                for group in state.groups:
                    group.after_forward(recomputing=in_backward(), is_watched=is_watched)
                state.phase = Phase.IDLE
                state._still_to_run.clear()
                output = state._cast_outputs(output)
        return output

    def _cast_inputs(self, args: Any, kwargs: Any) -> Any:
        dtype = self.mp_policy.param_dtype
        if dtype is None or not self.mp_policy.cast_forward_inputs:
            return args, kwargs
        cast = functools.partial(_cast, dtype)
        return map_tensors(cast, args), map_tensors(cast, kwargs)

    def _cast_outputs(self, output: Any) -> Any:
        dtype = self.mp_policy.output_dtype
        return output if dtype is None else map_tensors(functools.partial(_cast, dtype), output)

    # Backward

    def _watch_inputs(self, args: Any, kwargs: Any) -> Any:
        """Find out when the gradients of the inputs are complete. Inputs become views of themselves, so that what other
        modules do with the same tensors does not count; a view may be written to like the tensor itself."""
        if not self.groups or not torch.is_grad_enabled():
            return args, kwargs
        watched: list[torch.Tensor] = []

        def watch(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            watched.append(tensor.view_as(tensor))
            return watched[-1]

        args, kwargs = map_tensors(watch, args), map_tensors(watch, kwargs)
        if watched:
            self._call = self._calls.add(watched, self._after_backward)
        return args, kwargs

    def _watch_outputs(self, output: Any) -> bool:
        """Find out when a backward begins. False: it may begin unseen, from tensors inside of an object."""
        call, self._call = self._call, None
        if not torch.is_grad_enabled():
            return True
        found = False
        for tensor in tensors_in(output):
            if not tensor.requires_grad:
                continue
            found = True
            tensor.register_hook(self._begin_backward_of(call, tensor.grad_fn))
            base = tensor._base
            if base is not None and base.grad_fn is not None:
                # An in-place op on a view drops the view's own history, and the hook with it; its base's stays.
                base.grad_fn.register_prehook(self._begin_backward_of(call, base.grad_fn))
        return found or not hides_tensors(output)

    def _begin_backward_of(self, call: Call | None, node: Node | None) -> Callable[..., None]:
        """A hook of an output's node, which holds the call."""
        if call is None or not call.may_be_held_by(node):
            return self._before_backward
        return functools.partial(self._before_backward, call)

    @torch.compiler.disable
    def _before_backward(self, *_: Any) -> None:
        self.phase = Phase.BACKWARD
        self.tree.at_end_of_backward(self.comm)
        for group in self.groups:
            group.before_backward(prefetch=not self.backward_prefetch)
        for other in self.backward_prefetch:
            for group in reversed(other.groups):
                group.prefetch(Phase.BACKWARD)

    @torch.compiler.disable
    def _after_backward(self) -> None:
        self.tree.at_end_of_backward(self.comm)
        is_last = not self._calls.are_awaited
        for group in reversed(self.groups):
            group.after_backward(is_last=is_last)

    def conclude_backward(self) -> None:
        self._still_to_run.clear()
        for group in reversed(self.groups):
            group.conclude_backward()
        self.phase = Phase.IDLE

    def forget_forward_order(self) -> None:
        for group in self.groups:
            group.forget_forward_order()

    # Gradients that are reduced apart from a backward, after several without sync: by a pipeline schedule

    def tree_states(self) -> Sequence[ModuleState]:
        return self.tree.states or [self]

    def reduce_accumulated(self) -> None:
        self.tree.expect_conclusion()
        for group in reversed(self.groups):
            group.reduce_accumulated()

    def conclude_accumulation(self) -> None:
        self.tree.conclude(self.comm)

    # Copies

    @staticmethod
    def copy_into(states: Sequence[ModuleState], memo: dict[int, Any]) -> list[ModuleState]:
        """Copies of the states at rest, and of their parameters, entered in a deepcopy's memo. :meth:`take_place` completes
        them when the modules have been copied."""
        made = []
        for state in states:
            twin = copy.copy(state)
            memo[id(state)] = twin
            twin.groups = [group.copy() for group in state.groups]
            for group, copied in zip(state.groups, twin.groups, strict=True):
                for parameter, other in zip(group.parameters, copied.parameters, strict=True):
                    memo[id(parameter.sharded)] = other.sharded
            twin.phase, twin.is_root = Phase.IDLE, None
            twin.tree, twin.comm = TreeContext(), CommContext(state.device)
            twin._still_to_run, twin._calls = set(), Calls()
            made.append(twin)
        return made

    def take_place(self, memo: dict[int, Any]) -> None:
        """Belong to the copies of the modules."""
        self.modules = tuple(copy.deepcopy(module, memo) for module in self.modules)
        self.forward_prefetch = [memo.get(id(state), state) for state in self.forward_prefetch]
        self.backward_prefetch = [memo.get(id(state), state) for state in self.backward_prefetch]
        if self.ignored is not None:
            self.ignored = [Slot(copy.deepcopy(module, memo), name) for module, name in self.ignored]
        for group in self.groups:
            for parameter in group.parameters:
                parameter.slots = [Slot(copy.deepcopy(module, memo), name) for module, name in parameter.slots]

    # The root

    def become_root(self) -> None:
        """The first forward: this state's module is the root of all states below it. Compares with the other ranks.

        Raises:
            RuntimeError: a state below has been a root already, or the root is a list of modules.
            ValueError: parameters were tied after ``fully_shard``.
            ShardingMismatchError: the ranks have built different groups, or do not come; on every rank.
        """
        if self.is_root is not None:
            return
        if len(self.modules) > 1:
            kinds = ", ".join(type(module).__name__ for module in self.modules)
            raise RuntimeError(
                f"the first forward ran a list of modules ({kinds}) that fully_shard was given together; run the module "
                "that contains them, which must be given to fully_shard, too"
            )
        (root,) = self.modules
        found: list[ModuleState] = []
        for path, module in root.named_modules():
            state = state_of(module)
            if state is None:
                continue
            for group in state.groups:
                group.path = f"{group.path}, {path}" if state in found else path
            if state in found:
                continue
            if state is not self and state.is_root is not None:
                raise RuntimeError(
                    f"{path} has run forward as a root of its own before {type(root).__name__}, which contains it; run the "
                    "outermost module that fully_shard was given first"
                )
            found.append(state)
        for state in found:
            state.is_root = state is self
            state.tree, state.comm = self.tree, self.comm
            for group in state.groups:
                group.comm = self.comm
                group.on_gradients = functools.partial(self.tree.at_end_of_backward, self.comm)
        self.tree.states = found
        self.comm.max_gradient_buffers = max(state.max_gradient_buffers for state in found)
        if self.reshard_root is None:
            for group in self.groups:
                group.reshard_after_forward, group.is_kept_by_default = False, True
        self._name_parameters(root)
        try:
            self._check_parameters(root)
            self._compare_ranks()
        except Exception:
            for state in found:
                state.is_root = None
            raise
        for state in found:
            for group in state.groups:
                group.rebuild()
                group.prepare()

    def _name_parameters(self, root: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in root.named_parameters()}
        for state in self.tree.states:
            for group in state.groups:
                for parameter in group.parameters:
                    parameter.name = names.get(id(parameter.sharded), parameter.name)

    def _check_parameters(self, root: nn.Module) -> None:
        parameters = [p for state in self.tree.states for group in state.groups for p in group.parameters]
        check_distinct(parameters)
        if self.ignored is not None:
            warn_of_strays(root, parameters, [slot for state in self.tree.states for slot in state.ignored or ()])

    def _compare_ranks(self) -> None:
        along: dict[Any, list[ParameterGroup]] = {}
        for state in self.tree.states:
            for group in state.groups:
                along.setdefault(group.axes.data_parallel.group, []).append(group)
        for process_group, groups in along.items():
            compare_groups(type(self.modules[0]).__name__, groups, process_group)

    def abandon_iteration(self) -> None:
        """See :meth:`FSDPModule.reset_iter_state`."""
        if self.is_root is False:
            raise RuntimeError(
                "reset_iter_state was called on a module that is not the root; call it on the outermost module that "
                "fully_shard was given"
            )
        self.comm.abandon()
        for state in self.tree.states or [self]:
            state._still_to_run.clear()
            state.phase = Phase.IDLE
            for group in state.groups:
                group.abandon()
        self.tree.abandon()


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _to_device(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device, non_blocking=True)
