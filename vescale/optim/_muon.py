"""``Muon``: momentum whose matrices are orthogonalized whole, each by one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vescale.comm import DEFAULT_BUCKET_BYTES
from vescale.errors import MatrixBlocksError, OptimizerError
from vescale.gradients import other_stages
from vescale.optim._matrix_blocks import MatrixGrid, matrix_grid
from vescale.optim._matrix_exchange import OwnedMatrix
from vescale.optim._matrix_optimizer import MatrixOptimizer
from vescale.optim._matrix_parameters import MatrixParameter, local_tensor
from vescale.optim._report import dtype_name, named_dtype
from vescale.plans import Path, did_you_mean

# Newton-Schulz orthogonalization: the nearest (semi-)orthogonal matrix, roughly, by matrix products alone.

STANDARD = (3.4445, -4.7750, 2.0315)
"""Coefficients of Keller Jordan's Muon: singular values end in about 0.7 to 1.2 after five steps."""

Coefficients = tuple[tuple[float, float, float], ...]


def checked_coefficients(given: object) -> Coefficients:
    """One triple, or one for each step (Polar Express), as triples; the last one is repeated.

    Raises ValueError for anything else.
    """
    rows = [given] if isinstance(given, Sequence) and given and not isinstance(given[0], Sequence) else given
    if not isinstance(rows, Sequence) or not rows or any(not isinstance(r, Sequence) or len(r) != 3 for r in rows):
        raise OptimizerError(
            f"coefficients={given!r}; pass three numbers (a, b, c), or a list of such triples, one for each step"
        )
    return tuple((float(a), float(b), float(c)) for a, b, c in rows)


def newton_schulz(
    matrix: torch.Tensor,
    coefficients: Coefficients = (STANDARD,),
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
    norm_dtype: torch.dtype | None = torch.float32,
) -> torch.Tensor:
    """The matrix with its singular values brought near 1. Reads ``matrix``, and returns a tensor of ``dtype``.

    X starts as the matrix divided by its Frobenius norm; a step is ``X <- a X + (b A + c A^2) X`` with ``A = X X^T``,
    on the shorter side. With ``norm_dtype`` None the norm is taken, and the division done, after the cast to ``dtype``,
    which is what ``torch.optim.Muon`` does, bit for bit.

    Args:
        matrix: [m, n], or [b, m, n] for b matrices at once (other kernels, which round otherwise).
        coefficients: (a, b, c) of each step; the last triple is repeated.
        eps: smallest norm to divide by, so that a matrix of zeros stays one.
    """
    many = matrix.ndim == 3
    if norm_dtype is None:
        x = matrix.to(dtype, copy=True)
    else:
        wide = matrix.to(norm_dtype, copy=True)
        x = wide.div_(_norm(wide).clamp(min=eps)).to(dtype)
    is_tall = matrix.size(-2) > matrix.size(-1)
    if is_tall:
        x = x.mT
    if norm_dtype is None:
        x.div_(_norm(x).clamp(min=eps))
    product = torch.baddbmm if many else torch.addmm
    for step in range(steps):
        a, b, c = coefficients[min(step, len(coefficients) - 1)]
        gram = x @ x.mT
        update = product(gram, gram, gram, beta=b, alpha=c)
        x = product(x, update, x, beta=a)
    return x.mT if is_tall else x


def _norm(matrix: torch.Tensor) -> torch.Tensor:
    """The Frobenius norm of each matrix."""
    return matrix.norm() if matrix.ndim == 2 else matrix.norm(dim=(-2, -1), keepdim=True)


def newton_schulz_cost(rows: int, columns: int, steps: int = 5) -> int:
    """Floating-point operations: ``k s^2 (4 l + 2 s)``, s the shorter and l the longer side."""
    short, long = sorted((rows, columns))
    return max(1, steps) * short * short * (4 * long + 2 * short)


_ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral": lambda rows, columns: math.sqrt(rows / columns),
}


