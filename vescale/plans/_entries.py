"""The entries of a plan: frozen values, in the order they were written; and the grammar of their paths."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import regex
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor.placement_types import Placement

from vescale.errors import PathError, PlanValueError, Source, did_you_mean, kind_of

# The path grammar: a module path as a regular expression, then a tensor of it.
#
# ======================================  =====================================================================
# path                                    names
# ======================================  =====================================================================
# ``blk\.fc1\.weight``                     parameters and buffers whose full name matches
# ``blk\.fc1\.weight.grad``                the gradients of those parameters
# ``blk\.fc1.<in>``, ``blk\.fc1.<out>``     all tensor inputs, outputs of the modules that match
# ``blk\.fc1.<in:x>``, ``...<in:0>``        the input by name or position; ``<out:0>`` the output by position or key
# ``<in:input_ids>``                      an input of the model itself
# ``<in:(input_ids|labels)>``             several of them
# ======================================  =====================================================================
#
# Expressions are matched whole, with the ``regex`` package. A dot of a module path may be written plain: it matches
# itself.


# Regular expressions of bounded size, so that compiling one cannot exhaust the memory of the machine. Matching is
# bounded in time (:mod:`vescale.ir`), but a compilation cannot be interrupted, and ``((a{1000}){1000}){1000}`` compiles
# to a thousand million nodes. Therefore the size is estimated from the text first. The estimate is an upper bound, and
# exact for the syntax that paths need.

MAX_EXPRESSION = 2_000  # characters
_MAX_NODES = 20_000
_MAX_DEPTH = 50

_COUNT = regex.compile(r"\{(\d*)(,?)(\d*)\}")
# What begins a group whose content is read as it stands. Others change how the rest is read (flags, comments), call groups
# again (recursion), or are conditions.
_GROUP = regex.compile(r"\((?:\?(?:[:=!>|]|<[=!]|P?<\w+>|i:|i\)|P=\w+\)))?")


@functools.lru_cache(maxsize=4096)
def compiled(pattern: str) -> regex.Pattern[str]:
    """The compiled expression.

    Raises ValueError for one that does not compile, and for one whose program would be large: more than 2,000 characters,
    50 groups inside of each other, or 20,000 characters once every ``{n}`` is written out.
    """
    _check_size(pattern)
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise PathError(f"{error}; escape special characters with a backslash") from None


def _check_size(pattern: str) -> None:
    if len(pattern) > MAX_EXPRESSION:
        raise PathError(
            f"it has {len(pattern)} characters; at most {MAX_EXPRESSION} are allowed: write several entries"
        )
    sums = [0]  # nodes of each open group, outermost first
    last = 0  # of the part that a count after it repeats
    position = 0
    while position < len(pattern):
        here = pattern[position]
        count = _COUNT.match(pattern, position) if here == "{" else None
        if count is not None:
            times = max(int(digits[:9] or 0) for digits in (count[1], count[3]))
            sums[-1] += last * max(times - 1, 0)
            last *= max(times, 1)
            position = count.end()
        elif here == "(":
            group = _GROUP.match(pattern, position)
            assert group is not None  # "(" alone matches
            if pattern.startswith("?", group.end()) and group.end() == position + 1:
                raise PathError(
                    f"{pattern[position : position + 8]!r} at position {position}: paths cannot contain flags, "
                    "comments, conditions or recursion; groups are (...), (?:...), (?P<name>...), and look-arounds"
                )
            if not group[0].endswith(")"):
                sums.append(1)
            position, last = group.end(), 1
        elif here == ")" and len(sums) > 1:
            last = sums.pop()
            sums[-1] += last
            position += 1
        else:
            position = _class_end(pattern, position) if here == "[" else position + (2 if here == "\\" else 1)
            if here not in "*+?":  # these repeat what is there
                last = 1
                sums[-1] += 1
        if len(sums) > _MAX_DEPTH:
            raise PathError(f"more than {_MAX_DEPTH} nested groups; write several entries")
        if sum(sums) > _MAX_NODES:
            raise PathError(
                f"its repetitions, written out, have more than {_MAX_NODES} characters (up to position {position}); use "
                "+ or * instead of large counts"
            )


def _class_end(pattern: str, start: int) -> int:
    """The position after the character class that begins at ``start``."""
    position = start + 1
    position += pattern.startswith("^", position)
    position += pattern.startswith("]", position)  # the first one is a character
    while position < len(pattern) and pattern[position] != "]":
        if pattern[position] == "[":
            raise PathError(rf"a '[' inside [...] at position {position}; write \[ for the character")
        position += 2 if pattern[position] == "\\" else 1
    return position + 1


_BOUNDARY = regex.compile(r"(?:(?P<module>.*)\.)?<(?P<side>in|out)(?::(?P<key>[^<>:]+))?>", regex.DOTALL)
_EXPRESSION = regex.compile(r"[\\|()\[\]{}*+?^$]")  # no name of an input or key of an output has these
_KEYS = regex.compile(r"[\w|()]+")  # alternatives
# A "<" that opens none of the regular expression groups (?<name>...), (?P<name>...), (?<=...), (?<!...).
_STRAY = regex.compile(r"(?<!\(\?|\(\?P)<")


class Target(enum.Enum):
    """What kind of tensor a path names."""

    STATE = "state"  # a parameter or buffer
    GRAD = "grad"  # the gradient of a parameter
    IN = "in"
    OUT = "out"


@dataclass(frozen=True)
class Path:
    """A parsed path.

    Attributes:
        text: as written.
        pattern: the regular expression for parameter and buffer names (STATE, GRAD) or for module paths (IN, OUT), the
            empty string being the model itself.
        target: what it names there.
        key: the input or output in ``<in:key>``: an int for a position, a str for a name; None for all.
    """

    text: str
    pattern: str
    target: Target
    key: str | int | None = None

    @classmethod
    def parse(cls, text: str) -> Path:
        """Raises ValueError for an empty path, a bad ``<...>``, or an expression that does not compile."""
        if not isinstance(text, str):
            raise PathError(f"the path is {text!r}, {kind_of(text)}; write a parameter name, or <in> for the inputs")
        if len(text) > MAX_EXPRESSION:
            raise PathError(
                f"the path {text[:40]!r}... has {len(text)} characters; at most {MAX_EXPRESSION} are allowed: write "
                "several entries"
            )
        if not text.strip():
            raise PathError("the path is empty; write a parameter name, or <in> for the model's inputs")
        boundary = _BOUNDARY.fullmatch(text)
        if boundary is not None:
            key = boundary["key"]
            path = cls(
                text,
                (boundary["module"] or "").removesuffix("\\"),  # the dot may be written as an escaped one
                Target.IN if boundary["side"] == "in" else Target.OUT,
                None if key is None else int(key) if key.isdigit() else key,
            )
        elif text.endswith(".grad"):
            path = cls(text, text[: -len(".grad")].removesuffix("\\"), Target.GRAD)
        else:
            path = cls(text, text, Target.STATE)
        if path.key_expression is not None:
            if path.target is Target.OUT:
                raise PathError(
                    f"<out:{path.key}> in the path {text!r} is an expression; outputs are named one by one: write an entry "
                    "for each"
                )
            if not _KEYS.fullmatch(path.key_expression) or _is_unbalanced(path.key_expression):
                raise PathError(
                    f"<in:{path.key}> in the path {text!r} is neither a name nor several; write <in:name>, or <in:(a|b)>"
                )
        stray = _STRAY.search(path.pattern)
        if stray is not None:
            raise PathError(
                f"{text[stray.start() :]!r} in the path {text!r} is not an input or output; end the path with .<in>, "
                ".<in:name>, .<in:0>, .<out> or .<out:0>"
            )
        try:
            compiled(path.pattern)
        except ValueError as error:
            raise PathError(f"the path {text!r} is not a valid regular expression: {error}") from None
        return path

    @property
    def key_expression(self) -> str | None:
        """The expression for names of inputs in ``<in:(input_ids|labels)>``; None where ``key`` is a plain name."""
        return self.key if isinstance(self.key, str) and _EXPRESSION.search(self.key) else None

    def matches_key(self, name: str) -> bool:
        """Whether the whole name of an input matches :attr:`key_expression`, which has no repetitions: this is quick."""
        expression = self.key_expression
        return expression is not None and compiled(expression).fullmatch(name) is not None

    def matches(self, name: str, *, timeout: float | None = None) -> bool:
        """Whether the whole ``name`` matches. Raises TimeoutError after ``timeout`` seconds."""
        return compiled(self.pattern).fullmatch(name, timeout=timeout) is not None

    def __str__(self) -> str:
        return self.text


def _is_unbalanced(expression: str) -> bool:
    try:
        compiled(expression)
    except ValueError:
        return True
    return False


# What a checkpointed module saves for backward: the policies of ``plan.checkpoint``, and their forms in a plan.

CheckpointKind = Literal["full", "selective", "save", "offload"]
_NAMES: tuple[str, ...] = tuple(kind for kind in get_args(CheckpointKind) if kind != "save")
_OPTIONS = ("save", "every", "recompute_communication")
_OP = regex.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*(\.[A-Za-z_]\w*)?")


@dataclass(frozen=True)
class CheckpointPolicy:
    """What is saved between the forward of a checkpointed module and its backward.

    Attributes:
        kind: ``full``: the inputs; ``selective``: also results of ops that take long to compute; ``save``: also those of
            the ops that are named; ``offload``: everything, in host memory.
        save: ops (``aten.mm``, ``aten.mm.default``), or ``path :: op`` for those of some modules.
        every: of the ops in ``save``, or the products of ``selective``, every so-manieth call is saved, the first one among
            them; calls are counted for each op and call of the module.
        recompute_communication: collectives in the forward run again, instead of being saved.
    """

    kind: CheckpointKind
    save: tuple[str, ...] = ()
    every: int = 1
    recompute_communication: bool = False

    def form(self) -> str | dict[str, Any]:
        """The policy as a plan has it; :func:`checkpoint_policy` reads it."""
        default = _EVERY.get(self.kind, 1)
        if self.every == default and not self.recompute_communication and self.kind != "save":
            return self.kind
        options: dict[str, Any] = {"save": list(self.save) if self.kind == "save" else self.kind}
        if self.kind == "full":
            options["save"] = []
        if self.every != default:
            options["every"] = self.every
        if self.recompute_communication:
            options["recompute_communication"] = True
        return options

    def text(self) -> str:
        """For programs and tables."""
        parts = [",".join(name.replace(" ", "") for name in self.save) if self.kind == "save" else self.kind]
        parts += [f"every={self.every}"] if self.every != 1 else []
        parts += ["recompute_communication"] if self.recompute_communication else []
        return ";".join(parts)


# Calls of which one is saved, by default.
_EVERY = {"selective": 2}


def checkpoint_policy(given: str | Mapping[str, Any] | CheckpointPolicy) -> CheckpointPolicy:
    """The policy of its form in a plan. Raises ValueError with the right form."""
    if isinstance(given, CheckpointPolicy):
        return given
    if isinstance(given, str):
        if given not in _NAMES:
            raise PlanValueError(
                f"policy={given!r}; use {', '.join(map(repr, _NAMES))}, or {{'save': ['aten.mm'], 'every': 2}}"
                f"{did_you_mean(given, _NAMES)}"
            )
        return CheckpointPolicy(given, every=_EVERY.get(given, 1))  # type: ignore[arg-type]
    if not isinstance(given, Mapping):
        raise PlanValueError(
            f"policy={given!r}; use {', '.join(map(repr, _NAMES))}, or {{'save': ['aten.mm'], 'every': 2}}"
        )
    unknown = sorted(set(map(str, given)) - set(_OPTIONS))
    if unknown:
        raise PlanValueError(
            f"policy has no {unknown[0]!r}; use {', '.join(_OPTIONS)}{did_you_mean(unknown[0], _OPTIONS)}"
        )
    if "save" not in given:
        raise PlanValueError("policy lacks 'save': a list of ops such as ['aten.mm'], or 'selective'")
    kind, save = _saved(given["save"])
    every, again = given.get("every", _EVERY.get(kind, 1)), given.get("recompute_communication", False)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise PlanValueError(f"every={every!r}; use 1 to save each call of an op, 2 for every second one, and so on")
    if every != 1 and kind == "full":
        raise PlanValueError(f"every={every} without ops to save; name ops in save, or remove every")
    if not isinstance(again, bool):
        raise PlanValueError(f"recompute_communication={again!r}; use True or False")
    return CheckpointPolicy(kind, save, every, again)


def checkpoint_budget(given: Any, policy: CheckpointPolicy) -> float | None:
    """``budget_gib`` of an entry. Raises ValueError with the right form."""
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < float("inf"):
        raise PlanValueError(f"budget_gib={given!r}; use a number of GiB on each rank, such as 4 or 0.5")
    if policy.kind == "offload":
        raise PlanValueError(
            "budget_gib with 'offload', which recomputes nothing, so that there is nothing for a budget to choose: "
            "use policy='full' with it"
        )
    return float(given)


def _saved(given: Any) -> tuple[CheckpointKind, tuple[str, ...]]:
    if given == "selective":
        return "selective", ()
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise PlanValueError(f"save={given!r}; use a list of ops such as ['aten.mm'], or 'selective'")
    names = tuple(_normalized(name) for name in given)
    return ("save", names) if names else ("full", ())


def _normalized(text: Any) -> str:
    if not isinstance(text, str):
        text = f"{text}" if hasattr(text, "_schema") or hasattr(text, "overloads") else text
    if not isinstance(text, str):
        raise PlanValueError(f"save holds {text!r}; name ops as 'aten.mm' or 'aten.mm.default', or 'path :: aten.mm'")
    path, op = split_selector(text)
    if not _OP.fullmatch(op):
        raise PlanValueError(f"save holds {text!r}; name ops as 'aten.mm' or 'aten.mm.default', or 'path :: aten.mm'")
    if path is None:
        return op
    if Path.parse(path).target is not Target.STATE:
        raise PlanValueError(f"save holds {text!r}: {path!r} must name modules; remove <...> and .grad")
    return f"{path} :: {op}"


def split_selector(text: str) -> tuple[str | None, str]:
    """(path, op) of ``path :: op``; None for an op of any module."""
    path, colons, op = text.rpartition("::")
    return (path.strip() if colons else None), op.strip().removeprefix("torch.ops.")


# When a placement holds.


class Phase(enum.Flag):
    """A set of phases of training.

    ========  =====================================================================
    ``INIT``  at rest: initialization, optimizer step, checkpoint
    ``FWD``   while the module computes its forward
    ``BWD``   while its backward runs; for ``<in>`` and ``<out>``, the gradient
    ``RUN``   ``FWD | BWD``
    ``ALL``   everything; what an entry without a phase means
    ========  =====================================================================
    """

    INIT = enum.auto()
    FWD = enum.auto()
    BWD = enum.auto()
    RUN = FWD | BWD
    ALL = INIT | RUN


INIT, FWD, BWD, RUN, ALL = Phase.INIT, Phase.FWD, Phase.BWD, Phase.RUN, Phase.ALL

_PHASE_NAMES = {"init": INIT, "fwd": FWD, "bwd": BWD, "run": RUN, "all": ALL}


def parse_phase(text: str) -> Phase:
    """``init``, ``fwd``, ``bwd``, ``run`` or ``all``, in any case. Raises ValueError naming the choices."""
    try:
        return _PHASE_NAMES[text.lower()]
    except KeyError:
        raise PlanValueError(f"phase {text!r} is not one of {', '.join(_PHASE_NAMES)}") from None


def phase_text(phase: Phase) -> str:
    """The name of a phase as :func:`parse_phase` reads it; sets without a name of their own are joined with ``|``."""
    for name, value in _PHASE_NAMES.items():
        if value == phase:
            return name
    return "|".join(name for name, value in _PHASE_NAMES.items() if name in ("init", "fwd", "bwd") and value in phase)


# (axis name, placement) pairs, in the order of the mesh's axes.
AxisPlacements = tuple[tuple[str, Placement], ...]


@dataclass(frozen=True)
class ShardEntry:
    """During ``phase`` a tensor has these ``placements``, on the axes that they name.

    ``given`` (inputs of the model only): whether a plain tensor that the caller passes is ``global``, the same on every
    rank and sharded by the hook, or ``local``, this rank's own part.
    """

    path: Path
    placements: AxisPlacements
    phase: Phase = ALL
    given: Literal["global", "local"] = "global"
    source: Source | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RedistributeEntry:
    """At a module boundary a tensor goes from ``src`` to ``dst``; its gradient from ``grad_src`` to ``grad_dst``.

    A None gradient placement follows from the forward ones: the gradient of ``dst`` arrives as ``dst`` (Replicate where
    that is Partial) and leaves as ``src``.
    """

    path: Path
    src: AxisPlacements
    dst: AxisPlacements
    grad_src: AxisPlacements | None = None
    grad_dst: AxisPlacements | None = None
    source: Source | None = field(default=None, compare=False)


@dataclass(frozen=True)
class AnnotateEntry:
    """A plain local tensor has these placements already: it becomes a DTensor, and nothing moves."""

    path: Path
    placements: AxisPlacements
    source: Source | None = field(default=None, compare=False)


@dataclass(frozen=True)
class FactoryEntry:
    """The placements of tensors that the matching modules make inside their forward (``arange``, ``zeros``, masks)."""

    path: Path
    placements: AxisPlacements
    source: Source | None = field(default=None, compare=False)


AttentionMethod = Literal["all_gather", "ring", "ulysses"]
ATTENTION_METHODS: tuple[AttentionMethod, ...] = get_args(AttentionMethod)


@dataclass(frozen=True)
class AttentionEntry:
    """The method of scaled dot product attention inside the matching modules, on axes that shard the sequence.

    ``all_gather``: keys and values are gathered, and each rank attends with its own queries. ``ring``: blocks of keys and
    values are passed round the ranks. ``ulysses``: the sharding is moved from the sequence to the heads, and back.
    ``methods`` are (axis name, method) pairs, in the order of the mesh's axes.
    """

    path: Path
    methods: tuple[tuple[str, AttentionMethod], ...]
    source: Source | None = field(default=None, compare=False)


@dataclass(frozen=True)
class LocalEntry:
    """The matching modules run on plain local tensors.

    ``kind`` names a known region (``experts``, with ``dispatch`` ``mask`` or ``all_to_all``). ``inputs`` and ``outputs``
    are the placements of the tensors that enter and leave the region.
    """

    path: Path
    kind: str | None = None
    dispatch: str | None = None
    inputs: AxisPlacements = ()
    outputs: AxisPlacements = ()
    source: Source | None = field(default=None, compare=False)


@dataclass(frozen=True)
class UnitEntry:
    """The parameters of each matching module are gathered, and their gradients reduced, together.

    ``reshard_after_forward``: gathered parameters are freed after forward (True), kept for backward (False), or a piece
    is kept on each of this number of ranks; None: freed, except for the model itself. ``reshard_after_backward``: freed
    after every backward (True or None), or only after a backward that reduces gradients (False). ``mp_policy``: dtypes in
    which parameters are gathered and gradients reduced; None: their own. ``offload_pinned``: parameters are in host
    memory at rest, pinned or not; None: on the device.
    """

    path: Path
    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    offload_pinned: bool | None = None
    source: Source | None = field(default=None, compare=False)


@dataclass(frozen=True)
class PrecisionEntry:
    """The dtypes of the matching modules and all inside of them; None: as it is.

    ``param``: of parameters, and of the modules' floating inputs, while the modules compute. ``reduce``: in which their
    gradients are reduced (None: ``param``). ``output``: of the modules' floating outputs. Parameters, gradients and
    optimizer state keep their own dtype.
    """

    path: Path
    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    source: Source | None = field(default=None, compare=False)


@dataclass(frozen=True)
class CheckpointEntry:
    """The matching modules do not keep what their forward computes for backward, but compute it again.

    ``budget_gib``: GiB that all matching modules together may save on a rank; the policy is then the one with the least
    memory, and modules that need not have it save more.
    """

    path: Path
    policy: CheckpointPolicy
    budget_gib: float | None = None
    source: Source | None = field(default=None, compare=False)


Entry = (
    ShardEntry
    | RedistributeEntry
    | AnnotateEntry
    | FactoryEntry
    | AttentionEntry
    | LocalEntry
    | UnitEntry
    | PrecisionEntry
    | CheckpointEntry
)


# Mixed precision and offload of units: PyTorch's objects, and their form in a plan.

_DEFAULT = MixedPrecisionPolicy()
# Without PyTorch 2.15's function of a parameter, which no file can hold.
_PRECISION_OPTIONS = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")


def mp_policy_of(given: MixedPrecisionPolicy | Mapping[str, Any] | None) -> MixedPrecisionPolicy | None:
    """The policy of ``{param_dtype: bfloat16, ...}``; None for a policy that changes nothing.

    Raises ValueError with the correct form.
    """
    if isinstance(given, Mapping):
        unknown = sorted(set(given) - set(_PRECISION_OPTIONS))
        if unknown:
            raise PlanValueError(f"mp_policy has no {unknown[0]!r}; use {', '.join(_PRECISION_OPTIONS)}")
        given = MixedPrecisionPolicy(**{name: _value(name, value) for name, value in given.items()})
    if given is not None and not isinstance(given, MixedPrecisionPolicy):
        raise PlanValueError(f"mp_policy={given!r}; use a MixedPrecisionPolicy, or a dict of its arguments")
    if getattr(given, "param_dtype_override_fn", None) is not None:
        raise PlanValueError(
            "mp_policy has a param_dtype_override_fn, which a plan cannot hold; remove it, and make the modules whose "
            "parameters keep their dtype units of their own, without mp_policy"
        )
    return None if given == _DEFAULT else given


def _value(name: str, value: Any) -> Any:
    if name == "cast_forward_inputs":
        if not isinstance(value, bool):
            raise PlanValueError(f"mp_policy: cast_forward_inputs={value!r}; use True or False")
        return value
    return float_dtype_of(f"mp_policy: {name}", value)


def float_dtype_of(name: str, value: torch.dtype | str | None) -> torch.dtype | None:
    """A floating dtype of torch, or its name, or None. Raises ValueError with the correct form for anything else."""
    found = getattr(torch, value, None) if isinstance(value, str) else value
    if value is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise PlanValueError(f"{name}={value!r}; use a floating-point dtype such as bfloat16 or float32")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """As :func:`float_dtype_of` reads it."""
    return str(dtype).removeprefix("torch.")


def mp_options(policy: MixedPrecisionPolicy | None) -> dict[str, str | bool]:
    """The options that differ from the default policy, dtypes by name, as :func:`mp_policy_of` reads them."""
    found: dict[str, str | bool] = {}
    for name in _PRECISION_OPTIONS if policy is not None else ():
        value = getattr(policy, name)
        if value != getattr(_DEFAULT, name):
            found[name] = dtype_name(value) if isinstance(value, torch.dtype) else value
    return found


def pins_memory(given: OffloadPolicy | Mapping[str, Any] | None) -> bool | None:
    """Whether the host memory that holds parameters at rest is pinned; None: they are on the device.

    Raises ValueError with the correct form.
    """
    if isinstance(given, Mapping):
        if set(given) - {"pin_memory"} or not isinstance(given.get("pin_memory", True), bool):
            raise PlanValueError(f"offload_policy={dict(given)!r}; use {{pin_memory: true}}, or false")
        return bool(given.get("pin_memory", True))
    if isinstance(given, CPUOffloadPolicy):
        return bool(given.pin_memory)
    if given is not None and not isinstance(given, OffloadPolicy):
        raise PlanValueError(f"offload_policy={given!r}; use CPUOffloadPolicy(), or leave it out")
    return None
