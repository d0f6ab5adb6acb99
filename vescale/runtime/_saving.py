"""``save_pretrained`` of a parallelized model: one rank writes what one device would, with the class's own method."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.agreement import Round
from vescale.compat import note
from vescale.errors import ConsensusError, ForeignToolError, RankFailedError
from vescale.runtime._runtime import BoundMethod, Runtime

# How long ranks wait for the one that writes.
_WRITING = timedelta(days=1)


def add_save_pretrained(runtime: Runtime, module: nn.Module) -> None:
    """Give a module whose class has a ``save_pretrained`` (Hugging Face's, diffusers', PEFT's) one of its own."""
    BoundMethod.give(runtime, module, "save_pretrained", _save_pretrained)


def whole_state_dict(module: nn.Module, keep: bool, given: Any = None) -> dict[str, Any]:
    """The state dict with plain tensors in host memory, tied ones as one tensor; empty where ``keep`` is false.

    All ranks of the mesh call it. Communication: an all-gather of each sharded tensor, one tensor at a time, so that ranks
    that do not keep it need memory for one.
    """
    names: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    names.update(module.named_buffers(remove_duplicate=False))
    found: dict[str, Any] = {}
    first: dict[int, str] = {}  # by ``id`` of a tensor of the model
    for name, value in (module.state_dict() if given is None else given).items():
        before = first.setdefault(id(names.get(name, value)), name)
        if before == name:
            whole: Any = value
            if isinstance(whole, DTensor):
                with torch.no_grad():
                    whole = whole.full_tensor()
            if keep:
                found[name] = whole.cpu() if isinstance(whole, torch.Tensor) else whole
        elif keep:
            found[name] = found[before]
    return found


def _save_pretrained(
    runtime: Runtime, module: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
) -> Any:
    """The class's own method, on the first rank of the mesh, which writes each file once; all ranks call it.

    Returns what the method does, None on the other ranks. Raises, on every rank: ValueError for ranks that give different
    folders; ConsensusError naming the ranks that do not come (within ``VESCALE_TIMEOUT`` seconds, or the timeout of
    collectives); PlanError for parameters without values; RuntimeError with what the writing rank has raised.
    """
    mesh = runtime.mesh
    if mesh.get_coordinate() is None:
        return None
    if kwargs.get("distributed_checkpoint"):
        raise ForeignToolError(
            "save_pretrained(distributed_checkpoint=True) is for models that transformers has sharded; save "
            "model.state_dict() with torch.distributed.checkpoint instead, or leave the argument out"
        )
    ranks = sorted(mesh.mesh.flatten().tolist())
    own = dist.get_rank() if dist.is_initialized() else ranks[0]
    writes = own == ranks[0]
    round_ = _agree(module, mesh, ranks, os.path.abspath(save_directory))
    missing = [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta]
    if missing:
        raise ForeignToolError(
            f"save_pretrained: {missing[0]} and {len(missing) - 1} more are on the meta device, without values"
        )
    prompts = _prompts(module)
    state = whole_state_dict(module, writes, kwargs.pop("state_dict", None))
    problem: Exception | None = None
    result = None
    if writes:
        kwargs["is_main_process"] = True
        note("runtime._saving:instance", module)
        replaced: dict[str, Any] = {"state_dict": lambda *_, **__: dict(state)}
        if prompts:
            replaced["get_prompt_embedding_to_save"] = prompts.__getitem__
        vars(module).update(replaced)
        try:
            result = type(module).save_pretrained(module, save_directory, *args, **kwargs)
        except Exception as error:
            problem = error
        finally:
            for name in replaced:
                del vars(module)[name]
    _finish(round_, problem)
    return result


def _prompts(module: Any) -> dict[str, torch.Tensor]:
    """Of PEFT's methods that adapt prompts: what their encoders give for each adapter. All ranks run these parts of the
    model."""
    configs = getattr(module, "peft_config", {})
    names = [name for name, config in configs.items() if getattr(config, "is_prompt_learning", False)]
    with torch.no_grad():
        found = {name: module.get_prompt_embedding_to_save(name) for name in names if name in module.prompt_encoder}
        return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}


def _agree(module: nn.Module, mesh: DeviceMesh, ranks: list[int], folder: str) -> Round | None:
    if len(ranks) == 1 or not dist.is_initialized():
        return None
    consensus = Round(ranks, "save_pretrained")
    call = f"{type(module).__name__}.save_pretrained({folder!r})"
    about = f"{call}: every rank of the mesh must call it, not only `if rank == 0:`"
    folders = [found.decode() for found in consensus.exchange(folder.encode(), lambda: about)]
    if len(set(folders)) > 1:
        given = ", ".join(f"{folder!r} on rank {rank}" for rank, folder in zip(ranks, folders))
        raise ForeignToolError(
            f"save_pretrained: ranks pass different folders: {given}; pass the same folder on all ranks (the first "
            "rank writes it)"
        )
    return consensus


def _finish(rounds: Round | None, problem: Exception | None) -> None:
    """All ranks leave together: the files are there then."""
    if rounds is None:
        if problem is not None:
            raise problem
        return
    rounds.have_all_come("written", "", _WRITING)
    try:
        with rounds.together(lambda: "save_pretrained"):
            if problem is not None:
                raise problem
    except ConsensusError as error:
        if not error.failure:
            raise
        raise RankFailedError(
            f"save_pretrained failed on rank {error.ranks[0]}, which writes: {error.failure}"
        ) from None