class Muon(MatrixOptimizer):
    """Muon for matrices, AdamW for the rest, on parameters in any placement.

    For each matrix G (m x n) of the gradient: ``B = mu B + (1 - mu) G``; ``U = (1 - mu) G + mu B`` (without Nesterov
    B); ``W = (1 - lr wd) W - lr s(m, n) O`` with O, ``U`` orthogonalized by Newton-Schulz. These are the equations and
    the numbers of ``torch.optim.Muon``; with ``norm_dtype=None`` also its bits.

    A matrix is computed whole by one rank, the owner; the others compute nothing of it. Parameters and states have the
    bits of one device for equal gradients with ``batch=1``, on any mesh.

    ================  ==============================================================  =============================
    of a parameter    is                                                              communicated in a step
    ================  ==============================================================  =============================
    value             as it was given: any placement                                  its update, once to each rank
                                                                                      that holds it, in ``ns_dtype``
    gradient          placed like it; others are brought there                        ``U``, once to the owner
    momentum_buffer   placed like it, with its dtype                                  nothing
    ================  ==============================================================  =============================

    What the owner holds itself does not travel: nothing does where each matrix has all its elements on one rank
    (:func:`~vescale.optim.muon_layout`). ``U`` travels with the parameter's dtype, with ``norm_dtype=None`` in
    ``ns_dtype``.

    Args:
        params: parameters, named or not, or groups; :func:`~vescale.optim.muon_groups` creates them by name. Options of a
            group: ``algorithm``: ``"muon"`` (default) or ``"adamw"``, whose options are ``lr=1e-3, betas=(0.9, 0.999),
            eps=1e-8, weight_decay=1e-2, capturable=False`` unless the group has its own: they are not Muon's.
            ``capturable``: AdamW's step number, and an ``lr`` that is a tensor, stay on the device (CUDA graphs).
            ``blocks``: which parts of each matrix are separate matrices, for example in fused projections: ``n`` equal
            blocks of rows, a list of row counts, or ``("dim", 1, n or list)`` for columns. A parameter of 3 dims
            ``[E, m, n]`` is E matrices, each cut by ``blocks``.
        lr, weight_decay: decay is by ``lr`` itself, not adjusted. A tensor is never read by the host for matrices.
        momentum, nesterov: mu, and which U.
        ns_steps, coefficients, eps: see :func:`~vescale.optim._muon.newton_schulz`; one triple or one a step.
        ns_dtype: of the iterations.
        norm_dtype: in which the norm is taken, before the cast to ``ns_dtype``; None: after the cast.
        adjust_lr: ``s(m, n)`` of each block: ``"original"`` sqrt(max(1, m/n)), ``"match_rms_adamw"`` 0.2 sqrt(max(m,
            n)), ``"spectral"`` sqrt(m/n).
        batch: the maximum number of matrices of one shape that are iterated together on their owner. More than 1 uses
            other kernels, which round otherwise: results then depend on the mesh, in bfloat16 by about 1e-2 of an
                update.
        orthogonalize: ``f(U) -> O`` in place of Newton-Schulz, for variants; [m, n], or [b, m, n] with ``batch``. The
            result travels with the parameter's dtype.
        skip_nonfinite: leave everything as it is, on all ranks, in a step in which any gradient has inf or nan: those
            of the meshes of which the parameters' meshes are slices, and of all stages of a pipeline.
        split_replicas: along axes that replicate a parameter, one of the replicas computes, and the others get a copy.
            False: each computes for itself, and nothing is copied.
        compare_gradients: compare in each step which gradients ranks have, so that one that is missing on some ranks
            counts as zeros there. One small all-reduce. None: where something travels anyway; elsewhere gradients that
            the engines of this package make are alike.
        bucket_bytes: about how many bytes an owner receives in one all-to-all.

    Raises:
        ValueError: options without meaning, parameters that are no matrices, or that differ between ranks.
    """

    algorithm = "muon"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        coefficients: Any = STANDARD,
        eps: float = 1e-7,
        ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.bfloat16,
        norm_dtype: torch.dtype | None = torch.float32,
        adjust_lr: str = "original",
        batch: int = 1,
        orthogonalize: Callable[[torch.Tensor], torch.Tensor] | None = None,
        skip_nonfinite: bool = False,
        split_replicas: bool = True,
        compare_gradients: bool | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        given = dict(locals())
        self._orthogonalize = given.pop("orthogonalize")
        if orthogonalize is not None and not callable(orthogonalize):
            raise OptimizerError(f"orthogonalize={orthogonalize!r}; pass a function of a matrix, or None")
        super().__init__(params, given)

    def _check_group(self, group: dict[str, Any]) -> None:
        lr, wanted = group["lr"], "a number >= 0"
        if isinstance(lr, torch.Tensor):
            if lr.numel() != 1:
                raise OptimizerError(f"lr has {lr.numel()} elements; pass a single number")
        elif not lr >= 0:
            raise OptimizerError(f"lr={lr!r}; give {wanted}")
        for name in ("weight_decay", "momentum", "eps"):
            if not group[name] >= 0:
                raise OptimizerError(f"{name}={group[name]!r}; give {wanted}")
        if group["adjust_lr"] not in _ADJUSTMENTS:
            raise OptimizerError(f"adjust_lr={group['adjust_lr']!r}; pass one of {sorted(_ADJUSTMENTS)}")
        for name, least in (("ns_steps", 0), ("batch", 1)):
            if not isinstance(group[name], int) or not least <= group[name]:
                raise OptimizerError(f"{name}={group[name]!r}; pass an integer >= {least}")
        for name in ("ns_dtype", "norm_dtype"):
            if group[name] is not None or name == "ns_dtype":
                group[name] = dtype_name(group[name], name)
        group["coefficients"] = checked_coefficients(group["coefficients"])

    def _grid(self, parameter: MatrixParameter) -> MatrixGrid | None:
        if parameter.group["algorithm"] == "adamw":
            return None
        return matrix_grid(parameter.place.shape, parameter.group["blocks"], parameter.name)

    def _cost(self, parameter: MatrixParameter, rows: int, columns: int) -> int:
        return newton_schulz_cost(rows, columns, parameter.group["ns_steps"])

    def _dtypes(self, parameter: MatrixParameter) -> tuple[torch.dtype, torch.dtype]:
        group, own = parameter.group, parameter.tensor.dtype
        if self._orthogonalize is not None:
            return own, own
        iterated = named_dtype(group["ns_dtype"])
        return (own if group["norm_dtype"] is not None else iterated), iterated

    _planned = (*MatrixOptimizer._planned, "ns_dtype", "norm_dtype")

    def _expected_states(self, parameter: MatrixParameter) -> dict[str, tuple[int, ...]]:
        if parameter.group["algorithm"] == "adamw":
            return super()._expected_states(parameter)
        return {"momentum_buffer": parameter.place.shape}

    def _make_states(self, parameter: MatrixParameter) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(parameter.tensor, requires_grad=False)}

    def _part(self, parameter: MatrixParameter, gradient: torch.Tensor) -> torch.Tensor:
        momentum = parameter.group["momentum"]
        buffer = local_tensor(self.state[parameter.tensor]["momentum_buffer"])
        buffer.lerp_(gradient.to(buffer.dtype), 1 - momentum)
        self.decay(parameter)
        return gradient.to(buffer.dtype).lerp(buffer, momentum) if parameter.group["nesterov"] else buffer

    def _compute(self, matrices: Sequence[tuple[OwnedMatrix, torch.Tensor]]) -> list[torch.Tensor]:
        updates: dict[OwnedMatrix, torch.Tensor] = {}
        together: dict[Any, list[tuple[OwnedMatrix, torch.Tensor]]] = {}
        for matrix, values in matrices:
            group = self._parameter(matrix).group
            if group["batch"] == 1:
                updates[matrix] = self._orthogonal(values.view(matrix.rows, matrix.columns), group)
            else:
                together.setdefault((id(group), matrix.rows, matrix.columns), []).append((matrix, values))
        for alike in together.values():
            group = self._parameter(alike[0][0]).group
            for start in range(0, len(alike), group["batch"]):
                chunk = alike[start : start + group["batch"]]
                stacked = torch.stack([values.view(matrix.rows, matrix.columns) for matrix, values in chunk])
                updates.update(zip((matrix for matrix, _ in chunk), self._orthogonal(stacked, group)))
        return [updates[matrix].reshape(matrix.box.sizes) for matrix, _ in matrices]

    def _orthogonal(self, values: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        if self._orthogonalize is None:
            norm_dtype = None if group["norm_dtype"] is None else named_dtype(group["norm_dtype"])
            return newton_schulz(
                values,
                group["coefficients"],
                group["ns_steps"],
                group["eps"],
                named_dtype(group["ns_dtype"]),
                norm_dtype,
            )
        found = self._orthogonalize(values)
        if found.shape != values.shape:
            raise OptimizerError(
                f"orthogonalize got a matrix of shape {tuple(values.shape)} and returned one of shape "
                f"{tuple(found.shape)}; return a matrix of the same shape"
            )
        return found.to(values.dtype)

    def _rate(self, matrix: OwnedMatrix) -> Any:
        group = self._parameter(matrix).group
        return group["lr"] * _ADJUSTMENTS[group["adjust_lr"]](matrix.rows, matrix.columns)


# ``muon_groups`` and ``muon_layout``: which parameters Muon takes, by name, and where their matrices stay whole.


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

    Parameters with 2 or 3 dims are Muon's, all others AdamW's. A tensor does not show whether it is an embedding or
    head, or a hidden weight: name those in ``adamw``. A tied parameter is AdamW's if any of its names matches.

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
                why = f"matches {for_adamw[parameter]!r} of adamw" if parameter in for_adamw else "is not a matrix"
                raise MatrixBlocksError(
                    f"blocks has {pattern!r} for parameter {names[0]!r} of shape {tuple(parameter.shape)}, which "
                    f"{why}; remove one of the two"
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
        raise MatrixBlocksError(f"{what}={patterns!r}; pass a list of patterns")
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

    ``fully_shard(block, orig_param_policy=muon_layout(block))`` plans buffers whose shard boundaries fall between
    matrices. Ranks then hold unequal parts, and the buffer has padding where matrices are few: ``fully_shard``'s report
    and ``plan_layout`` tell how much. Blocks of rows stay apart; blocks of columns do not form runs of memory, so that
    the matrix stays whole.

    In a plan, write the same block: ``plan.shard(path, RaggedShard(block=m * n), ...)``.

    Args:
        model: the module that is passed to ``fully_shard``, or one that contains it.
        groups: of :func:`muon_groups` of this module, for its ``blocks`` and what is left to AdamW; None: every
            parameter of 2 or 3 dims is one matrix, or a stack of matrices.

    Returns ``policy(name, parameter)``: elements that stay together, or None if shard boundaries may be anywhere. It
    raises ValueError for a parameter that the model did not have.
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
                f"muon_layout was created for a model without parameter {name!r} of shape {tuple(parameter.shape)}; "
                "create it from the module that is passed to fully_shard: orig_param_policy=muon_layout(block)"
            )
        return sizes[found]

    return policy
