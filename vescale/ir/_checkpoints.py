"""The modules whose forward is computed again in backward, and whether what their entries name exists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from vescale.ir._findings import Findings
from vescale.ir._meta_ops import MetaOps
from vescale.ir._model_index import ModelIndex, enclosing
from vescale.ir._operations import Checkpoint
from vescale.ir._path_matcher import Matcher
from vescale.ir._resolution import Resolution
from vescale.plans import CheckpointEntry, Path, Plan, did_you_mean, split_selector

__all__ = ["find_checkpoints"]


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
            f"checkpoint '{entry.path}' names the model itself: all of its forward would be computed again at once, which "
            r"needs as much memory as saving it; name its blocks, as 'layers.\d+'",
            entry.source,
        )
        return False
    for outer in list(enclosing(path))[1:]:
        around = resolution.checkpoints.get(outer)
        if around is not None and outer != "":
            findings.error(
                "checkpoint-nested",
                f"{{names}}: checkpoint '{entry.path}' is inside of '{outer}', which checkpoint '{around.path}' "
                f"({around.source}) computes again as a whole; keep one of the two",
                entry.source,
                path,
            )
            return False
        if outer in resolution.locals:
            findings.error(
                "checkpoint-local",
                f"{{names}}: checkpoint '{entry.path}' is inside of the local region '{outer}' "
                f"({resolution.locals[outer].source}); name the module of the region, or one around it",
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
                        f"checkpoint '{entry.path}': no module that '{where}' matches is in one that the entry names; write "
                        "paths from the model on, as the entry's own"
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
                f"checkpoint '{entry.path}': there is no op {op!r}{did_you_mean(op, names)}; name ops as torch.ops has "
                "them, 'aten.mm' or 'aten.mm.default'",
                entry.source,
            )
        if known and entry is not None:
            overloads = [getattr(packet, name) for name in overload or packet.overloads()]
            if all(one._schema.is_mutable for one in overloads):
                self.findings.error(
                    "checkpoint-write",
                    f"checkpoint '{entry.path}': {op!r} writes to its argument, so that its result cannot be kept apart; "
                    "name the op that makes what is written to, or one behind it",
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
