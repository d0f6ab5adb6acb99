"""``report(model)``: what the last forward of a parallelized model holds for its backward, on this rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from vescale.errors import NoGraphError, NotParallelizedError
from vescale.ir import Checkpoint
from vescale.runtime._activation import module_of_node
from vescale.runtime._runtime import Runtime


@dataclass(frozen=True)
class SavedReport:
    """Bytes of memory that a forward held for its backward when it ended; memory that several tensors share counts once,
    and that of parameters and buffers does not.

    Attributes:
        saved_bytes: on the device of the model.
        saved: module -> op -> bytes; they add up to ``saved_bytes``. Of checkpointed modules ``inputs``, ``communication``
            (results of collectives), and the ops whose results are saved; else the autograd node that holds the memory.
        offloaded: module -> bytes that its forward has copied to the host.
        policies: checkpointed module -> its policy; ``none`` where a budget leaves it as it is.
    """

    saved_bytes: int
    saved: Mapping[str, Mapping[str, int]]
    offloaded: Mapping[str, int]
    policies: Mapping[str, str]

    @property
    def offloaded_bytes(self) -> int:
        return sum(self.offloaded.values())

    def __str__(self) -> str:
        rows = [(num, path or "(the model)", op) for path, ops in self.saved.items() for op, num in ops.items()]
        rows += [(num, path, "offloaded to the host") for path, num in self.offloaded.items()]
        width = max((len(path) for _, path, _ in rows), default=0)
        lines = [f"{self.saved_bytes:,} bytes held for backward, {self.offloaded_bytes:,} on the host"]
        lines += [f"{num:>16,}  {path:<{width}}  {op}" for num, path, op in sorted(rows, key=lambda row: -row[0])]
        return "\n".join(lines)


def report(model: nn.Module) -> SavedReport:
    """What the last forward of ``model`` with gradients held for backward when it had ended, on this rank, by module and op.

    Call it between forward and backward. With a ``checkpoint`` entry in the plan, later is fine, too. Nothing is
    communicated, and nothing is unpacked or computed again. Tensors that hooks of the program have packed are not counted.

    Raises KeyError for a model that has not been parallelized, and RuntimeError if there is nothing to read: there
    was no forward with gradients, or its graph has gone; from then on, forwards are read when they end.
    """
    runtime = Runtime.of(model)
    if runtime is None:
        raise NotParallelizedError(f"this {type(model).__name__} has not been parallelized")
    held = runtime.saved.total(model, module_of_node)
    if held is None:
        runtime.saved.reads_graph = True
        raise NoGraphError(
            "report(model) found no graph of a forward: no forward with gradients has run yet, or its backward has "
            "released the graph; call report between forward and backward. From now on, graphs are read at the end "
            "of each forward"
        )
    saved: dict[str, dict[str, int]] = {}
    offloaded: dict[str, int] = {}
    for one in held:
        if one.is_offloaded:
            offloaded[one.module] = offloaded.get(one.module, 0) + one.num_bytes
        else:
            of_module = saved.setdefault(one.module, {})
            of_module[one.op] = of_module.get(one.op, 0) + one.num_bytes
    total = sum(num for ops in saved.values() for num in ops.values())
    return SavedReport(total, saved, offloaded, _policies(runtime))


def _policies(runtime: Runtime) -> dict[str, str]:
    found = {}
    for instruction in runtime.program:
        if isinstance(instruction.op, Checkpoint):
            policy = instruction.op.policy
            if instruction.op.budget_gib is not None:
                policy = runtime.budgets[instruction.op.budget].policies[instruction.path]
            found[instruction.path] = policy.text() if policy is not None else "none"
    return found
