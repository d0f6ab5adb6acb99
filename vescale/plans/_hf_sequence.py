"""Sequence parallelism, derived from a tensor-parallel plan: between the parts of a layer the sequence is sharded.

If a part of a layer sums its output over ranks, it scatters the sum over the sequence, and it gathers its input; norms
and additions between parts run on the shards. Parts are the modules that a layer calls: attention, feed-forward,
mixtures. Parts that the plan does not name get the whole sequence, and their output is sharded again.
"""

from __future__ import annotations

from collections.abc import Collection

import regex
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

__all__ = ["shard_sequence"]

_SEQUENCE = Shard(1)  # of activations (batch, sequence, features)
_NORM = regex.compile(r".*norm.*|ln_.*|dropout.*|.*_dropout", regex.IGNORECASE)


def shard_sequence(
    modules: dict[str, nn.Module],
    inputs: dict[str, Placement],
    outputs: dict[str, Placement],
    experts: Collection[str],
    base: str,
) -> None:
    """Change boundaries of a plan, in place.

    Args:
        modules: of the model, by name.
        inputs, outputs: boundary placements that the plan has; they are changed.
        experts: modules that are expert regions.
        base: name of the model without its head, whose output is whole again.
    """
    layers = [path for path in modules if _is_layer(path, modules) and any(o.startswith(f"{path}.") for o in outputs)]
    for layer in layers:
        for part in _parts(layer, modules):
            summed = [o for o in outputs if (o == part or o.startswith(f"{part}.")) and inputs.get(o) == Shard(-1)]
            mixed = [e for e in experts if e == part or e.startswith(f"{part}.")]
            if len(summed) == 1 and not mixed:  # one sum ends the part
                outputs[summed[0]] = _SEQUENCE
            else:
                inputs[part] = Replicate()
                outputs[part] = _SEQUENCE
                for expert in mixed:  # the part's own boundaries sum, once, and scatter
                    if expert != part:
                        inputs.pop(expert, None)
                        outputs.pop(expert, None)
    for path, module in modules.items():
        if isinstance(module, nn.Embedding) and path in outputs and layers and not path.startswith(f"{layers[0]}."):
            outputs[path] = _SEQUENCE
    if layers:
        outputs[base] = Replicate()
        for head in [path for path in inputs if base and not path.startswith(f"{base}.")]:
            if inputs[head] == Replicate():
                del inputs[head]  # what the head adds to the gradient is scattered at the base's output


def _is_layer(path: str, modules: dict[str, nn.Module]) -> bool:
    """An item of a list whose forward runs and that holds several parts."""
    parent = path.rpartition(".")[0]
    return (
        path != ""
        and isinstance(modules[parent], nn.ModuleList)
        and not any(isinstance(modules[p], nn.ModuleList) for p in _around(parent))
        and len(_parts(path, modules)) > 1
    )


def _around(path: str) -> list[str]:
    found = []
    while path:
        path = path.rpartition(".")[0]
        found.append(path)
    return found


def _parts(layer: str, modules: dict[str, nn.Module]) -> list[str]:
    """Children of a layer that mix tokens or features: not its norms."""
    return [
        f"{layer}.{name}"
        for name, child in modules[layer].named_children()
        if not _NORM.fullmatch(name) and any(p.ndim > 1 for p in child.parameters())
    ]
