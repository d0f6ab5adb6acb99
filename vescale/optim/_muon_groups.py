"""``muon_groups`` and ``muon_layout``: which parameters Muon takes, by name, and where their matrices stay whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vescale.errors import MatrixBlocksError
from vescale.gradients import other_stages
from vescale.optim._matrix_blocks import MatrixGrid, matrix_grid
from vescale.plans import Path, did_you_mean

__all__ = ["muon_groups", "muon_layout"]


def muon_groups(
    model: nn.Module,
    adamw: Sequence[str] = (),
    blocks: Mapping[str, Any] | None = None,
    *,
    muon_options: Mapping[str, Any] | None = None,
    adamw_options: Mapping[str, Any] | None = None,
    verbose: bool = True,
) -> list[dict[str, Any]]:
    """Parameter groups for :class:`~vescale.optim.Muon`, with the parameters' names, and print who is where.

    Parameters with 2 or 3 dims are Muon's, all others AdamW's. Nothing in a tensor tells an embedding or a head from a
    hidden weight: name those in ``adamw``. A tied parameter is AdamW's if any of its names matches.

    Args:
        model: before or after it is sharded; frozen parameters have a place, too.
        adamw: patterns of names, matched whole, as paths of plans are.
        blocks: pattern to what :class:`~vescale.optim.Muon` takes as ``blocks``: ``{r".*\\.qkv\\.weight": 3}``. The
            first pattern that matches is taken.
        muon_options, adamw_options: options of the groups, for example ``adamw_options={"lr": 3e-4}``.
        verbose: print the groups, on the first rank.

    Returns groups of Muon, one for each kind of ``blocks``, then one of AdamW. Communicates nothing.

    Raises:
        ValueError: a pattern that matches no parameter, blocks for one that is AdamW's, or that do not fit it.
    """
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    elsewhere = other_stages(model).names
    for_adamw = _matching(adamw, names_of, "adamw", elsewhere)
    cut = list((blocks or {}).items())
    with_blocks = _matching([pattern for pattern, _ in cut], names_of, "blocks", elsewhere)
    chosen: dict[str, tuple[Any, list[tuple[str, nn.Parameter]]]] = {}
    rest: list[tuple[str, nn.Parameter]] = []
    for parameter, names in names_of.items():
        pattern = with_blocks.get(parameter)
        if parameter in for_adamw or parameter.ndim not in (2, 3):
            if pattern is not None:
                why = f"matches {for_adamw[parameter]!r} of adamw" if parameter in for_adamw else "is no matrix"
                raise MatrixBlocksError(
                    f"blocks has {pattern!r} for parameter {names[0]!r} of shape {tuple(parameter.shape)}, which {why}; "
                    "drop one of the two"
                )
            rest.append((names[0], parameter))
            continue
        spec = dict(cut)[pattern] if pattern is not None else None
        matrix_grid(tuple(parameter.shape), spec, names[0])
        chosen.setdefault(repr(spec), (spec, []))[1].append((names[0], parameter))
    groups = [
        {"params": members, "algorithm": "muon", "blocks": spec, **(muon_options or {})}
        for spec, members in chosen.values()
    ]
    if rest:
        groups.append({"params": rest, "algorithm": "adamw", **(adamw_options or {})})
    if verbose and (not dist.is_initialized() or dist.get_rank() == 0):
        print(_table(groups))
    return groups


def _matching(
    patterns: Sequence[str], names_of: Mapping[nn.Parameter, Sequence[str]], what: str, elsewhere: Collection[str]
) -> dict[nn.Parameter, str]:
    """The first pattern that matches a name of each parameter; raises ValueError for one that matches none, nor one of those
    that other stages of a pipeline have."""
    if isinstance(patterns, str):
        raise MatrixBlocksError(f"{what}={patterns!r}; give a list of patterns")
    found: dict[nn.Parameter, str] = {}
    for pattern in patterns:
        path = Path.parse(pattern)
        hits = [parameter for parameter, names in names_of.items() if any(path.matches(name) for name in names)]
        if not hits and not any(path.matches(name) for name in elsewhere):
            everything = [name for names in names_of.values() for name in names]
            raise MatrixBlocksError(
                f"pattern {pattern!r} of {what} matches none of {len(everything)} parameters"
                f"{did_you_mean(pattern, everything) or ';'} patterns are matched against "
                f"whole names, such as {everything[0]!r}"
            )
        for parameter in hits:
            found.setdefault(parameter, pattern)
    return found


def _table(groups: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for group in groups:
        is_muon = group["algorithm"] == "muon"
        members = group["params"]
        elements = sum(parameter.numel() for _, parameter in members)
        spec = f", blocks={group['blocks']!r}" if is_muon and group["blocks"] is not None else ""
        lines.append(f"{group['algorithm']}{spec}: {len(members)} parameters, {elements:,} elements")
        for name, parameter in members:
            text = " x ".join(map(str, parameter.shape)) or "scalar"
            if is_muon:
                text += f": {_matrices(matrix_grid(tuple(parameter.shape), group['blocks'], name))}"
            lines.append(f"  {name}  {text}")
    return "\n".join(lines)


def _matrices(grid: MatrixGrid) -> str:
    counts: dict[tuple[int, int], int] = {}
    for box in grid.boxes:
        shape = grid.matrix_shape(box.sizes)
        counts[shape] = counts.get(shape, 0) + 1
    return ", ".join(f"{n} {'matrix' if n == 1 else 'matrices'} of {r} x {c}" for (r, c), n in counts.items())


def muon_layout(
    model: nn.Module, groups: Sequence[Mapping[str, Any]] | None = None
) -> Callable[[str, torch.Tensor], int | None]:
    """An ``orig_param_policy`` that keeps each matrix of Muon whole on one rank, so that its step communicates nothing.

    ``fully_shard(block, orig_param_policy=muon_layout(block))`` plans buffers whose cuts go between matrices. Ranks
    then hold unequal parts, and the buffer has padding where matrices are few: ``fully_shard``'s report and
    ``plan_layout`` tell how much. Blocks of rows stay apart; blocks of columns do not form runs of memory, so that the
    matrix stays whole.

    In a plan, write the same block: ``plan.shard(path, RaggedShard(block=m * n), ...)``.

    Args:
        model: the module that is given to ``fully_shard``, or one that it is in.
        groups: of :func:`muon_groups` of this module, for its ``blocks`` and what is left to AdamW; None: every
            parameter of 2 or 3 dims is one matrix, or a stack of matrices.

    Returns ``policy(name, parameter)``: elements that stay together, None where a cut may be anywhere. It raises ValueError
    for a parameter that the model did not have.
    """
    known = dict(model.named_parameters(remove_duplicate=False))
    specs: dict[nn.Parameter, Any] = {}
    if groups is None:
        specs = {parameter: None for parameter in known.values() if parameter.ndim in (2, 3)}
    else:
        for group in groups:
            if group.get("algorithm", "muon") == "muon":
                for member in group["params"]:
                    specs[member[1] if isinstance(member, tuple) else member] = group.get("blocks")
    sizes: dict[torch.Tensor, int | None] = {}
    for name, parameter in known.items():
        sizes[parameter] = None
        if parameter in specs:
            grid = matrix_grid(tuple(parameter.shape), specs[parameter], name)
            numels = {math.prod(box.sizes) for box in grid.boxes}
            has_runs = len(numels) == 1 and len(grid.cuts[-1]) == 2
            sizes[parameter] = numels.pop() if has_runs else math.prod(parameter.shape[-2:])

    def policy(name: str, parameter: torch.Tensor) -> int | None:
        own = known.get(name)  # of a copy, or replaced since: by its name
        found = parameter if parameter in sizes else own if own is not None and own.shape == parameter.shape else None
        if found is None:
            raise MatrixBlocksError(
                f"muon_layout was made for a model without parameter {name!r} of shape {tuple(parameter.shape)}; make it of "
                "the module that is given to fully_shard: orig_param_policy=muon_layout(block)"
            )
        return sizes[found]

    return policy
