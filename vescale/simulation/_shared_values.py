"""``SimulatedTensors``: ops compute no large numbers, and collectives on small tensors bring the values of the other
simulated ranks, on which programs branch: sizes, flags, pickled objects."""

from __future__ import annotations

import base64
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from vescale.compat import bytes_of, tree_leaves
from vescale.compat.simulated_ranks import work_of
from vescale.estimation import MemoryLog, Routing, UnfilledTensors
from vescale.simulation._link import Link
from vescale.simulation._tracer import Call, Tracer

_MOST_BYTES, _MOST_FLOATS = 1 << 20, 1024  # of integers; of floating-point numbers
_FUNCTIONAL = ("_c10d_functional", "c10d_functional")
_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


class SimulatedTensors(UnfilledTensors):
    """See the module.

    Attributes:
        seconds: processor time of simulated ops and collectives.
    """

    def __init__(self, log: MemoryLog, rank: int, link: Link, tracer: Tracer) -> None:
        super().__init__(log, Routing())
        self.seconds = 0.0
        self._rank, self._link, self._tracer = rank, link, tracer
        self._messages: Counter[str] = Counter()
        self._depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = time.thread_time() if not self._depth else 0.0
        self._depth += 1
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._depth -= 1
            if not self._depth:
                self.seconds += time.thread_time() - begin

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        if func.namespace in _FUNCTIONAL:
            return self._functional(func, args, kwargs, tensors)
        if func.namespace != "c10d" or not any(a.name == "process_group" for a in func._schema.arguments):
            return super()._run(func, args, kwargs, tensors)
        call = Call.of(func, args, kwargs)
        given = self._given(call)
        self._tracer.begin(call)
        try:
            result = super()._run(func, args, kwargs, tensors)
        finally:
            number = self._tracer.end(work_of(result) if "result" in locals() else None)
        if number is not None and given is not None:
            self._exchange(call, given, self._tracer.operations[-1].number)
        return result

    def _functional(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        if func.overloadpacket.__name__ == "wait_tensor":
            self._tracer.waited_for_result(args[0])
            return super()._run(func, args, kwargs, tensors)
        before = len(self._tracer.calls)
        self._tracer.begin_functional()
        result = None
        try:
            result = super()._run(func, args, kwargs, tensors)
        finally:
            self._tracer.end_functional(before, result)
        return result

    # Values

    def _given(self, call: Call) -> list[torch.Tensor] | None:
        """The tensors that a call reads, or, of a receive, writes; None: they are not exchanged."""
        found = next(
            (call.arguments[n] for n in ("input_tensors", "input_tensor", "input", "tensors") if n in call.arguments),
            (),
        )
        tensors = [x for x in tree_leaves(found) if isinstance(x, torch.Tensor)]
        if call.name == "scatter_":
            tensors = tensors or [
                x for x in tree_leaves(call.arguments["output_tensors"]) if isinstance(x, torch.Tensor)
            ]
        if call.name not in _EXCHANGED or not tensors or len(call.ranks) == 1:
            return None
        for x in tensors:
            limit = _MOST_FLOATS * x.element_size() if x.dtype.is_floating_point else _MOST_BYTES
            if x.dtype.is_complex or x.numel() * x.element_size() > limit:
                return None
        return tensors

    def _exchange(self, call: Call, given: list[torch.Tensor], number: int) -> None:
        is_control = not given[0].dtype.is_floating_point
        if call.name in ("send", "recv_"):
            ends = f"{self._rank}>{call.peer}" if call.name == "send" else f"{call.peer}>{self._rank}"
            place = f"{call.group} message {ends}"
            self._messages[place] += 1
            place = f"{place} {self._messages[place]}"
        else:
            size = sum(x.numel() * x.element_size() for x in given) if call.name != "scatter_" else 0
            place = f"{call.group} {call.ranks[0]} {call.ranks[-1]} {len(call.ranks)} {number} {call.name} {size}"
        source = call.root if call.name in ("broadcast_", "scatter_") else call.peer if call.name == "recv_" else None
        if source is None or source == self._rank:
            known = all(map(self.is_known, given))
            self._link.tell("give", place=place, value=[_pack(x) for x in given] if known else None)
        if call.name == "send" or (source == self._rank and call.name == "broadcast_"):
            return
        if call.name in ("reduce_", "gather_") and call.root != self._rank:
            return
        if call.name == "scatter_" and call.root == self._rank:
            found = {self._rank: [_pack(x) for x in given] if all(map(self.is_known, given)) else None}
        else:
            needs = [source] if source is not None and is_control else []
            wanted = list(call.ranks) if source is None else [source]
            answer = self._link.ask("take", place=place, needs=needs, **{"from": wanted})
            found = {int(rank): value for rank, value in answer.items()}
        if source is None:
            own = [x.clone() for x in given]
            self._combine(call, own, found)
        elif source in found:
            self._receive(call, found[source])

    def _receive(self, call: Call, value: list[str] | None) -> None:
        """Of a broadcast, a scatter or a message."""
        if call.name == "scatter_":
            targets = [x for x in tree_leaves(call.arguments["output_tensors"]) if isinstance(x, torch.Tensor)]
            value = value if value is None else [value[call.ranks.index(self._rank)]]
        else:
            targets = [x for x in tree_leaves(call.arguments["tensors"]) if isinstance(x, torch.Tensor)]
        for number, target in enumerate(targets):
            self._write(target, None if value is None else _unpack(value[number], target))

    def _combine(self, call: Call, own: list[torch.Tensor], found: dict[int, Any]) -> None:
        """Ranks that were not simulated have the values of this one."""
        known = all(map(self.is_known, own)) and all(value is not None for value in found.values())
        for number, mine in enumerate(own):
            parts = [
                _unpack(found[rank][number], mine) if found.get(rank) else mine if known else None
                for rank in call.ranks
            ]
            if call.name in ("allreduce_", "reduce_"):
                self._write(call.arguments["tensors"][number], _reduced(parts, call) if known else None)
            elif call.name == "_allgather_base_":
                output = call.arguments["output_tensor"]
                self._write(output, torch.cat([p.reshape(-1) for p in parts if p is not None]) if known else None)
            else:  # lists of tensors
                for target, part in zip(call.arguments["output_tensors"][number], parts):
                    self._write(target, part if known else None)

    def _write(self, target: torch.Tensor, value: torch.Tensor | None) -> None:
        if value is None or value.numel() != target.numel():
            if target.dtype.is_floating_point:
                self.forget(target)
            return
        target.copy_(value.reshape(target.shape))
        self.learn(target)


_EXCHANGED = (
    "allreduce_",
    "reduce_",
    "broadcast_",
    "_allgather_base_",
    "allgather_",
    "gather_",
    "scatter_",
    "send",
    "recv_",
)


def _reduced(parts: list[Any], call: Call) -> torch.Tensor:
    kind = call.agreed.get("reduction", "sum")
    function = _REDUCTIONS.get(kind, torch.add)
    total: torch.Tensor = parts[0].clone()
    for part in parts[1:]:
        total = function(total, part)
    return total / len(parts) if kind == "avg" else total


def _pack(x: torch.Tensor) -> str:
    return base64.b64encode(bytes_of(x).numpy().tobytes()).decode()


def _unpack(text: str, like: torch.Tensor) -> torch.Tensor:
    data = bytearray(base64.b64decode(text))
    if not data:
        return torch.empty(0, dtype=like.dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(like.dtype)
