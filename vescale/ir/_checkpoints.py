"""The modules whose forward is computed again in backward, and whether what their entries name exists."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vescale.compat import TorchDispatchMode
from vescale.compat.meta_shapes import result_on_meta
from vescale.ir._findings import Findings
from vescale.ir._followed_forward import FlowMode
from vescale.ir._forward_state import state_unchanged
from vescale.ir._model_copy import skeleton_of
from vescale.ir._model_index import ModelIndex, enclosing
from vescale.ir._operations import Checkpoint
from vescale.ir._resolve import Matcher, Resolution
from vescale.plans import CheckpointEntry, Path, Plan, did_you_mean, split_selector

# The ops that each module of a model runs, found by a forward on meta tensors.

_BATCH, _LENGTH = 2, 16
_ATTENTION = "_scaled_dot_product"


class MetaOps:
    """Runs a copy of the model on the meta device when it is first asked; where that fails, single modules of the copy.

    The model itself does not run, and keeps its counters and caches. Of one that cannot be copied nothing is known. Inputs
    are made up: token ids for ``input_ids``, else one tensor that fits the first layer.
    """

    def __init__(self, index: ModelIndex) -> None:
        self._index = index
        self._copied: nn.Module | None = None
        self._found: dict[str, Counter[str] | None] = {}
        self._whole: Mapping[str, Counter[str]] | None = None
        self._has_run = False

    def below(self, path: str) -> Counter[str] | None:
        """(op with overload -> number of calls) in the forward of a module and those inside; None: not known."""
        if not self._has_run:
            self._has_run = True
            with contextlib.suppress(Exception):  # whatever the model's classes raise
                self._copied = skeleton_of(self._index.model).to("meta")
                self._whole = _ops_of(self._copied, "")
        if self._whole is not None and any(_is_in(other, path) for other in self._whole):
            return _sum(self._whole, path)
        if path not in self._found:
            alone = None if self._copied is None else _ops_of(self._copied.get_submodule(path), path)
            self._found[path] = None if alone is None else _sum(alone, path)
        return self._found[path]

    def runs(self, path: str, op: str) -> bool:
        """Whether a forward of the module runs the op (``aten.mm``, ``aten.mm.default``); True where it is not known."""
        found = self.below(path)
        if found is None:
            return True
        if _is_attention(op):  # which kernel runs depends on the device
            return any(map(_is_attention, found))
        return any(name == op or name.rpartition(".")[0] == op for name in found)


def _is_attention(op: str) -> bool:
    return op.partition(".")[2].lstrip("_").startswith(_ATTENTION.lstrip("_"))


def _is_in(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _sum(by_module: Mapping[str, Counter[str]], path: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for module, ops in by_module.items():
        if _is_in(module, path):
            total += ops
    return total


def _ops_of(module: nn.Module, path: str) -> Mapping[str, Counter[str]] | None:
    """By the innermost module that runs; None if no forward succeeds."""
    for inputs in _made_up_inputs(module):
        counter = _Counter(path)
        with (
            contextlib.suppress(Exception),
            state_unchanged(module),  # globals, and random numbers of the host
            counter.hooks(module),
            FlowMode(counter),
            torch.no_grad(),
        ):
            with counter:
                module(**inputs)
            return counter.ops
    return None


class _Counter(TorchDispatchMode):
    """Counts ops by the running module; also attention, by its function, whatever it is made of on meta tensors."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.ops: dict[str, Counter[str]] = {}
        self._path, self._running = path, [path]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note(str(func))
        return result_on_meta(func, args, kwargs or {})

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if name == "scaled_dot_product_attention":
            self._note(f"aten.{name}.default")

    def _note(self, name: str) -> None:
        self.ops.setdefault(self._running[-1], Counter())[name] += 1

    @contextlib.contextmanager
    def hooks(self, root: nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, module in root.named_modules():
                path = ".".join(part for part in (self._path, name) if part)
                stack.enter_context(module.register_forward_pre_hook(lambda *_, p=path: self._running.append(p)))
                leave = module.register_forward_hook(lambda *_: self._running.pop() and None, always_call=True)
                stack.enter_context(leave)
            yield


def _made_up_inputs(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Keyword arguments that the module's forward may take."""
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return
    with torch.device("meta"):
        if "input_ids" in parameters:
            tokens = torch.empty(_BATCH, _LENGTH, dtype=torch.int64)
            given = {name: tokens for name in ("input_ids", "decoder_input_ids") if name in parameters}
            yield {**given, "use_cache": False} if "use_cache" in parameters else given
        needed = [
            name
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        if len(needed) == 1:
            for x in _first_inputs(module):
                yield {needed[0]: x}


def _first_inputs(module: nn.Module) -> Iterator[torch.Tensor]:
    """What the first layers of a module take, which may be what the module takes."""
    for layer in module.modules():
        own = next(layer.parameters(recurse=False), None)
        dtype = own.dtype if own is not None else None
        if isinstance(layer, nn.Embedding):
            yield torch.empty(_BATCH, _LENGTH, dtype=torch.int64)
        elif isinstance(layer, nn.Linear):
            yield torch.empty(_BATCH, _LENGTH, layer.in_features, dtype=dtype)
            yield torch.empty(_BATCH, layer.in_features, dtype=dtype)
        elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            yield torch.empty(_BATCH, layer.in_channels, *[32] * len(layer.kernel_size), dtype=dtype)
        elif own is not None and own.ndim == 1:  # a norm
            yield torch.empty(_BATCH, _LENGTH, own.shape[0], dtype=dtype)


def find_checkpoints(
    plan: Plan, resolution: Resolution, index: ModelIndex, findings: Findings
) -> Mapping[str, Checkpoint]:
    """By module. Findings: entries inside of each other, on the model itself, or inside of local regions; selectors and ops
    that match nothing."""
    found: dict[str, Checkpoint] = {}
    numbers = {id(entry): number for number, entry in enumerate(plan.entries)}
    checker = _Selectors(index, findings)
    for path, entry in resolution.checkpoints.items():
        if _is_allowed(path, entry, resolution, findings):
            save = tuple(checker.resolved(path, entry))
            policy = replace(entry.policy, save=save)
            number = numbers[id(entry)] if entry.budget_gib is not None else 0
            found[path] = Checkpoint(policy, entry.budget_gib, number)
    checker.report()
    return found


def _is_allowed(path: str, entry: CheckpointEntry, resolution: Resolution, findings: Findings) -> bool:
    if path == "":
        findings.error(
            "checkpoint-root",
            f"checkpoint '{entry.path}' names the model itself: its whole forward would be recomputed at once, which "
            "needs as much memory as saving it; name its blocks, as in "
            r"'layers.\d+'",
            entry.source,
        )
        return False
    for outer in list(enclosing(path))[1:]:
        around = resolution.checkpoints.get(outer)
        if around is not None and outer != "":
            findings.error(
                "checkpoint-nested",
                f"{{names}}: checkpoint '{entry.path}' is inside '{outer}', which checkpoint '{around.path}' "
                f"({around.source}) already recomputes as a whole; keep one of the two",
                entry.source,
                path,
            )
            return False
        if outer in resolution.locals:
            findings.error(
                "checkpoint-local",
                f"{{names}}: checkpoint '{entry.path}' is inside the local region '{outer}' "
                f"({resolution.locals[outer].source}); name the module of the region, or one that contains it",
                entry.source,
                path,
            )
            return False
    return True


class _Selectors:
    """Resolves what is in ``save``, each text once."""

    def __init__(self, index: ModelIndex, findings: Findings) -> None:
        self.index, self.findings = index, findings
        self._matcher = Matcher(index, findings)
        self._ops: MetaOps | None = None
        self._modules: dict[tuple[int, str], tuple[str, ...]] = {}
        self._used: Counter[tuple[int, str]] = Counter()
        self._entries: dict[int, CheckpointEntry] = {}

    def resolved(self, path: str, entry: CheckpointEntry) -> Iterator[str]:
        """The selectors for the module at ``path``, with relative paths of single modules."""
        self._entries[id(entry)] = entry
        for text in entry.policy.save:
            where, op = split_selector(text)
            if not self._exists(op, entry):
                continue
            if where is None:
                self._used[id(entry), text] += self._is_run(path, op)
                yield op
                continue
            for module in self._matching(where, entry):
                if module == path or module.startswith(f"{path}."):
                    self._used[id(entry), text] += self._is_run(module, op)
                    relative = module.removeprefix(path).removeprefix(".")
                    yield f"{relative} :: {op}" if relative else op

    def report(self) -> None:
        """Findings for selectors that match nothing."""
        for (key, text), number in self._used.items():
            entry = self._entries[key]
            if not number:
                self.findings.error("no-match", self._problem(text, entry), entry.source)
        for entry in self._entries.values():
            for text in entry.policy.save:
                where, op = split_selector(text)
                is_unused = (id(entry), text) not in self._used and self._exists(op, None)
                if where is not None and is_unused and self._modules.get((id(entry), where)):
                    problem = (
                        f"checkpoint '{entry.path}': no module that '{where}' matches is inside a module that the "
                        "entry names; write paths from the model's root, as in the entry itself"
                    )
                    self.findings.error("no-match", problem, entry.source)

    def _problem(self, text: str, entry: CheckpointEntry) -> str:
        where, op = split_selector(text)
        modules = self._modules[id(entry), where] if where is not None else tuple(self._of_entry(entry))
        seen: Counter[str] = Counter()
        for module in modules:
            seen.update(self._meta_ops().below(module) or {})
        shown = ", ".join(name for name, _ in seen.most_common(12)) or "none"
        return (
            f"checkpoint '{entry.path}': no op of a forward on meta tensors is {text!r}; expected one of {shown}"
            f"{did_you_mean(op, seen)}"
        )

    def _of_entry(self, entry: CheckpointEntry) -> tuple[str, ...]:
        return self._matcher.modules(entry.path, "checkpoint", entry.source)

    def _matching(self, where: str, entry: CheckpointEntry) -> tuple[str, ...]:
        key = (id(entry), where)
        if key not in self._modules:
            self._modules[key] = self._matcher.modules(Path.parse(where), f"checkpoint '{entry.path}'", entry.source)
        return self._modules[key]

    def _exists(self, op: str, entry: CheckpointEntry | None) -> bool:
        namespace, name, *overload = op.split(".")
        try:
            packet = getattr(getattr(torch.ops, namespace), name)
            known = not overload or overload[0] in packet.overloads()
        except (AttributeError, RuntimeError):
            known = False
        if not known and entry is not None:
            names = [f"{namespace}.{other}" for other in dir(getattr(torch.ops, namespace))]
            self.findings.error(
                "no-match",
                f"checkpoint '{entry.path}': there is no op {op!r}{did_you_mean(op, names)}; name ops as in "
                "torch.ops: 'aten.mm' or 'aten.mm.default'",
                entry.source,
            )
        if known and entry is not None:
            overloads = [getattr(packet, name) for name in overload or packet.overloads()]
            if all(one._schema.is_mutable for one in overloads):
                self.findings.error(
                    "checkpoint-write",
                    f"checkpoint '{entry.path}': {op!r} writes to its argument, so that its result cannot be saved "
                    "separately; name the op that creates what is written to, or a later one",
                    entry.source,
                )
                return False
        return known

    def _is_run(self, path: str, op: str) -> bool:
        """Whether the forward of a module runs the op; True where that cannot be found out."""
        return self._meta_ops().runs(path, op)

    def _meta_ops(self) -> MetaOps:
        if self._ops is None:
            self._ops = MetaOps(self.index)
        return self._ops
