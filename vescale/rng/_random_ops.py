"""The in-place random ops of ATen, the rules by which they draw on the CPU, and ``Fill``: one that is asked for."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vescale.compat.cuda_kernels import fused_dropout
from vescale.errors import ArgumentTypeError, GeneratorError
from vescale.placements import Region
from vescale.rng._mt19937 import Mt19937State
from vescale.rng._stream_spans import Span, is_contiguous, spans, stream_order

# How native CPU ops consume the generator: the words of the stream from which each element is computed.
#
# A *word* is a 32-bit output of the generator. A :class:`DrawRule` generates any range of a fill of ``n`` elements:
# it calls the native op on a small contiguous tensor, with a generator advanced to the right word, so that the bits
# are the native ones on every processor. Measured with torch 2.13, and checked on first use by
# :mod:`vescale.rng._cpu_engine`.


# Drawing at most this many words costs less than reading the generator's state, skipping and writing it back.
DISCARDED_WORDS = 1 << 14

# The native op: fills a contiguous 1-D tensor from a generator.
NativeFill = Callable[[torch.Tensor, torch.Generator], object]


class Cursor:
    """A private generator that is moved along the words after a state."""

    def __init__(self, start: Mt19937State) -> None:
        self.start = start
        self._generator = torch.Generator()
        self._word = 0  # the position of the generator
        self._found = (0, start)  # the last state returned, from which a short skip starts
        start.write_to(self._generator)

    def at(self, word: int, drawing: int) -> torch.Generator:
        """The generator ``word`` words after the start; the caller draws ``drawing`` words from it."""
        ahead = word - self._word
        if 0 < ahead <= DISCARDED_WORDS:
            torch.empty(ahead, dtype=torch.uint8).random_(generator=self._generator)  # a word each
        elif ahead:
            self.state(word).write_to(self._generator)
        self._word = word + drawing
        return self._generator

    def state(self, word: int) -> Mt19937State:
        """The state ``word`` words after the start."""
        if word >= self._word > self._found[0]:
            nearest = (self._word, Mt19937State.of(self._generator))
        else:
            nearest = self._found if word >= self._found[0] else (0, self.start)
        self._found = (word, nearest[1].skip(word - nearest[0]))
        return self._found[1]


class DrawRule(ABC):
    """How a fill of ``n`` elements draws. Elements are numbered in memory order."""

    @abstractmethod
    def generate(self, cursor: Cursor, n: int, start: int, out: torch.Tensor, fill: NativeFill) -> None:
        """Elements ``start .. start + len(out)`` of a fill of ``n``, into the contiguous 1-D ``out``."""

    @abstractmethod
    def final(self, cursor: Cursor, n: int, dtype: torch.dtype, fill: NativeFill) -> Mt19937State:
        """The state after a fill of ``n`` elements."""


@dataclass(frozen=True)
class WordsPerElement(DrawRule):
    """Element ``i`` is computed from the words ``words * i .. words * (i + 1)``."""

    words: int

    def num_words(self, n: int) -> int:
        """Words that a fill of ``n`` elements draws."""
        return self.words * n

    def generate(self, cursor: Cursor, n: int, start: int, out: torch.Tensor, fill: NativeFill) -> None:
        fill(out, cursor.at(self.words * start, self.words * out.numel()))

    def final(self, cursor: Cursor, n: int, dtype: torch.dtype, fill: NativeFill) -> Mt19937State:
        return cursor.state(self.num_words(n))


@dataclass(frozen=True)
class NormalBlocks(DrawRule):
    """``normal_`` on 16 or more contiguous elements: Box-Muller within blocks of 16 elements.

    If ``n`` is not a multiple of 16, the last 16 elements are then computed again from 16 more uniforms, which follow those
    of the incomplete block (float32, float64) or of the last whole block (``half_tail``: bfloat16, float16).
    """

    words: int
    half_tail: bool

    UNIT: ClassVar[int] = 16  # elements that are computed together

    def tail_word(self, n: int) -> int:
        """The first word of the last 16 elements, if these are computed again."""
        return self.words * (n // 16 * 16 if self.half_tail else n)

    def generate(self, cursor: Cursor, n: int, start: int, out: torch.Tensor, fill: NativeFill) -> None:
        words, stop = self.words, start + out.numel()
        tail = n - 16 if n % 16 else n
        main_stop = min(stop, tail)
        position = start
        while position < main_stop:
            block = position // 16 * 16
            whole = main_stop // 16 * 16
            if position == block and whole > block:  # whole blocks, in place
                fill(out[position - start : whole - start], cursor.at(words * block, words * (whole - block)))
                position = whole
            else:
                scratch = torch.empty(16, dtype=out.dtype)
                fill(scratch, cursor.at(words * block, words * 16))
                end = min(block + 16, main_stop)
                out[position - start : end - start] = scratch[position - block : end - block]
                position = end
        if stop > tail:
            first = max(start, tail)
            scratch = torch.empty(16, dtype=out.dtype)
            fill(scratch, cursor.at(self.tail_word(n), words * 16))
            out[first - start :] = scratch[first - tail : stop - tail]

    def final(self, cursor: Cursor, n: int, dtype: torch.dtype, fill: NativeFill) -> Mt19937State:
        return cursor.state(self.num_words(n))

    def num_words(self, n: int) -> int:
        """Words that a fill of ``n`` elements draws."""
        return self.tail_word(n) + self.words * 16 if n % 16 else self.words * n


@dataclass(frozen=True)
class NormalPairs(DrawRule):
    """``log_normal_``, and ``normal_`` on few or non-contiguous elements: pairs of double normals, of four words each.

    The generator state keeps the second value of a pair for the next op of this kind. ``strided``: the op does this on
    non-contiguous tensors only.
    """

    strided: bool

    def _fill(self, count: int, dtype: torch.dtype, generator: torch.Generator, fill: NativeFill) -> torch.Tensor:
        out = torch.empty(2 * count, dtype=dtype)[::2] if self.strided else torch.empty(count, dtype=dtype)
        fill(out, generator)
        return out

    def _generator(self, state: Mt19937State) -> torch.Generator:
        generator = torch.Generator()
        state.write_to(generator)
        return generator

    def generate(self, cursor: Cursor, n: int, start: int, out: torch.Tensor, fill: NativeFill) -> None:
        waiting = int(cursor.start.normal_waits)
        if start == 0 and waiting:  # the first element is the kept value: no words
            out[:1] = self._fill(1, out.dtype, self._generator(cursor.start), fill)
            out, start = out[1:], 1
        if not out.numel():
            return
        second = (start - waiting) % 2  # 1: the first element is the second of a pair
        state = cursor.state(2 * (start - waiting - second)).without_waiting_normal()
        if second or self.strided:
            out.copy_(self._fill(second + out.numel(), out.dtype, self._generator(state), fill)[second:])
        else:
            fill(out, self._generator(state))

    def final(self, cursor: Cursor, n: int, dtype: torch.dtype, fill: NativeFill) -> Mt19937State:
        state, count = cursor.start, n
        drawn = n - int(cursor.start.normal_waits)
        if drawn > 0:  # only the last pair matters: draw it again
            count = 2 - drawn % 2
            state = cursor.state(2 * (drawn - count)).without_waiting_normal()
        generator = self._generator(state)
        self._fill(count, dtype, generator, fill)
        return Mt19937State.of(generator)


DROPOUT_MASK = "native_dropout's mask"
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class RandomOp:
    """One in-place random op with its scalar arguments, for example ``RandomOp("normal_", (0.0, 0.02))``.

    ``name`` is the method of ``torch.Tensor``. ``bernoulli_`` with a tensor of probabilities takes it at each call as
    ``parameter``, with the shape of the filled tensor. ``DROPOUT_MASK`` fills a boolean tensor with the elements that
    ``native_dropout`` on CUDA keeps, for an input of ``dtype``; its arguments are the probability of dropping, and whether
    the input has holes in memory (its kernel then processes one element at a time).
    """

    name: str
    arguments: tuple[float | int | None, ...] = ()
    dtype: torch.dtype | None = None

    def fill(
        self, out: torch.Tensor, generator: torch.Generator | None, parameter: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The native op."""
        if self.name == DROPOUT_MASK:
            return self._fill_dropout_mask(out, generator)
        arguments = self.arguments if parameter is None else (parameter,)
        result: torch.Tensor = getattr(torch.Tensor, self.name)(out, *arguments, generator=generator)
        return result

    def telling(self, dtype: torch.dtype) -> RandomOp:
        """The op with arguments for which a difference in draws or rounding shows in the result."""
        general: dict[str, tuple[float, ...]] = {
            "uniform_": (-0.37, 1.91),
            "normal_": (0.3, 1.7),
            "log_normal_": (0.1, 0.7),
            "exponential_": (1.3,),
            "cauchy_": (0.2, 1.1),
            "geometric_": (0.3,),
        }
        match self.name, self.arguments:
            case name, _ if name in general:
                arguments: tuple[Any, ...] = general[name]
            case "bernoulli_", (_,):
                arguments = (0.37,)
            case name, (_, has_holes) if name == DROPOUT_MASK:
                arguments = (0.37, has_holes)
            case "random_", (*low, int(_)) if self._random_words(dtype) == 1:
                high = min(2**27, _integers_up_to(dtype))
                arguments = (1, high) if low and high > 2 else (high,)
            case _:
                arguments = self.arguments
        return RandomOp(self.name, arguments, self.dtype)

    def _fill_dropout_mask(self, out: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        p, has_holes = self.arguments
        if has_holes:
            source = torch.empty(2 * out.numel(), dtype=self.dtype, device=out.device)[::2]
        else:
            source = torch.empty_strided(out.shape, out.stride(), dtype=self.dtype, device=out.device)
        _, mask = fused_dropout(source, 1.0 - float(p or 0.0), generator)
        return out.copy_(mask.view(out.shape) if has_holes else mask)

    @classmethod
    def of_call(cls, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RandomOp:
        """The op of a call of an in-place ATen overload, for example ``aten.normal_.default(x, 0.0, std=0.02)``."""
        scalars = list(args[1:])
        for argument in overload._schema.arguments[len(args) :]:
            if not argument.kwarg_only:
                scalars.append(kwargs.get(argument.name, argument.default_value))
        return cls(overload._schema.name.removeprefix("aten::"), tuple(scalars))

    def cpu_rule(
        self, dtype: torch.dtype, n: int, contiguous: bool, parameter_dtype: torch.dtype | None = None
    ) -> DrawRule | None:
        """How a fill of ``n`` elements draws; None if that is not known."""
        match self.name:
            case "uniform_":
                return WordsPerElement(2 if dtype == torch.float64 else 1)
            case "normal_":
                if n < 16 or not contiguous:
                    return NormalPairs(strided=True)
                half_tail = dtype in _HALVES and half_normal_tail_follows_last_block()
                return NormalBlocks(2 if dtype == torch.float64 else 1, half_tail)
            case "log_normal_":
                return NormalPairs(strided=False)
            case "bernoulli_":
                return WordsPerElement(1 if parameter_dtype in (torch.float32, *_HALVES) else 2)
            case "exponential_" | "cauchy_" | "geometric_":
                return WordsPerElement(2)
            case "random_":
                return WordsPerElement(self._random_words(dtype))
        return None

    def _random_words(self, dtype: torch.dtype) -> int:
        match self.arguments:
            case ():
                return 2 if dtype in (torch.int64, torch.float64) else 1
            case (int(low), None):
                if low == torch.iinfo(torch.int64).min:
                    return 2
                return 1 if _integers_up_to(dtype) - low < 2**28 else 2
            case (int(low), int(high)):
                return 1 if high - low < 2**28 else 2
            case (int(high),):
                return 1 if high < 2**28 else 2
        raise ArgumentTypeError(
            f"random_ with arguments {self.arguments!r}; expected (), (high,), (low, high) or (low, None)"
        )


def inplace_overloads() -> list[Any]:
    """The ATen overloads that :meth:`RandomOp.of_call` accepts."""
    aten = torch.ops.aten
    names = ("uniform_", "normal_", "log_normal_", "exponential_", "cauchy_", "geometric_")
    fills = [getattr(aten, name).default for name in names]
    return [*fills, aten.bernoulli_.float, aten.random_.default, aten.random_.to, getattr(aten.random_, "from")]


@functools.cache
def fills() -> frozenset[Any]:
    """The ATen overloads that :func:`fill_of` knows: an allocation, if any, and one fill."""
    aten = torch.ops.aten
    found = [*inplace_overloads(), aten.bernoulli_.Tensor, aten.bernoulli.default, aten.bernoulli.p]
    found += [aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype]
    found += [aten.rand.default, aten.rand.generator, aten.randn.default, aten.randn.generator]
    found += [aten.randint.default, aten.randint.generator, aten.randint.low, aten.randint.low_generator]
    return frozenset((*found, aten.normal.float_float, aten.native_dropout.default))


def fill_of(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[RandomOp, Any]:
    """The fill of a call of one of :func:`fills`, and its tensor of probabilities, if it has one. Of ``native_dropout``,
    that of its mask on a CPU."""
    match overload.overloadpacket.__name__:
        case "rand" | "rand_like":
            return RandomOp("uniform_", (0.0, 1.0)), None
        case "randn" | "randn_like":
            return RandomOp("normal_", (0.0, 1.0)), None
        case "normal":
            return RandomOp("normal_", (args[0], args[1])), None
        case "randint" | "randint_like" as name:
            bounds = args[:-1] if name == "randint" else args[1:]
            return RandomOp("random_", (0, *map(int, bounds))[-2:]), None
        case "native_dropout":
            return RandomOp("bernoulli_", (1.0 - args[1],)), None
        case "bernoulli" if len(args) > 1 or "p" in kwargs:
            return RandomOp("bernoulli_", (args[1] if len(args) > 1 else kwargs["p"],)), None
        case "bernoulli":
            return RandomOp("bernoulli_"), args[0]
        case "bernoulli_" if len(args) > 1 and isinstance(args[1], torch.Tensor):
            return RandomOp("bernoulli_"), args[1]
    return RandomOp.of_call(overload, args, kwargs), None


def _integers_up_to(dtype: torch.dtype) -> int:
    """One more than the largest integer that ``random_(low, None)`` draws for a dtype."""
    match dtype:
        case torch.float64:
            return 2**53 + 1
        case torch.float32:
            return 2**24 + 1
        case torch.float16:
            return 2**11 + 1
        case torch.bfloat16:
            return 2**8 + 1
        case torch.bool:
            return 2
    return torch.iinfo(dtype).max + (0 if dtype == torch.int64 else 1)


def words_drawn(fill: RandomOp, out: torch.Tensor, limit: int = 4096) -> int | None:
    """The number of words that the native op draws to fill ``out``, if at most ``limit``."""
    generator = torch.Generator().manual_seed(0)
    before = Mt19937State.of(generator)
    fill.fill(out, generator)
    return before.words_until(Mt19937State.of(generator), limit)


@functools.cache
def half_normal_tail_follows_last_block() -> bool:
    """Whether ``normal_`` on 16-bit floats takes its last 16 uniforms after the last whole block (torch 2.13), or after the
    last element as for float32 (2.11)."""
    return words_drawn(RandomOp("normal_"), torch.empty(17, dtype=torch.bfloat16)) == 32


# ``Fill``: the request to an engine to generate a rank's part of one random fill of a whole tensor.


@dataclass(frozen=True)
class Fill:
    """``op`` on a whole tensor of ``region.global_shape`` and ``strides``, of which a rank holds ``region``."""

    op: RandomOp
    region: Region
    strides: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.region.global_shape

    @property
    def numel(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape)

    @property
    def order(self) -> tuple[int, ...]:
        """The dims from slowest to fastest in memory, the order in which one device fills them."""
        return stream_order(self.shape, self.strides)

    @property
    def is_row_major(self) -> bool:
        return is_contiguous(self.shape, self.strides)

    @property
    def is_dense(self) -> bool:
        """Whether the whole tensor has no holes in memory, in any order of its dims."""
        return is_contiguous([self.shape[dim] for dim in self.order], [self.strides[dim] for dim in self.order])

    @property
    def extent(self) -> int:
        """The distance in memory from the first to the last element of the whole tensor, in elements."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def check(self, local: torch.Tensor) -> None:
        """Raises ValueError unless ``local`` has the shape of the region."""
        if local.shape != self.region.local_shape:
            raise GeneratorError(
                f"{self.op.name}: a local tensor of shape {tuple(local.shape)} for a region of shape "
                f"{self.region.local_shape} of the global shape {self.shape}; expected the same shapes: pass the "
                "local tensor of this rank"
            )

    def as_real(self, local: torch.Tensor) -> tuple[Fill, torch.Tensor]:
        """The same fill for the real view of a complex ``local``: twice as many elements and, for ``normal_``, half the
        variance."""
        op, flat = self.op, self.region.flat
        if op.name == "normal_":
            mean, std = _normal_arguments(*op.arguments)
            op = RandomOp("normal_", (mean, std / math.sqrt(2.0)))
        elif op.name != "uniform_":  # the native op refused all others
            raise AssertionError(f"{op.name} on {local.dtype}")
        doubled = None if flat is None else (2 * flat[0], 2 * flat[1])
        region = Region((*self.shape, 2), (*self.region.intervals, ((0, 2),)), doubled)
        view = torch.view_as_real(local)
        return Fill(op, region, (*(2 * stride for stride in self.strides), 1)), view if flat is None else view.flatten()


def _normal_arguments(mean: Any = 0.0, std: Any = 1.0) -> tuple[float, float]:
    return float(mean), float(std)


# Copies between a span of the stream and a local tensor, and the fallback that fills one from the whole tensor.


def copy_out(span: Span, generated: torch.Tensor, local: torch.Tensor) -> None:
    """Copy the span's pieces from the generated elements of the span to ``local``."""
    for piece in span.pieces:
        source = generated.as_strided(piece.sizes, piece.span_strides, generated.storage_offset() + piece.span_offset)
        local.as_strided(piece.sizes, piece.local_strides, local.storage_offset() + piece.local_offset).copy_(source)


def gathered(span: Span, local: torch.Tensor) -> torch.Tensor:
    """The elements of a local tensor at their positions in the span; gaps are zero."""
    found = torch.zeros(span.stop - span.start, dtype=local.dtype, device=local.device)
    for piece in span.pieces:
        source = local.as_strided(piece.sizes, piece.local_strides, local.storage_offset() + piece.local_offset)
        found.as_strided(piece.sizes, piece.span_strides, piece.span_offset).copy_(source)
    return found


def laid_out_as(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """``parameter`` with the strides of ``local``, so that pieces address both."""
    made = torch.empty_strided(local.shape, local.stride(), dtype=parameter.dtype, device=local.device)
    return made.copy_(parameter)


def fill_from_whole(
    fill: Fill,
    local: torch.Tensor,
    parameter: torch.Tensor | None,
    native: Callable[[torch.Tensor, torch.Tensor | None], object],
) -> None:
    """Call ``native(whole, parameter)`` on the whole tensor and keep this rank's part. Memory: the whole tensor.

    ``parameter`` has the strides of ``local``; the other ranks' elements of it are zero.
    """
    order = fill.order
    inverse = sorted(range(len(order)), key=order.__getitem__)
    whole = torch.empty_strided(fill.shape, fill.strides, dtype=local.dtype, device=local.device)
    parts = list(spans(fill.region, order, local.stride(), max(fill.numel, 1), 0))
    arguments = None
    if parameter is not None:
        in_order = torch.zeros(fill.numel, dtype=parameter.dtype, device=local.device)
        for span in parts:
            in_order[span.start : span.stop] = gathered(span, parameter)
        arguments = in_order.view([fill.shape[dim] for dim in order]).permute(inverse)
    native(whole, arguments)
    stream = whole.permute(order).reshape(-1)
    for span in parts:
        copy_out(span, stream[span.start : span.stop], local)
