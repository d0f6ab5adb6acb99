"""Seconds of ops and of collectives, measured by every rank of a job on this host: one thread each, all at once."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from vescale.comm import all_gather_into, all_reduce_, all_to_all_v, reduce_scatter_into
from vescale.compat import TorchDispatchMode
from vescale.estimation._memory_log import Instant
from vescale.estimation._op_costs import RANDOM_SPANS, SKIPPED_OUTPUTS, OpCosts, size_of
from vescale.rng import fill_spans, skip_outputs

COLLECTIVE_BYTES = (1 << 8, 1 << 12, 1 << 15, 1 << 17, 1 << 19, 1 << 21, 1 << 23)
"""That a rank receives, of the collectives that are measured."""

_SAMPLES = 5
_NOWHERE = Instant(0, "forward", None)
_OUTPUTS = (1 << 14, 1 << 17, 1 << 20, 1 << 23)  # of a generator
_SPANS = (1, 4, 16)
_ROWS = (8, 64, 512, 4096)  # of 256 numbers
_FOOTPRINT = (
    32 << 20
)  # bytes that the operands and results of an op go through: a step has more than a core's caches hold
_MOST_SETS = 256
_ATEN = torch.ops.aten
_LENGTHS = (32, 128, 512)
_SIZES = ((32, 64, 64), (128, 128, 128), (256, 256, 512), (512, 512, 1024))  # rows, inputs and outputs of a product


class _Called(TorchDispatchMode):
    """The ops of a call, as an estimate counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.costs = OpCosts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.costs.add(_NOWHERE, func, args, kwargs or {}, result)
        return result


def measure_ops(samples: int = _SAMPLES) -> dict[str, list[list[float]]]:
    """By op, [size of a call, seconds]; sizes are floating-point operations, or bytes of ops that have none.

    Ops of models, their backwards and optimizers, each at several sizes; a call includes what PyTorch does in C++ and
    what Python does to call it. Operands of ops that move memory, and their results, are not in a core's caches: a step
    has written others since.
    """
    found: dict[str, list[list[float]]] = {}
    with torch.no_grad():
        for call in _calls():
            with _Called() as mode:
                call.once()
            sizes = [(key[3], size_of(key)) for key in mode.costs.by_key]
            if len(sizes) != 1:
                continue  # another version of PyTorch has no op of its own for it
            ((name, size),) = sizes
            for _ in range(call.num_sets):  # memory that nobody has written to takes longer
                call()
            found.setdefault(name, []).append([float(size), _seconds(call, samples)])
    found[SKIPPED_OUTPUTS] = [[4.0 * number, _seconds(_Alternating([_skip(number)]), samples)] for number in _OUTPUTS]
    found[RANDOM_SPANS] = [[float(number), _seconds(_Alternating([_fill(number)]), samples)] for number in _SPANS]
    return {name: _ascending(points) for name, points in sorted(found.items())}


def _seconds(call: Callable[[], Any], samples: int) -> float:
    """Processor seconds of one call: the median of several series."""
    call()
    number = _number_of_calls(call)
    return statistics.median(_series(call, number)[1] for _ in range(samples))


def _number_of_calls(call: Callable[[], Any]) -> int:
    begin = time.perf_counter()
    call()
    return max(2, min(256, int(0.002 / max(time.perf_counter() - begin, 1e-6))))


def _series(call: Callable[[], Any], number: int) -> tuple[float, float]:
    """Seconds of a call by the clock, and of this process's processors."""
    begin, begin_processor = time.perf_counter(), time.process_time()
    for _ in range(number):
        call()
    return (time.perf_counter() - begin) / number, (time.process_time() - begin_processor) / number


def _ascending(points: list[list[float]]) -> list[list[float]]:
    """Sorted by size, one point for each; larger calls take no less."""
    found: dict[float, list[float]] = {}
    least = [0.0] * len(points[0][1:])
    for size, *seconds in sorted(points):
        least = [float(f"{max(a, b):.4g}") for a, b in zip(least, seconds)]
        found.setdefault(size, least)
    return [[size, *seconds] for size, seconds in found.items()]


def _skip(number: int) -> Callable[[], Any]:
    """Step over so many 32-bit outputs of a generator, as a rank does at those of other ranks."""
    generator = torch.Generator()
    return lambda: skip_outputs(generator, number)


def _fill(num_spans: int) -> Callable[[], Any]:
    generator = torch.Generator()
    return lambda: fill_spans(generator, num_spans)


