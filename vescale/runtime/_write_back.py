"""Inputs of a module that its entries have moved, and writes to them.

On one device a module writes to the very tensor that its caller holds. Where an ``<in>`` entry moves nothing, the two are
one tensor here, too (:func:`vescale.ops.convert`). Where it moves data, a write goes to a copy. When the module ends, the
caller's tensor gets the new values, in autograd, too: its version counts the write, and its gradient goes through it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch.distributed.tensor import DTensor

from vescale.compat import EarlyStop, counts_local_writes, is_written_back, own_part, set_versions, versions
from vescale.errors import BoundaryError
from vescale.ir import Annotate, Instruction, Wrap
from vescale.ops import convert, enter_local, num_writes, require_current, settle, settling
from vescale.plans import PlanError
from vescale.runtime._runtime import Runtime


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """An input, and what the module gets in its place: a DTensor that does not share its memory, or not its version.

    Attributes:
        given: as the caller holds it, a DTensor or a plain tensor.
        name: as a plan names the input.
        before: versions of ``given`` and of ``result`` before the forward.
        num_writes: to ``result`` before the forward, as far as Python counts them.
    """

    given: torch.Tensor
    result: DTensor
    name: str
    instruction: Instruction
    runtime: Runtime
    before: tuple[tuple[int, ...], tuple[int, ...]]
    num_writes: int

    @classmethod
    def of(
        cls, given: torch.Tensor, result: torch.Tensor, name: str, instruction: Instruction, runtime: Runtime
    ) -> Placed:
        found = cast(DTensor, result)
        return cls(given, found, name, instruction, runtime, (versions(given), versions(found)), num_writes(found))

    def is_written(self) -> bool:
        """Whether there was a write to ``result`` itself: both tensors may have one version for autograd."""
        before, now = self.before[1], versions(self.result)
        if before == now or before[1:] != now[1:]:
            return before != now
        known = num_writes(self.result)
        return not counts_local_writes() and (known == -1 or known != self.num_writes)


def write_back(placed: Sequence[Placed]) -> None:
    """At the end of the forward: bring what was written to ``result`` to ``given``. Communicates if anything was, as the
    entry does in the other direction.

    After an exception nothing happens, because other ranks may not have one; reading ``given`` raises then. One is no error:
    it ends a recomputation when all saved tensors are there, on all ranks at the same op.

    Raises:
        PlanError: another input is the same memory, and was brought elsewhere: the module may have read old values of it;
            the module has changed the shape of its input in place; or a plain tensor of the caller would keep old values.
    """
    raised = sys.exc_info()[1]
    if raised is not None and not isinstance(raised, EarlyStop):
        return
    written = [one for one in placed if one.is_written()]
    for one in placed:
        if one in written or not isinstance(one.given, DTensor):  # nobody will see that a plain tensor has old values
            require_current(one.result)
    for one in written:
        for other in placed:
            if other.result is not one.result and _share_memory(other.given, one.given):
                raise BoundaryError(
                    f"the module writes to its input {one.name} in place, which on one device shares memory with "
                    f"{other.name}; here they are two tensors, because the plan moves them. Write the same entry for "
                    "both, or write to a copy in the module (x = x.clone())",
                    one.instruction.source,
                )
        if one.result.shape != one.given.shape and not _is_local(one):
            raise BoundaryError(
                f"the module changes the shape of its input {one.name} in place, from {tuple(one.given.shape)} to "
                f"{tuple(one.result.shape)}; the caller's tensor cannot follow, because the plan moves it. Use an op that "
                "returns a new tensor",
                one.instruction.source,
            )
    for one in dict.fromkeys(written):
        _write(one)


def _write(one: Placed) -> None:
    given, result = one.given, one.result
    requester = f"{one.name}: written back"
    if isinstance(given, DTensor):
        settle(result, given)  # so that both may be read
        require_current(given)  # also what it views, all of which is written back
    new: torch.Tensor
    if isinstance(given, DTensor):
        new = convert(result, given.placements, requester=requester)
    elif _is_local(one):
        op = one.instruction.op
        assert isinstance(op, Annotate | Wrap)
        new = enter_local(convert(result, op.placements, requester=requester))
    else:
        new = enter_local(convert(result, one.runtime.replicated, requester=requester))
    version = versions(given)[0]
    has_counted = version != one.before[0][0]
    if has_counted:  # before the copy: a view remembers the version at which its history was written
        set_versions((given,), (version - 1,))
    with torch.inference_mode() if given.is_inference() else contextlib.nullcontext(), settling():
        given.copy_(new)
    if has_counted and versions(given)[0] != version:
        set_versions((given,), (version,))
    if isinstance(given, DTensor):
        settle(result, given)
    else:
        is_written_back(given)


def _is_local(one: Placed) -> bool:
    """Whether ``given`` is each rank's part."""
    op = one.instruction.op
    return isinstance(op, Annotate) or (isinstance(op, Wrap) and op.given == "local")


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Storages are compared, and not addresses: empty parts have none, and all ranks have to find the same."""
    first, second = own_part(one), own_part(other)
    return first.untyped_storage() is second.untyped_storage()


def outdated(name: str, instruction: Instruction) -> PlanError:
    """An op is about to read one of the tensors at a boundary, and another has been written to."""
    return BoundaryError(
        f"an op is about to read the tensor before or after {name}, after the other one was written to in place. On "
        "one device they are one tensor; here they are two, because the plan moves data there, so that the op would "
        "read old values. Write to a copy in the program (x = x.clone()), or change the entry so that nothing moves",
        instruction.source,
    )
