"""``Cut``: which modules and parameters of a model belong to which stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from vescale.errors import PipelineCutError
from vescale.ir import Program
from vescale.pipeline._balance import balanced_splits
from vescale.pipeline._parameter_reads import stages_that_read
from vescale.plans import Path, PipelineEntry


@dataclass(frozen=True)
class Cut:
    """A model in stages.

    Attributes:
        splits: the module before whose call stage 1, 2, ... begins.
        bound: stages of each module that runs inside one stage, outermost ones only, with at least one parameter; of a
            module with several names (the embedding of an encoder and a decoder) those of all of them, and of one that is
            listed in several (the norm and the head of an early exit) all these.
        owners: stages of each parameter, by first name: all stages that one of its names belongs to.
    """

    splits: tuple[str, ...]
    bound: Mapping[str, frozenset[int]]
    owners: Mapping[str, frozenset[int]]

    @property
    def num_stages(self) -> int:
        """The number of stages: one more than there are splits."""
        return len(self.splits) + 1

    @property
    def containers(self) -> frozenset[str]:
        """Modules that contain the beginning of a stage, so that they run in several; the model itself is one."""
        return _containers(self.splits)

    @classmethod
    def of(cls, model: nn.Module, entry: PipelineEntry, num_ranks: int, program: Program | None = None) -> Cut:
        """Return the stages of an entry. Raises PlanError for paths that match nothing, or that cannot begin a stage.

        Args:
            model: the whole model.
            entry: what ``Plan.pipeline`` has added.
            num_ranks: of the axis that runs the stages.
            program: whose checkpoint entries determine what stages hold.
        """
        order = {name: n for n, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
        explicit: dict[str, set[int]] = {}
        parameters: dict[str, set[int]] = {}
        if entry.stages:
            listed: list[list[str]] = []
            for stage, paths in enumerate(entry.stages):
                listed.append([])
                for path in paths:
                    named = [name for name, _ in model.named_parameters() if path.matches(name, timeout=1.0)]
                    for name in named:
                        parameters.setdefault(name, set()).add(stage)
                    listed[-1] += _matching(path, order, entry) if not named else ()
            for stage, names in enumerate(listed):
                for name in names:
                    explicit.setdefault(name, set()).add(stage)
                if not names:
                    raise PipelineCutError(
                        f"pipeline: stages= names no module of stage {stage}; name its first module",
                        entry.source,
                    )
            splits = []
            for stage, names in enumerate(listed[1:], 1):
                alone = [name for name in names if explicit[name] == {stage}]
                if not alone:
                    raise PipelineCutError(
                        f"pipeline: all modules of stage {stage}, {', '.join(names)}, are also in other stages; name "
                        "its first module",
                        entry.source,
                    )
                splits.append(_first_called(model, min(alone, key=order.__getitem__)))
        elif entry.split_before:
            found = {_first_called(model, n) for path in entry.split_before for n in _matching(path, order, entry)}
            splits = sorted(found, key=order.__getitem__)
        else:
            splits = balanced_splits(model, entry, num_ranks, program)
        return cls._of_splits(model, entry, tuple(splits), explicit, parameters)

    @classmethod
    def _of_splits(
        cls,
        model: nn.Module,
        entry: PipelineEntry,
        splits: tuple[str, ...],
        explicit: Mapping[str, set[int]],
        parameters: Mapping[str, set[int]],
    ) -> Cut:
        for outer in ("", *splits):
            inside = [name for name in splits if name != outer and name.startswith(f"{outer}.")] if outer else []
            if inside or (outer in splits and outer == ""):
                raise PipelineCutError(
                    f"pipeline: {inside[0]!r} is part of {outer!r}; split before only one of the two", entry.source
                )
        if "" in splits:
            raise PipelineCutError(
                "pipeline: a stage cannot begin before the model itself; name one of its modules", entry.source
            )
        read = stages_that_read(model, splits)
        names_of = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        only = {  # a tied parameter does not tell which of its modules reads it
            name: next(iter(read[name]))
            for name, parameter in model.named_parameters()
            if len(read.get(name, ())) == 1 and names_of[id(parameter)] == 1
        }
        stage_of = _stages_of_modules(model, splits, explicit, only)
        if list(splits) != sorted(splits, key=lambda name: list(stage_of).index(name)):
            raise PipelineCutError(
                f"pipeline: the stages begin before {', '.join(splits)}, which are not in order", entry.source
            )
        containers = _containers(splits)
        for name in containers - explicit.keys():  # run in several stages; their own parameters are used in the first
            stage_of[name] = 0
        bound: dict[str, frozenset[int]] = {}
        owners: dict[int, set[int]] = {}
        names: dict[int, str] = {}

        def stages_of_name(name: str) -> frozenset[int]:
            above = name
            while above and above not in explicit:
                above = above.rpartition(".")[0]
            return frozenset(explicit[above] if above and above not in containers else {stage_of[name]})

        def visit(name: str, module: nn.Module) -> None:
            if name not in containers:
                inside = {
                    stages_of_name(f"{name}.{n}" if n else name)
                    for n, _ in module.named_modules(remove_duplicate=False)
                }
                if len(inside) == 1 and next(module.parameters(), None) is not None:
                    bound[name] = inside.pop()
                    return
            for child, inner in module.named_children():
                visit(f"{name}.{child}" if name else child, inner)

        visit("", model)
        for split in splits:
            bound.setdefault(split, frozenset({stage_of[split]}))
        for name, parameter in model.named_parameters(remove_duplicate=False):
            first = names.setdefault(id(parameter), name)
            around = name.rpartition(".")[0]
            found = set(parameters.get(name, ())) | read.get(first, frozenset())
            is_called = around not in containers and not isinstance(
                model.get_submodule(around), nn.ParameterList | nn.ParameterDict
            )
            if is_called or not found:
                found |= stages_of_name(around)
            owners.setdefault(id(parameter), set()).update(found)
        empty = set(range(len(splits) + 1)) - {stage for stages in owners.values() for stage in stages}
        if empty:
            begins = ["the model's beginning", *(f"before {split!r}" for split in splits)]
            raise PipelineCutError(
                f"pipeline: stage {min(empty)}, which begins {begins[min(empty)]}, has no parameters; use fewer "
                "stages, or begin it before a module with parameters",
                entry.source,
            )
        stages_of: dict[int, set[int]] = {}
        for name, stages in bound.items():
            stages_of.setdefault(id(model.get_submodule(name)), set()).update(stages)
        return cls(
            splits,
            {name: frozenset(stages_of[id(model.get_submodule(name))]) for name in bound},
            {names[key]: frozenset(stages) for key, stages in owners.items()},
        )


def _containers(splits: Sequence[str]) -> frozenset[str]:
    around = [split.split(".")[:-1] for split in splits]
    return frozenset({""} | {".".join(parts[:n]) for parts in around for n in range(1, len(parts) + 1)})


def _stages_of_modules(
    model: nn.Module, splits: Sequence[str], explicit: Mapping[str, set[int]], read: Mapping[str, int]
) -> dict[str, int]:
    """The stage of each module: the first given one, else the one stage in which a forward reads its parameters, as far as
    that is known (``read``, by untied parameter), else by the order of the model's modules, in which a stage begins at its
    split."""
    stage_of: dict[str, int] = {}
    current, containers = 0, _containers(splits)
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, module in model.named_modules(remove_duplicate=False):
        current += name in splits and name not in stage_of
        around = name.rpartition(".")[0]
        reads = {read.get(first_names[id(parameter)]) for parameter in module.parameters()}
        if name in explicit:
            stage_of[name] = min(explicit[name])
        elif around in stage_of and any(around == e or around.startswith(f"{e}.") for e in explicit if around):
            stage_of[name] = stage_of[around]
        elif len(reads) == 1 and None not in reads and name not in splits:
            stage_of[name] = reads.pop()  # type: ignore[assignment]
        elif not reads and around not in containers:  # without parameters: with the module around it
            stage_of[name] = stage_of[around]
        else:
            stage_of[name] = current
    return stage_of


def _first_called(model: nn.Module, name: str) -> str:
    """The module itself, or the first module of a list or dict of modules, which are never called."""
    module = model.get_submodule(name)
    while isinstance(module, nn.ModuleList | nn.ModuleDict) and len(module):
        child, module = next(module.named_children())
        name = f"{name}.{child}"
    return name


def _matching(path: Path, order: Mapping[str, int], entry: PipelineEntry) -> Sequence[str]:
    found = [name for name in order if name and path.matches(name, timeout=1.0)]
    if not found:
        blocks = [name for name in order if name.rpartition(".")[2].isdigit()][:3]
        hint = f", for example {', '.join(map(repr, blocks))}" if blocks else ""
        raise PipelineCutError(
            f"pipeline: {str(path)!r} matches no module of the model; name modules{hint}", entry.source
        )
    return found
