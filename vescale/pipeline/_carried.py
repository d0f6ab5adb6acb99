"""``Carried``: during a trace, the tensors that each stage receives from earlier ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vescale.errors import PipelineTraceError
from vescale.pipeline._traced import Boundary, Origin

__all__ = ["Carried"]


class _Entering:
    """What enters a stage: ``tensors`` by id, of which the first are at ``leaves`` of its first module's arguments."""

    def __init__(self, leaves: Sequence[torch.Tensor | Any], found: Sequence[int], call: int) -> None:
        self.leaves, self.num_leaves, self.call = tuple(found), len(leaves), call
        self.arguments = [leaves[n] for n in found]
        self.later: dict[int, torch.Tensor] = {}

    def has(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self.later or any(tensor is one for one in self.arguments)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.arguments, *self.later.values()]


class Carried:
    """A tensor is sent from the stage that makes it to the last one that reads it, through all stages between.

    Attributes:
        made: the stage of a tensor, by id, that only one stage can make.
        outside: stages that read what they have received elsewhere than among the arguments of their modules.
        writes: stages that write in place to what they have received.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.made: dict[int, int] = {}
        self.outside: set[int] = set()
        self.writes: set[int] = set()
        self._origins: dict[int, list[Origin]] = {}
        self._entering: dict[int, _Entering] = {}
        self._received: dict[int, int] = {}  # of what the stage has received, and its views in it: the id of the former
        self._memory: dict[int, int] = {}  # of a view: the id of the tensor that it is a view of in the end
        self._written: dict[int, tuple[int, int]] = {}  # by such an id: the stage that wrote, and the received tensor

    def origin(self, origin: Origin, tensor: torch.Tensor) -> None:
        self._origins.setdefault(id(tensor), []).append(origin)

    def begin(self, stage: int, leaves: Sequence[Any], path: str, call: int) -> None:
        """A stage begins before call ``call``, of a module, with ``leaves``."""
        found = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and id(leaf) in self.made]
        for n in found:
            self._carry(leaves[n], stage - 1, f"the arguments of {path!r}")
        self._entering[stage] = _Entering(leaves, found, call)
        self._received = {id(leaves[n]): id(leaves[n]) for n in found}

    def read(self, tensor: torch.Tensor, stage: int, where: str, *, is_argument: bool) -> None:
        """Called before an op of a stage reads a tensor."""
        if self.made.get(id(tensor), stage) >= stage:
            return
        self._carry(tensor, stage, where)
        self._received.setdefault(id(tensor), id(tensor))
        if not is_argument:
            self.outside.add(stage)
        written = self._written.get(self._memory.get(id(tensor), id(tensor)))
        if written is not None and written[0] > self.made[id(tensor)] and written[1] != id(tensor):
            raise PipelineTraceError(
                f"pipeline: {where}, in stage {stage}, reads a tensor of shape {tuple(tensor.shape)} that stage "
                f"{self.made[id(tensor)]} has made, and that shares memory with one that stage {written[0]} has written to: "
                "they are sent apart. Write out of place, or begin the stages before other modules",
                self._source,
            )

    def _carry(self, tensor: torch.Tensor, last: int, where: str) -> None:
        """Let the tensor enter the stages behind the one that has made it, up to ``last``."""
        made = self.made[id(tensor)]
        for stage in range(made + 1, last + 1):
            entering = self._entering[stage]
            if entering.has(tensor):
                continue
            if id(tensor) not in self._origins:
                raise PipelineTraceError(
                    f"pipeline: {where}, in stage {last}, has a tensor of shape {tuple(tensor.shape)} that was made in a "
                    f"module of stage {made}, and is no part of what the module returns; return it, or begin the stages "
                    "before other modules",
                    self._source,
                )
            entering.later[id(tensor)] = tensor

    def note_op(self, func: Any, args: Any, tensors: Sequence[torch.Tensor], outs: Sequence[Any], stage: int) -> None:
        """After an op of a stage."""
        if func._schema.is_mutable:
            target = args[0] if args and isinstance(args[0], torch.Tensor) else None
            if target is not None and id(target) in self._received:
                self.writes.add(stage)
                self._written[self._memory.get(id(target), id(target))] = stage, self._received[id(target)]
        elif any(returned.alias_info is not None for returned in func._schema.returns):
            memory = self._memory.get(id(tensors[0]), id(tensors[0])) if tensors else None
            received = next((self._received[id(t)] for t in tensors if id(t) in self._received), None)
            for out in outs:
                if memory is not None and memory != id(out):
                    self._memory[id(out)] = memory
                if received is not None:
                    self._received.setdefault(id(out), received)

    def boundaries(self) -> dict[int, Boundary]:
        return {stage: self._boundary(entering) for stage, entering in self._entering.items()}

    def _boundary(self, entering: _Entering) -> Boundary:
        tensors = entering.tensors
        return Boundary(
            entering.leaves,
            tuple(tuple(self._origins.get(id(tensor), ())) for tensor in tensors),
            tuple(tuple(tensor.shape) for tensor in tensors),
            tuple(tensor.dtype for tensor in tensors),
            tuple(tensor.requires_grad for tensor in tensors),
            entering.num_leaves,
            entering.call,
        )

    def has_begun(self, stage: int) -> bool:
        return stage in self._entering

    @staticmethod
    def same_leaves(given: Sequence[Any], returned: Sequence[Any]) -> Mapping[int, int]:
        """By leaf of what a module returns: the leaf of its arguments that is the same tensor."""
        numbers = {id(value): n for n, value in enumerate(given) if isinstance(value, torch.Tensor)}
        return {n: numbers[id(value)] for n, value in enumerate(returned) if id(value) in numbers}