class _Alternating:
    """A call of an op with other operands each time, and with the memory of an older result for its own."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.once = calls[0]
        self._calls = itertools.cycle(calls)
        self._results: deque[Any] = deque(maxlen=len(calls))
        self.num_sets = len(calls)

    def __call__(self) -> None:
        self._results.append(next(self._calls)())


def _calls() -> Iterator[_Alternating]:
    for rows in _ROWS:
        num_sets = min(max(_FOOTPRINT // (rows * 256 * 4 * 3), 1), _MOST_SETS)
        yield from map(_Alternating, zip(*(_of_memory(rows) for _ in range(num_sets))))
    for sizes in _SIZES:
        yield from (_Alternating([call]) for call in _products(*sizes))
    for length in _LENGTHS:
        yield from (_Alternating([call]) for call in _attention(length))


def _of_memory(rows: int) -> Iterator[Callable[[], Any]]:
    x, y, z = (torch.rand(rows, 256) for _ in range(3))
    weight, ids = torch.rand(max(rows, 64), 256), torch.randint(0, 64, (rows,))
    one, column, flag = torch.ones(256), torch.rand(rows, 1), torch.rand(rows, 256) > 0.5
    soft, out = x.softmax(-1), torch.rand(rows, 256)
    labels = torch.randint(0, 256, (rows,))
    mean, inverse = x.mean(-1, keepdim=True), x.var(-1, keepdim=True).rsqrt()
    yield lambda: x + y
    yield lambda: x - y
    yield lambda: x * y
    yield lambda: x / y
    yield lambda: -x
    yield lambda: x.pow(2)
    yield lambda: x.rsqrt()
    yield lambda: x.sqrt()
    yield lambda: x.exp()
    yield lambda: x.sigmoid()
    yield lambda: x.tanh()
    yield lambda: x.relu()
    yield lambda: F.silu(x)
    yield lambda: F.gelu(x)
    yield lambda: _ATEN.silu_backward(y, x)
    yield lambda: _ATEN.gelu_backward(y, x)
    yield lambda: _ATEN.threshold_backward(y, x, 0)
    yield lambda: x.mean(-1, keepdim=True)
    yield lambda: x.sum(-1, keepdim=True)
    yield lambda: x.sum(0, keepdim=True)
    yield lambda: x.clone()
    yield lambda: out.copy_(x)
    yield lambda: out.zero_()
    yield lambda: out.fill_(1.0)
    yield lambda: torch.zeros_like(x)
    yield lambda: torch.ones_like(x)
    yield lambda: torch.cat([x, y], 0)
    yield lambda: x.to(torch.float64)
    yield lambda: torch.where(flag, x, y)
    yield lambda: x.masked_fill(flag, 0.0)
    yield lambda: x.softmax(-1)
    yield lambda: x.log_softmax(-1)
    yield lambda: _ATEN._softmax_backward_data(x, soft, -1, torch.float32)
    yield lambda: _ATEN._log_softmax_backward_data(x, soft, -1, torch.float32)
    yield lambda: _ATEN.nll_loss_forward(soft, labels, None, 1, -100)
    yield lambda: _ATEN.native_layer_norm(x, [256], one, one, 1e-5)
    yield (lambda: _ATEN.native_layer_norm_backward(x, y, [256], mean, inverse, one, one, [True, True, True]))
    yield lambda: F.embedding(ids, weight)
    yield lambda: _ATEN.embedding_dense_backward(x, ids, 64, -1, False)
    yield lambda: out.add_(x)
    yield lambda: out.mul_(0.5)
    yield lambda: out.lerp_(y, 0.1)
    yield lambda: out.addcmul_(x, y, value=0.1)
    yield lambda: out.addcdiv_(x, z, value=0.1)
    yield lambda: out * column
    rows_of = torch.randint(0, rows, (rows,))
    yield lambda: x[rows_of]
    yield lambda: _ATEN.index_put(out, [rows_of], x, True)
    yield lambda: out.index_add_(0, rows_of, x)
    yield lambda: _ATEN.slice_backward(x, [x.shape[0], 512], 1, 0, 256, 1)
    yield lambda: x.new_zeros(x.shape)
    yield lambda: out.bernoulli_(0.9)
    yield lambda: out.uniform_()
    yield lambda: out.normal_()
    yield lambda: torch.rand_like(x)
    yield lambda: out.div_(1.5)
    yield lambda: _ATEN.tanh_backward(y, x)
    yield lambda: _ATEN._safe_softmax(x, -1)
    yield lambda: x.amax(-1, keepdim=True)
    yield lambda: x.cumsum(-1)
    scores = torch.rand(rows, 8)
    first = scores.topk(2).indices
    numbers = first.flatten().float()
    yield lambda: scores.topk(2)
    yield lambda: first.flatten().sort()
    yield lambda: scores.gather(1, first)
    yield lambda: scores.scatter(1, first, 0.5)
    yield lambda: numbers.histc(8, 0, 7)
    yield (lambda: _ATEN.nll_loss_backward(one[0], soft, labels, None, 1, -100, torch.tensor(float(labels.numel()))))


def _products(rows: int, inner: int, columns: int) -> Iterator[Callable[[], Any]]:
    left, right, bias = torch.rand(rows, inner), torch.rand(columns, inner), torch.rand(columns)
    stacked, other = torch.rand(4, rows // 4, inner), torch.rand(4, inner, columns)
    yield lambda: left @ right.t()
    yield lambda: torch.addmm(bias, left, right.t())
    yield lambda: torch.bmm(stacked, other)
    if hasattr(F, "grouped_mm"):
        ends = torch.arange(1, 5, dtype=torch.int32) * (rows // 4)
        yield lambda: F.grouped_mm(left, other, offs=ends)


def _attention(length: int) -> Iterator[Callable[[], Any]]:
    query = torch.rand(2, 4, length, 32)
    attention = _ATEN._scaled_dot_product_flash_attention_for_cpu
    output, log_sum = attention(query, query, query, 0.0, True)
    backward = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
    yield lambda: attention(query, query, query, 0.0, True)
    yield lambda: backward(output, query, query, query, output, log_sum, 0.0, True)


def measure_collectives(samples: int = _SAMPLES) -> dict[str, list[list[float]]]:
    """By collective, [bytes that a rank receives, seconds, processor seconds of a rank], between all ranks of the default
    group."""
    found: dict[str, list[list[float]]] = {}
    for num_bytes in COLLECTIVE_BYTES:
        for name, call in _collectives(num_bytes):
            clock, processor = (each / (2 if name == "send" else 1) for each in _least_of_all(call, samples))
            found.setdefault(name, []).append([float(num_bytes), clock, processor])
    return {name: _ascending(points) for name, points in found.items()}


def _collectives(num_bytes: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    group = dist.group.WORLD
    assert group is not None
    num_ranks, rank = group.size(), group.rank()
    piece = max(num_bytes // 4 // (num_ranks - 1), 1)
    whole = torch.zeros(piece * num_ranks)
    part, other = whole[:piece].clone(), torch.zeros_like(whole)
    sizes = [piece] * num_ranks
    reduced = torch.zeros(max(num_bytes * num_ranks // (8 * (num_ranks - 1)), 1))
    message = torch.zeros(max(num_bytes // 4, 1))
    yield "all_gather", lambda: all_gather_into(whole, part, group).wait()
    yield "reduce_scatter", lambda: reduce_scatter_into(part, other, "sum", group).wait()
    yield "all_reduce", lambda: all_reduce_(reduced, "sum", group).wait()
    yield "all_to_all", lambda: all_to_all_v(whole, sizes, sizes, group).wait()
    yield "broadcast", lambda: dist.broadcast(message, 0)
    yield "send", lambda: _message(message, rank)


def _message(message: torch.Tensor, rank: int) -> None:
    """From rank 0 to rank 1 and back: two messages, of which each rank waits for both."""
    for sender in (0, 1):
        if rank == sender:
            dist.send(message, 1 - sender)
        elif rank == 1 - sender:
            dist.recv(message, sender)


def _least_of_all(call: Callable[[], Any], samples: int) -> tuple[float, float]:
    """Of one call, which all ranks make, on the slowest rank: the least series by the clock, and the least in processor
    seconds, which waiting for ranks that other work keeps from their processors makes more of."""
    call()
    number = torch.tensor([min(_number_of_calls(call), 32)])
    dist.broadcast(number, 0)
    dist.barrier()
    series = torch.tensor([_series(call, int(number)) for _ in range(samples)], dtype=torch.float64)
    dist.all_reduce(series, op=dist.ReduceOp.MAX)
    return float(series[:, 0].min()), float(series[:, 1].min())
