"""Expert regions: the experts of a mixture, a module whose forward takes ``(tokens, expert ids, weights)``.

What each mesh axis does follows from how the experts' parameters lie on it while they run:

==========  =====================  ===================================  ================================================
axis        parameters             tokens, ids, weights                 result
==========  =====================  ===================================  ================================================
experts     ``Shard(0)``, all      every rank meets all tokens of the   Partial: each rank's experts add what they do
                                   other axes, and computes those of
                                   its own experts
features    cut on a later dim     every rank meets all tokens          Partial: each rank adds its part of the features
data        Replicate              as the tokens come                   as the tokens came
==========  =====================  ===================================  ================================================

On axes of experts and features the gradient of weights is summed here. That of tokens leaves Partial, as it does behind any
column-cut weight: the ``<in>`` entry before it, of this module or one around it, sums it together with what other readers
add. Gradients of parameters are Partial where the tokens are cut. All of these get a gradient on
every rank, zero where no token was routed, so that no rank waits for a reduction that another one leaves out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import map_tensors, no_torch_function, tensors_in
from vescale.ir import Instruction, Local
from vescale.placements import local_region, shard_dim
from vescale.plans import PlanError
from vescale.runtime._boundary import convert, enter_local, leave_local
from vescale.runtime._region import local_state
from vescale.runtime._runtime import Runtime

__all__ = ["ExpertRegion"]


class ExpertRegion:
    """Runs a module of experts on local tensors; see the module's table.

    The forward is the model's own. On an axis of experts it is called with the routed pairs of this rank's experts alone,
    one expert each, with ids counted from this rank's first expert and every ``num_experts`` of the module set to the local
    count.

    Raises:
        PlanError: parameters of which some are cut on an axis and others are not; dispatch that is not implemented; on
            an axis of experts, a forward that does not take tokens, ids and weights.
    """

    def __init__(self, runtime: Runtime, module: nn.Module, path: str, instruction: Instruction) -> None:
        op = instruction.op
        assert isinstance(op, Local)
        self.runtime, self.module, self.path, self.source = runtime, module, path, instruction.source
        if op.dispatch == "all_to_all":
            raise self._error("has dispatch='all_to_all', which this version does not run; use dispatch='mask'")
        self._forward = module.forward
        self._signature = inspect.signature(module.forward)
        self._sums = tuple(self._is_cut(axis) for axis in range(runtime.mesh.ndim))
        self._first, self._last, self._num_experts = self._own_experts()
        module.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = self._signature.bind(*args, **kwargs)
        with no_torch_function():
            tokens = next(x for x in call.arguments.values() if isinstance(x, DTensor))
            arriving = tuple(
                Replicate() if sums or p.is_partial() else p for sums, p in zip(self._sums, tokens.placements)
            )
            summed = tuple(Partial() if sums else p for sums, p in zip(self._sums, arriving))
            for name, value in call.arguments.items():
                call.arguments[name] = map_tensors(lambda x: self._entered(x, tokens, arriving, summed), value)
            given = list(tensors_in(list(call.arguments.values())))

            def entered(parameter: torch.Tensor) -> torch.Tensor:
                return enter_local(parameter, _parameter_gradient(parameter, arriving))  # type: ignore[arg-type]

            with local_state(self.module, entered):
                result = self._routed(call) if self._spread else self._forward(*call.args, **call.kwargs)
                result = _Joined.apply(result, *(x for x in (*given, *_shown(self.module)) if x.requires_grad))
            shape = (*tokens.shape[:-1], result.shape[-1])
            return leave_local(result, self.runtime.mesh, summed, shape, f"experts {self.path}")

    @property
    def _spread(self) -> bool:
        """Whether this rank has some of the experts only."""
        return self._last - self._first < self._num_experts

    def _entered(
        self, x: torch.Tensor, tokens: DTensor, arriving: Sequence[Placement], summed: Sequence[Placement]
    ) -> torch.Tensor:
        if not isinstance(x, DTensor):
            return x
        if x is not tokens or tuple(x.placements) != tuple(arriving):
            x = convert(x, arriving, who=f"experts {self.path}")
        return enter_local(x, summed)

    def _routed(self, call: inspect.BoundArguments) -> torch.Tensor:
        """Run the pairs of this rank's experts and add them up by token; zero for tokens without one."""
        (token_name, tokens), (id_name, ids), (weight_name, weights) = self._routing(call)
        own = (ids >= self._first) & (ids < self._last)
        rows, slots = own.nonzero(as_tuple=True)
        out = torch.zeros_like(tokens)
        if len(rows) == 0:
            return out
        call.arguments[token_name] = tokens[rows]
        call.arguments[id_name] = (ids[rows, slots] - self._first).unsqueeze(-1)
        call.arguments[weight_name] = weights[rows, slots].unsqueeze(-1)
        with self._local_count():
            found = self._forward(*call.args, **call.kwargs)
        return out.index_add(0, rows, found.to(out.dtype))

    def _routing(self, call: inspect.BoundArguments) -> list[tuple[str, torch.Tensor]]:
        found = [(name, value) for name, value in call.arguments.items() if isinstance(value, torch.Tensor)]
        if len(found) == 3:
            (_, tokens), (_, ids), (_, weights) = found
            if tokens.ndim == ids.ndim == 2 and not ids.is_floating_point() and ids.shape == weights.shape:
                return found
        raise self._error(
            f"gets {', '.join(f'{name} {tuple(x.shape)} {x.dtype}' for name, x in found)}; experts that are spread over "
            "ranks need tokens (tokens, features), expert ids and weights (tokens, choices): cut their features instead"
        )

    @contextmanager
    def _local_count(self) -> Iterator[None]:
        """The module's number of experts is that of this rank."""
        names = [
            name
            for name, value in vars(self.module).items()
            if type(value) is int and value == self._num_experts and "expert" in name
        ]
        for name in names:
            setattr(self.module, name, self._last - self._first)
        try:
            yield
        finally:
            for name in names:
                setattr(self.module, name, self._num_experts)

    # Checks, before anything runs

    def _parameters(self) -> list[DTensor]:
        return [p for p in self.module.parameters() if isinstance(p, DTensor)]

    def _is_cut(self, axis: int) -> bool:
        """Whether ranks along the axis compute with different parts of the parameters."""
        cut = [shard_dim(p.placements[axis]) is not None for p in self._parameters()]
        if any(cut) and not all(cut):
            names = [name for (name, _), one in zip(self.module.named_parameters(), cut) if not one]
            raise self._error(
                f"cuts some parameters over {self.runtime.axes.names[axis]!r} and leaves {', '.join(names)} whole, which "
                "every rank would add to the sum; cut all of them, or none"
            )
        return any(cut)

    def _own_experts(self) -> tuple[int, int, int]:
        """(first, last + 1) of this rank's experts, and the number of all."""
        mesh = self.runtime.mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        found = set()
        for parameter in self._parameters():
            running = tuple(Replicate() if shard_dim(p) is None else p for p in parameter.placements)
            region = local_region(tuple(parameter.shape), running, tuple(mesh.shape), coordinate)
            ranges = region.intervals[0]
            found.add((ranges[0][0], ranges[-1][1], parameter.shape[0]) if ranges else (0, 0, parameter.shape[0]))
        if len(found) != 1:
            if any(last - first < size for first, last, size in found):
                raise self._error(f"has experts {sorted(found)} (first, last + 1, all); shard dim 0 of all alike")
            return 0, 0, 0
        return found.pop()

    def _error(self, problem: str) -> PlanError:
        return PlanError(f"the expert region {self.path!r} {problem}", self.source)


def _shown(module: nn.Module) -> Iterator[torch.Tensor]:
    """The module's parameters as its forward sees them."""
    for owner in module.modules():
        for name, _ in owner.named_parameters(recurse=False):
            yield getattr(owner, name)


def _parameter_gradient(parameter: DTensor, tokens: Sequence[Placement]) -> tuple[Placement, ...]:
    """Each rank adds the gradient of its own tokens."""
    return tuple(
        Partial() if own.is_replicate() and not of_tokens.is_replicate() else own
        for own, of_tokens in zip(parameter.placements, tokens)
    )


class _Joined(torch.autograd.Function):
    """The first argument, with the others joined to its graph: their gradient through this node is zero."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parameters)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grad, *(p.new_zeros(()).expand(p.shape) for p in ctx.saved_tensors)
