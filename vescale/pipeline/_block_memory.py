"""``block_memory``: what the forward of each block of a model holds for backward."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from vescale.compat.meta_shapes import result_on_meta
from vescale.compat.tensor_subclasses import TorchDispatchMode, tree_leaves
from vescale.ir import Checkpoint, FlowMode, Local, Program, skeleton_of, stand_in_for_experts
from vescale.pipeline._block_work import guessed_inputs, num_tokens
from vescale.plans import CheckpointPolicy, split_selector
from vescale.runtime import SavingRule

__all__ = ["block_memory"]


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
