"""``ModuleState``: the hooks that carry a module through an iteration, and the root of a tree of such modules."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale.compat import (
    Exchanged,
    FSDP2State,
    eagerly,
    guard_call,
    hides_tensors,
    in_backward,
    map_tensors,
    no_torch_function,
)
from vescale.errors import FullyShardStateError, NotPicklableError
from vescale.fsdp._calls import Call, Calls, watch_outputs
from vescale.fsdp._context import CommContext
from vescale.fsdp._contract import MODULE, Move, ResidencyError, Stage
from vescale.fsdp._group import ParameterGroup
from vescale.fsdp._iteration import Iteration
from vescale.fsdp._parameter import Slot
from vescale.fsdp._preflight import compare_groups
from vescale.fsdp._registered import StrayParameters, check_distinct, has_replaced, refuse_transforms
from vescale.fsdp._unfilled import check_filled

# ``check_root``: what is checked once, when the first forward has told which module is the root.


def check_root(root: nn.Module, groups: Sequence[ParameterGroup]) -> None:
    """Give the parameters of ``groups``, which are all below ``root``, their names, and compare them with the other ranks.

    Raises ValueError for parameters that were tied after ``fully_shard``, MissingValuesError for memory without values,
    ShardingMismatchError where ranks differ, and TransformError.
    """
    refuse_transforms("")
    check_filled(root)
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    parameters = [parameter for group in groups for parameter in group.parameters]
    for parameter in parameters:
        parameter.name = parameter.contribution.name = names.get(id(parameter.sharded), parameter.name)
    check_distinct(parameters)
    along: dict[Any, list[ParameterGroup]] = {}
    for group in groups:
        along.setdefault(group.axes.data_parallel.group, []).append(group)
    for process_group, members in along.items():
        described = [
            (parameter.name, f"{tuple(parameter.sharded.shape)} {str(parameter.sharded.dtype).removeprefix('torch.')}")
            for group in members
            for parameter in group.parameters
        ]
        buffers = [
            (f"{group.path or 'the root'}[{number}]", bucket.description)
            for group in members
            for number, bucket in enumerate(group.buckets)
        ]
        numbers = [(group.path or "the root", str(group.memory.number)) for group in members]
        compare_groups(type(root).__name__, described, buffers, numbers, process_group)


_STATES = "_vescale_fsdp_state"


def state_of(module: nn.Module) -> ModuleState | None:
    """The state of a module that was given to ``fully_shard``, else None."""
    return module.__dict__.get(_STATES)


_OF_MODULES = vars(nn.Module()).keys()


def _keeps_graph(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(x, torch.Tensor) and x.grad_fn is not None for x in items)


class ModuleState(FSDP2State):
    """One call of ``fully_shard``: its modules and the groups of their parameters.

    ==================  ============================================================================================
    moment              what happens
    ==================  ============================================================================================
    before forward      (root: gathers wait for the optimizer) inputs are cast; groups are gathered; explicit prefetch;
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
        self.modules, self.groups = tuple(modules), list(groups)
        self.mp_policy, self.device = mp_policy, device
        self.stage = Stage.IDLE
        self.is_root: bool | None = None
        self.reshard_root = reshard_root
        """The user's ``reshard_after_forward``; None: the root keeps its parameters."""
        self.ignored = ignored
        """Parameters that belong to no group on purpose; None: parameters outside of groups are not checked."""
        self.iteration: Iteration[ModuleState] = Iteration(CommContext(device))
        self.forward_prefetch: list[ModuleState] = []
        self.backward_prefetch: list[ModuleState] = []
        self.max_gradient_buffers = 1
        self._strays: StrayParameters | None = None  # of a root
        self._still_to_run: set[nn.Module] = set()
        self._calls = Calls()
        self._call: Call | None = None  # that is running forward
        self._given: Any = None  # its arguments
        self._keepers: list[tuple[dict[str, Any], str]] | None = None  # attributes of modules
        self._exchanged: list[Exchanged] = []  # inputs of the calls that run
        self._parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._running_part: nn.Module | None = None
        self._depth = 0  # of forwards of a module inside of its own
        self._has_ended = False  # the forward, without an exception
        for module in modules:
            module.__dict__[_STATES] = self
        self._install_hooks(hooks_first)

    def _move(self, event: Move) -> None:
        found = MODULE.get((self.stage, event))
        if found is None:
            paths = ", ".join(repr(group.path) for group in self.groups)
            raise ResidencyError(f"module {paths}", self.stage, event, MODULE)
        self.stage = found

    @property
    def comm(self) -> CommContext:
        return self.iteration.comm

    # Hooks

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
            guard_call(module)
        owners = {slot.module for group in self.groups for p in group.parameters for slot in p.slots}
        for owner in owners:
            owner.register_state_dict_pre_hook(self.to_rest)
            owner.register_state_dict_post_hook(functools.partial(self._to_forward))  # takes an attribute
            owner.register_load_state_dict_pre_hook(self._before_load)
            owner.register_load_state_dict_post_hook(self._parameters_may_be_new)

    def unshard_by_hand(self) -> None:
        """See :meth:`FSDPModule.unshard`."""
        if self.iteration.is_broken_off:
            self.iteration.states[0].abandon_iteration()
        if self.iteration.stage is Stage.IDLE:  # else those of the iteration have waited
            self.iteration.order_gathers(is_used=False)
        for group in self.groups:
            group.unshard()

    def to_rest(self, *_: Any) -> None:
        """The registered parameters are the sharded ones; inside of a forward until :meth:`_to_forward`."""
        for group in self.groups:
            if self.stage is not Stage.FORWARD or group.memory.is_held:
                group.reshard()
            else:
                group.memory.leave()

    def _to_forward(self, *_: Any) -> None:
        if self.stage is Stage.FORWARD:
            with no_torch_function():
                for group in self.groups:
                    group.before_forward()

    def _before_load(self, owner: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Plain values of a parameter's shape are the global ones, the same on every rank, which takes its part of them."""
        self.to_rest()
        for group in self.groups:
            for parameter in group.parameters:
                for key in (prefix + slot.name for slot in parameter.slots if slot.module is owner):
                    if key in state:
                        state[key] = parameter.part_of(state[key])

    def _parameters_may_be_new(self, *_: Any) -> None:
        for group in self.groups:
            group.at_rest.is_stale = True
        self._to_forward()

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

    # Parts that are called apart

    def _install_on_parts(self, module: nn.Module) -> None:
        """Modules below the root whose parameters are the root's, and which programs call outside of its forward: an output
        layer in chunks, an embedding. Inside of the root's forward their hooks do nothing."""
        if len(self.modules) > 1:
            return
        owners = {slot.module for group in self.groups for p in group.parameters for slot in p.slots}
        for part in _parts(module, owners):
            if part not in self._parts:
                self._parts.add(part)
                part.register_forward_pre_hook(self._before_part, prepend=True, with_kwargs=True)
                part.register_forward_hook(self._after_part)
                part.register_forward_hook(self._after_exception_in_part, always_call=True)
                guard_call(part)

    def _before_part(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.stage is not Stage.IDLE:
            return None
        self._running_part = part
        return self.before_forward(part, args, kwargs)

    def _after_part(self, part: nn.Module, args: Any, output: Any) -> Any:
        if self._running_part is not part:
            return None
        self._running_part = None
        return self.after_forward(part, args, output)

    def _after_exception_in_part(self, part: nn.Module, args: Any, output: Any) -> None:
        if self._running_part is part:
            self._running_part = None
            self.after_exception(part, args, output)

    # Forward

    @eagerly
    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._has_ended = False
        self._exchanged.append(Exchanged())
        if self.iteration.is_broken_off:
            self.iteration.states[0].abandon_iteration()
        begins = self.stage is not Stage.FORWARD
        if self.stage is Stage.BACKWARD:  # activation checkpointing runs this forward anew inside of its backward
            self._move(Move.BEGIN_FORWARD)
            is_recorded = self._calls.are_awaited
            for group in self.groups:
                group.recompute(is_recorded=is_recorded)
            return self._cast_inputs(args, kwargs)
        if begins:
            args, kwargs = self._begin_iteration(args, kwargs)
        elif len(self.modules) == 1:
            self._depth += 1
        self._move(Move.BEGIN_FORWARD)
        args, kwargs = self._cast_inputs(args, kwargs)
        for group in self.groups:
            group.before_forward()
        if begins:
            if (
                self.groups and torch.is_grad_enabled() and self._running_part is None
            ):  # the rest needs the parameters, too
                args, kwargs, self._call = self._calls.watch_inputs(
                    args, kwargs, self._exchanged[-1], self._after_backward
                )
                self._given = args, kwargs
            for other in self.forward_prefetch:
                for group in other.groups:
                    group.unshard()
        return args, kwargs

    @eagerly
    def after_forward(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        output = self._after_forward(output)
        self._has_ended = True
        return output

    def _put_back(self, num_calls: int) -> None:
        """So many calls have ended."""
        for _ in range(min(num_calls, len(self._exchanged))):
            self._exchanged.pop().put_back()

    def _after_forward(self, output: Any) -> Any:
        self._put_back(1)
        if self.stage is Stage.BACKWARD:
            self._move(Move.END_FORWARD)
            return self._cast_outputs(output)
        if self._depth:  # the outer call needs the parameters still
            self._depth -= 1
            return self._cast_outputs(output)
        output = self._end_forward(output)
        if self.iteration.forward_root is self:
            output = self._conclude_incomplete(output)
            self.iteration.leave_forward(with_gradients=torch.is_grad_enabled() or in_backward())
        return self._cast_outputs(output)

    def _end_forward(self, output: Any) -> Any:
        """Returns the output, which aliases no gathered parameter."""
        self._put_back(len(self._exchanged))
        if self.groups:
            output = map_tensors(self._own, output)
        is_watched = self._watch_outputs(output)
        for group in self.groups:
            group.after_forward(recomputing=in_backward(), is_watched=is_watched)
        self._move(Move.END_FORWARD)
        return output

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A gathered parameter, or a part of one, is copied before its memory is freed or gathered to."""
        return tensor.clone() if any(group.memory.holds(tensor) for group in self.groups) else tensor

    def _begin_iteration(self, args: Any, kwargs: Any) -> Any:
        """What the outermost module of an iteration does once."""
        self.become_root()
        if self.iteration.forward_root is not None:
            return args, kwargs
        if not in_backward() and not self.continues:
            groups = [group for state in self.iteration.states for group in state.groups]
            if self._strays is not None and torch.is_grad_enabled():
                self._strays.refuse()
            if any(has_replaced(group.parameters) for group in groups):
                check_distinct(parameter for group in groups for parameter in group.parameters)
            for group in groups:
                group.begin_iteration()
            self.iteration.begin_forward(self.modules[0], groups if self.is_root else self.groups)
        self.iteration.enter_forward(self)
        self.iteration.order_gathers()
        if self.device.type != "cpu":
            args, kwargs = (
                self._exchanged[-1].exchange(lambda t: t.to(self.device, non_blocking=True), given)
                for given in (args, kwargs)
            )
        return args, kwargs

    @property
    def continues(self) -> bool:
        """Whether a part is called that uses what the root's forward has left."""
        return self._running_part is not None and all(group.memory.is_current for group in self.groups)

    @eagerly
    def after_exception(self, module: nn.Module, args: Any, output: Any) -> None:
        """Parameters are at rest, and the next forward begins anew. Also called when there was no exception: then the
        forward has ended already."""
        if not self._has_ended:
            self._put_back(1)
        if self._has_ended or self.stage is Stage.BACKWARD:  # what that leaves is abandoned by the next forward
            self._has_ended = False
            return
        if self._depth:
            self._depth -= 1
            return
        self.abandon_forward()
        if self.iteration.forward_root is self:
            self.iteration.break_off_forward()

    def abandon_forward(self) -> None:
        """An exception has ended it."""
        self._put_back(len(self._exchanged))
        for group in self.groups:
            group.abandon_forward()
        self._still_to_run.clear()
        self._call, self._given, self._depth, self._running_part = None, None, 0, None
        if self.stage is Stage.FORWARD:
            self._move(Move.ABANDON)

    def _conclude_incomplete(self, output: Any) -> Any:
        """Groups of several modules of which only some have run end their forward with the root's."""
        for state in reversed(self.iteration.states):
            if state is not self and state._still_to_run:
                output = state._end_forward(output)
                state._still_to_run.clear()
                output = state._cast_outputs(output)
        return output

    def _cast_inputs(self, args: Any, kwargs: Any) -> Any:
        dtype = self.mp_policy.param_dtype if self.mp_policy.cast_forward_inputs else None
        exchange = self._exchanged[-1].exchange
        return _cast(dtype, args, exchange), _cast(dtype, kwargs, exchange)

    def _cast_outputs(self, output: Any) -> Any:
        return _cast(self.mp_policy.output_dtype, output)

    # Backward

    def _watch_outputs(self, output: Any) -> bool:
        """Find out when a backward begins. False: it may begin unseen, from tensors inside of an object, or elsewhere, if no
        output requires gradients, and an input does."""
        call, self._call = self._call, None
        if not torch.is_grad_enabled():
            return True
        given, self._given = self._given, None
        if watch_outputs(output, (given, *self._kept()) if call is not None else (), call, self._before_backward):
            return True
        return call is None and not hides_tensors(output)

    def _kept(self) -> list[Any]:
        """What the modules keep of a forward in attributes, such as an auxiliary loss; found in the first one."""
        if self._keepers is None:
            parts = [part for module in self.modules for part in module.modules()]
            slots = [(vars(part), name) for part in parts for name in vars(part).keys() - _OF_MODULES]
            self._keepers = [(held, name) for held, name in slots if _keeps_graph(held[name])]
        return [held.get(name) for held, name in self._keepers]

    @eagerly
    def _before_backward(self, *_: Any) -> None:
        self.iteration.follow_backward()
        self._move(Move.BEGIN_BACKWARD)
        for group in self.groups:
            group.before_backward(prefetch=not self.backward_prefetch)
        for other in self.backward_prefetch:
            for group in reversed(other.groups):
                group.prefetch_for_backward()

    @eagerly
    def _after_backward(self) -> None:
        self.iteration.follow_backward()
        is_last = not self._calls.are_awaited
        for group in reversed(self.groups):
            group.after_backward(is_last=is_last)

    def break_off_backward(self) -> None:
        """An exception has ended a backward. What it has left is abandoned by the next forward; until then, too, the
        registered parameters are the sharded ones."""
        for group in self.groups:
            group.memory.leave()
            for parameter in group.parameters:  # also where registering the others was interrupted
                parameter.to_rest()

    def use_unwatched(self) -> None:
        """A backward has begun that may need the parameters without notice."""
        for group in self.groups:
            if group.is_gathered and not group.is_watched:
                group.memory.wait()

    def conclude_backward(self, *, is_last: bool, read_later: Collection[int]) -> None:
        self._still_to_run.clear()
        for group in reversed(self.groups):
            group.conclude_backward(is_last=is_last, read_later=read_later)
        self._move(Move.CONCLUDE)

    # Gradients that are reduced apart from a backward, after several without sync: by a pipeline schedule

    def tree_states(self) -> Sequence[ModuleState]:
        return self.iteration.states or [self]

    def reduce_accumulated(self) -> None:
        self.iteration.expect_conclusion()
        for group in reversed(self.groups):
            group.reduce_accumulated()

    def conclude_accumulation(self) -> None:
        self.iteration.conclude()

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
            twin.stage, twin.is_root = Stage.IDLE, None
            twin.iteration = Iteration(CommContext(state.device))
            twin._still_to_run, twin._calls, twin._call, twin._depth = set(), Calls(), None, 0
            twin._running_part = twin._strays = None
            made.append(twin)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Of a part that is copied without its unit."""
        kinds = ", ".join(type(module).__name__ for module in self.modules)
        raise NotPicklableError(
            f"a part of {kinds} cannot be copied separately: fully_shard, or a unit of a plan, keeps its parameters "
            "in a buffer with others. Copy the whole model; tools that copy parts of it (PEFT's modules_to_save, LN "
            "tuning) must run before parallelize and fully_shard"
        )

    def take_place(self, memo: dict[int, Any]) -> None:
        """Belong to the copies of the modules."""
        self.modules = tuple(copy.deepcopy(module, memo) for module in self.modules)
        self._parts = weakref.WeakSet(copy.deepcopy(part, memo) for part in self._parts)
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
            raise FullyShardStateError(
                f"the first forward ran a list of modules ({kinds}) that were passed to fully_shard together; run the "
                "module that contains them, to which fully_shard must be applied, too"
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
                raise FullyShardStateError(
                    f"{path} has run its forward as a separate root before {type(root).__name__}, which contains it; "
                    "first run the outermost module to which fully_shard was applied"
                )
            found.append(state)
        for state in found:
            state.is_root, state.iteration = state is self, self.iteration
            for group in state.groups:
                group.memory.belong_to(self.comm, self.iteration.orders)
                group.on_gradients = self.iteration.follow_backward
                group.memory.on_write = self.iteration.note_write
        self.iteration.states = found
        self.comm.max_gradient_buffers = max(state.max_gradient_buffers for state in found)
        if self.reshard_root is None:
            for group in self.groups:
                group.reshard_after_forward, group.is_kept_by_default = False, True
        groups = [group for state in found for group in state.groups]
        try:
            check_root(root, groups)
        except Exception:
            for state in found:
                state.is_root = None
            raise
        if self.ignored is not None:
            ignored = (slot for state in found for slot in state.ignored or ())
            self._strays = StrayParameters(root, (p for group in groups for p in group.parameters), ignored)
        for group in groups:
            group.rebuild()
            group.memory.prepare()
            _ = group.memory.unit
        self.iteration.begin(root, groups, compares_steps=self.ignored is not None)
        self._install_on_parts(root)

    def abandon_iteration(self) -> None:
        """See :meth:`FSDPModule.reset_iter_state`."""
        if self.is_root is False:
            raise FullyShardStateError(
                "reset_iter_state was called on a module that is not the root; call it on the outermost module to "
                "which fully_shard was applied"
            )
        if not self.iteration.states:
            self.abandon()
        self.iteration.abandon()

    def abandon(self) -> None:
        """An exception has ended a forward or backward: this state's part of :meth:`abandon_iteration`."""
        self._still_to_run.clear()
        self._call, self._given, self._depth, self._running_part = None, None, 0, None
        for group in self.groups:
            group.abandon()
        self._move(Move.ABANDON)


def _cast(dtype: torch.dtype | None, values: Any, replace: Callable[..., Any] = map_tensors) -> Any:
    if dtype is None:
        return values
    return replace(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values)


def _parts(module: nn.Module, owners: set[nn.Module]) -> Iterator[nn.Module]:
    """Modules below one that own some of its parameters, and those with units below them; not what is below the others."""
    for child in module.children():
        if state_of(child) is not None:
            continue
        below = list(child.modules())
        if not owners.isdisjoint(below):
            yield child
        is_container = isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        if is_container or any(state_of(each) is not None for each in below):
            yield from _parts(child, owners)
