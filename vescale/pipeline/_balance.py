"""``balance="cost"``: stages of consecutive blocks, so that the slowest stage is as fast as possible."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry

from vescale.compat.meta_shapes import result_on_meta
from vescale.compat.tensor_subclasses import TorchDispatchMode, tree_leaves
from vescale.errors import PipelineCutError, PlanError
from vescale.ir import Checkpoint, FlowMode, Local, Program, example_inputs, skeleton_of, stand_in_for_experts
from vescale.pipeline._schedule import make_schedule
from vescale.plans import CheckpointPolicy, PipelineEntry, config_value, split_selector
from vescale.runtime import SavingRule

# ``block_work``: what the blocks of a model compute, relative to each other.

_LENGTH = 4096
_STEPS = 64  # of recurrent layers, whose forward on meta tensors is many ops for each token


def block_work(model: nn.Module, blocks: str, num_blocks: int) -> list[float]:
    """The floating-point operations of a forward, by block; those before the blocks count for the first, others for the
    last.

    They are counted in a forward on meta tensors: one row of 4,096 tokens (64 with recurrent layers), or as many as the
    model takes, or what fits its first layer. Where the model does not run so (its forward depends on values, as that of
    experts in a loop), the numbers of parameters that multiply stand for them, those of experts by the share that a token
    uses.

    Args:
        blocks: path of the ModuleList.
    """
    skeleton = skeleton_of(model).to("meta")
    inside = list(skeleton.get_submodule(blocks).children())[:num_blocks]
    for inputs in guessed_inputs(skeleton, length=num_tokens(skeleton)):
        counter = _Counter(inside)
        with contextlib.suppress(Exception), torch.no_grad(), FlowMode(counter), counter:
            skeleton(**inputs)
            if all(counter.work) and counter.has_run == len(inside):
                return counter.work
    return _by_parameters(model, model.get_submodule(blocks))


def num_tokens(model: nn.Module, length: int | None = None) -> int:
    """Of a row in a forward on meta tensors that stands for one of ``length`` tokens."""
    is_recurrent = any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in model.modules())
    length = length or _LENGTH
    return min(length, _STEPS) if is_recurrent else length


def guessed_inputs(skeleton: nn.Module, rows: int = 1, length: int | None = None) -> Iterator[dict[str, Any]]:
    """Inputs on the meta device that the forward of a model on it may run with.

    Args:
        length: of tokens; None: 4,096, or as many as the model takes.
    """
    found = None
    with contextlib.suppress(PlanError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about guesses
        found = example_inputs(skeleton, rows, length or _LENGTH)
    if found is not None:
        yield found
    parameters = inspect.signature(skeleton.forward).parameters.items()
    required = [n for n, p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for most in (length or _LENGTH, *_sizes_of_tables(skeleton), 8):  # of ids, and labels
        tokens = torch.empty(rows, most, dtype=torch.int64, device="meta")
        yield dict.fromkeys(required, tokens)


def _sizes_of_tables(skeleton: nn.Module) -> list[int]:
    """Numbers of rows of embeddings, and of parameters around modules: one may be that of positions. The largest first."""
    tables = [m.weight for m in skeleton.modules() if isinstance(m, nn.Embedding)]
    around = [m for m in skeleton.modules() if next(m.children(), None) is not None]
    tables += [p for m in around for p in m.parameters(recurse=False) if p.ndim > 1]
    return sorted({n for table in tables for n in table.shape[:-1] if 8 < n < _LENGTH or 1 < n < 8}, reverse=True)[:6]


class _Counter(TorchDispatchMode):
    """Adds up the operations of products, attention and convolutions."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.work = [0.0] * len(blocks)
        self.has_run, self._running = 0, 0
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda *_, number=number: self._begin(number))
            block.register_forward_hook(lambda *_: self._end())

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Of torch functions; ops are counted."""

    def _begin(self, number: int) -> None:
        self._running = number
        self.has_run = max(self.has_run, number + 1)

    def _end(self) -> None:
        if self.has_run == len(self.work):
            self._running = len(self.work) - 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = result_on_meta(func, args, kwargs or {})
        count: Any = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.work[self._running] += count(*args, **(kwargs or {}), out_val=result)
        return result


def _by_parameters(model: nn.Module, blocks: nn.Module) -> list[float]:
    share = _share_of_experts(model)

    def cost(path: str, module: nn.Module) -> float:
        if isinstance(module, nn.Embedding):  # looked up, not multiplied
            return 0.0
        part = share if "expert" in path and "shared_expert" not in path else 1.0
        return sum(part * p.numel() for p in module.parameters(recurse=False) if p.ndim > 1)

    work = [sum(cost(path, m) for path, m in block.named_modules()) or 1.0 for block in blocks.children()]
    inside, seen = {id(m) for m in blocks.modules()}, False
    for path, module in model.named_modules():
        if id(module) in inside:
            seen = True
        else:
            work[-1 if seen else 0] += cost(path, module)
    return work


def _share_of_experts(model: nn.Module) -> float:
    config: Any = getattr(model, "config", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next(filter(None, (config_value(config, name) for name in names)), None)
    chosen = config_value(config, "num_experts_per_tok")
    return float(chosen) / float(experts) if experts and chosen else 1.0


# ``block_memory``: what the forward of each block of a model holds for backward.


def block_memory(
    model: nn.Module, blocks: str, num_blocks: int, program: Program | None, rows: int, length: int
) -> list[float]:
    """Bytes by block of the tensors that a forward of one micro-batch saves for backward, before axes of the mesh cut them;
    those before the blocks count for the first, others for the last. Parameters and buffers do not count.

    They are counted in a forward on meta tensors; with recurrent layers, in one of fewer tokens, which have the same share.
    Zeros where the model does not run so.

    Args:
        program: its modules with a checkpoint entry hold their inputs, and what the policy saves.
        rows, length: of the micro-batch, with ``length`` tokens, or as many as the model takes.
    """
    skeleton = skeleton_of(model).to("meta").train()
    policies: dict[str, CheckpointPolicy] = {}
    for instruction in program or ():
        if isinstance(instruction.op, Checkpoint):
            policies[instruction.path] = instruction.op.policy
        elif isinstance(instruction.op, Local) and instruction.op.kind == "experts":
            stand_in_for_experts(skeleton.get_submodule(instruction.path))
    inside = list(skeleton.get_submodule(blocks).children())[:num_blocks]
    tokens = num_tokens(skeleton, length)
    for inputs in guessed_inputs(skeleton, rows, tokens):
        held = _Held(skeleton, inside, policies)
        with contextlib.suppress(Exception), held.watching():
            output = skeleton(**inputs)
            if held.has_run == len(inside):
                del output
                return [num_bytes * length / tokens for num_bytes in held.bytes]
    return [0.0] * num_blocks


class _Held(TorchDispatchMode):
    """Adds up what autograd saves, each memory once, by the block that runs."""

    def __init__(
        self, skeleton: nn.Module, blocks: Sequence[nn.Module], policies: Mapping[str, CheckpointPolicy]
    ) -> None:
        super().__init__()
        self.bytes = [0.0] * len(blocks)
        self.has_run, self._running = 0, 0
        self._seen: dict[int, Any] = {}
        for tensor in (*skeleton.parameters(), *skeleton.buffers()):
            self._is_new(tensor)
        self._rule: SavingRule | None = None
        self._within = 0  # modules with a checkpoint entry
        self._handles: list[Any] = []
        for number, block in enumerate(blocks):
            self._hook(block, lambda *_, number=number: self._begin(number), lambda *_: self._end())
        for path, policy in policies.items():
            module = skeleton.get_submodule(path)
            self._hook(module, lambda _, *args, policy=policy: self._enter(policy, args), lambda *_: self._leave())

    def _hook(self, module: nn.Module, before: Any, after: Any) -> None:
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after))

    @contextlib.contextmanager
    def watching(self) -> Any:
        try:
            with torch.enable_grad(), FlowMode(self), saved_tensors_hooks(self._save, lambda saved: saved), self:
                yield
        finally:
            for handle in self._handles:
                handle.remove()
            self._seen.clear()

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Of torch functions; what is saved is looked at."""

    def _begin(self, number: int) -> None:
        self._running, self.has_run = number, max(self.has_run, number + 1)

    def _end(self) -> None:
        if self.has_run == len(self.bytes):
            self._running = len(self.bytes) - 1

    def _enter(self, policy: CheckpointPolicy, args: Any) -> None:
        if not self._within:
            # Selectors of modules count everywhere: more than they save.
            names = tuple(split_selector(text)[1] for text in policy.save)
            self._rule = SavingRule(replace(policy, save=names), "")
            if policy.kind != "offload":
                self._add(args)
        self._within += 1

    def _leave(self) -> None:
        self._within -= 1

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._within:
            self._add(tensor)
        return tensor

    def _add(self, value: Any) -> None:
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and self._is_new(tensor):
                self.bytes[self._running] += tensor.untyped_storage().nbytes()

    def _is_new(self, tensor: torch.Tensor) -> bool:
        """Whether its memory has not been seen; it is kept, so that no other one gets its address."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen:
            return False
        self._seen[storage._cdata] = storage
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = result_on_meta(func, args, kwargs or {})
        if self._within and self._rule is not None and self._rule.saves(func, str):
            self._add(result)
        return result


def balanced_splits(model: nn.Module, entry: PipelineEntry, num_ranks: int, program: Program | None) -> list[str]:
    """Names of the blocks before which a stage begins. A block costs what ``entry.costs`` says, or :func:`block_work`;
    what is around the blocks counts for the first and the last.

    Raises PlanError where there are too few blocks, costs of blocks are missing, or no cut keeps all ranks under
    ``entry.memory_gib``.
    """
    per_rank = entry.stages_per_rank or (2 if entry.schedule in ("ZBVZeroBubble", "DualPipeV") else 1)
    num_stages = num_ranks * per_rank
    name = blocks_of(model, num_stages)
    if name is None:
        raise PipelineCutError(
            f"pipeline: balance='cost' found no ModuleList of at least {num_stages} blocks; pass split_before=",
            entry.source,
        )
    blocks = model.get_submodule(name)
    number = len(list(blocks.children()))
    costs = block_work(model, name, number) if entry.costs is None else _table(model, name, entry)
    starts = partition(costs, num_stages)
    if entry.memory_gib is not None:
        starts = _within_memory(model, name, entry, program, costs, num_ranks, starts)
    return [f"{name}.{start}" if name else str(start) for start in starts[1:]]


def blocks_of(model: nn.Module, at_least: int = 2) -> str | None:
    """The path of the ModuleList (or Sequential, where there is none) whose blocks have the most parameters."""
    for kind in (nn.ModuleList, nn.Sequential):
        found = [(name, m) for name, m in model.named_modules() if isinstance(m, kind) and len(m) >= at_least]
        if found:
            return max(found, key=lambda item: sum(p.numel() for p in item[1].parameters()))[0]
    return None


def _table(model: nn.Module, blocks: str, entry: PipelineEntry) -> list[float]:
    """Costs by block; those of other modules count for the first block or the last."""
    assert entry.costs is not None
    children = [f"{blocks}.{n}" if blocks else n for n, _ in model.get_submodule(blocks).named_children()]
    found: list[float | None] = [None] * len(children)
    around = [0.0, 0.0]
    used, seen = set(), False
    for name, _ in model.named_modules():
        seen = seen or name in children
        for number, (path, cost) in enumerate(entry.costs):
            if name and path.matches(name, timeout=1.0):
                used.add(number)
                block = next((n for n, child in enumerate(children) if f"{name}.".startswith(f"{child}.")), None)
                if block is None:
                    around[seen] += cost
                else:
                    found[block] = (found[block] or 0.0) + cost
    missing = [child for child, cost in zip(children, found) if cost is None]
    unused = [str(path) for number, (path, _) in enumerate(entry.costs) if number not in used]
    if missing or unused:
        problem = f"has no cost for {missing[0]!r}" if missing else f"{unused[0]!r} matches no module of the model"
        raise PipelineCutError(
            f"pipeline: costs {problem}; pass a cost for each block of {blocks!r}, as vescale.pipeline.measure_costs "
            "returns",
            entry.source,
        )
    costs = [cost or 0.0 for cost in found]
    costs[0] += around[0]
    costs[-1] += around[1]
    return costs


def _within_memory(
    model: nn.Module,
    name: str,
    entry: PipelineEntry,
    program: Program | None,
    costs: Sequence[float],
    num_ranks: int,
    starts: list[int],
) -> list[int]:
    """``starts`` if they keep each rank under ``entry.memory_gib``, or the best cut that does."""
    assert entry.memory_gib is not None
    num_stages = len(starts)
    blocks = model.get_submodule(name)
    states = [sum(_own_bytes(m) for m in block.modules()) for block in blocks.children()]
    inside, seen = {id(m) for m in blocks.modules()}, False
    for module in model.modules():
        if id(module) in inside:
            seen = True
        else:
            states[-1 if seen else 0] += _own_bytes(module)
    saved = [0.0] * len(states)
    if entry.microbatch_shape is not None:
        saved = block_memory(model, name, len(states), program, *entry.microbatch_shape)
    schedule = make_schedule(entry, num_ranks, num_stages)
    forwards = [schedule.held_forwards(stage) for stage in range(num_stages)]

    def on_ranks(starts: Sequence[int]) -> list[float]:
        found = [0.0] * num_ranks
        for stage, (start, stop) in enumerate(zip(starts, [*starts[1:], len(costs)])):
            found[schedule.rank_of[stage]] += sum(states[start:stop]) + forwards[stage] * sum(saved[start:stop])
        return found

    limit = entry.memory_gib * 2**30
    if max(on_ranks(starts)) <= limit:
        return starts
    per_rank = num_stages // num_ranks
    cuts = []
    for share in (1 / per_rank, *((0.25, 0.4, 0.6, 0.75) if per_rank == 2 else ())):
        # Of two stages on a rank, the one that comes first in the model may take this part of the rank's memory.
        later = 1 - share if per_rank == 2 else share
        limits = [limit * (share if stage < num_stages // 2 else later) for stage in range(num_stages)]
        with contextlib.suppress(ValueError):
            cuts.append(partition(costs, num_stages, states, limits, saved, forwards))
    if not cuts:
        held = " and the activations that forwards hold" if entry.microbatch_shape is not None else ""
        least = partition([a + max(forwards) * b for a, b in zip(states, saved)], num_stages)
        most = max(on_ranks(least)) / 2**30
        raise PipelineCutError(
            f"pipeline: no split into {num_stages} stages keeps each rank under memory_gib={entry.memory_gib}: "
            f"parameters, gradients and two states of an optimizer{held} take {most:.3g} GiB on the fullest rank of "
            f"the most even split; pass memory_gib={most * 1.01:.3g} or more, use more ranks along {entry.mesh!r}, or "
            "add checkpoint entries",
            entry.source,
        )
    return min(cuts, key=lambda cut: max(sum(costs[a:b]) for a, b in zip(cut, [*cut[1:], len(costs)])))


def _own_bytes(module: nn.Module) -> int:
    return sum(map(state_bytes, module.parameters(recurse=False)))


def state_bytes(parameter: nn.Parameter) -> int:
    """Of a parameter, its gradient, and two states of an optimizer, such as Adam's.

    Args:
        parameter: a frozen one counts once.
    """
    return parameter.numel() * parameter.element_size() * (4 if parameter.requires_grad else 1)


def partition(
    costs: Sequence[float],
    num_parts: int,
    sizes: Sequence[float] | None = None,
    limits: float | Sequence[float] = float("inf"),
    repeated: Sequence[float] | None = None,
    times: Sequence[float] | None = None,
) -> list[int]:
    """Where each of ``num_parts`` runs of consecutive items begins, so that the largest sum of costs is as small as
    possible, and no sum of ``sizes``, plus ``times`` of the run the sum of ``repeated``, is over the limit.

    Dynamic programming over (parts, items); of equally good ones the one with the earliest beginnings. Raises ValueError
    for fewer items than parts, and where every way is over the limit.

    Args:
        costs: of each item, in order.
        limits: one for all runs, or of each.
        repeated, times: of each item, and of each run.
    """
    n = len(costs)
    if n < num_parts:
        raise ValueError(f"{n} items in {num_parts} parts; expected at least one item in each part")
    sums = [0.0, *itertools.accumulate(costs)]
    held = [0.0, *itertools.accumulate(sizes if sizes is not None else [0] * n)]
    again = [0.0, *itertools.accumulate(repeated if repeated is not None else [0] * n)]
    infinite = float("inf")
    best = [[infinite] * (n + 1) for _ in range(num_parts + 1)]
    first = [[0] * (n + 1) for _ in range(num_parts + 1)]
    best[0][0] = 0.0
    for part in range(1, num_parts + 1):
        limit = limits if isinstance(limits, int | float) else limits[part - 1]
        factor = times[part - 1] if times is not None else 0
        for stop in range(part, n + 1):
            for start in range(part - 1, stop):
                if held[stop] - held[start] + factor * (again[stop] - again[start]) > limit:
                    continue
                slowest = max(best[part - 1][start], sums[stop] - sums[start])
                if slowest < best[part][stop]:
                    best[part][stop], first[part][stop] = slowest, start
    if best[num_parts][n] == infinite:
        raise ValueError(f"no {num_parts} runs of {n} items are all under {limits}")
    starts, stop = [], n
    for part in range(num_parts, 0, -1):
        stop = first[part][stop]
        starts.append(stop)
    return starts[::-1]
