"""``AdamW8bit``: AdamW whose moments are 8-bit codes, in blocks of the global tensor."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import eagerly, is_alone, local_of, make_dtensor, make_spec, own_part, without_modes
from vescale.errors import (
    MatrixBlocksError,
    OptimizerError,
    UnevenBlocksError,
)
from vescale.optim._adamw8bit_update import (
    Scalars,
    Update,
    compute_dtype,
    device_scalars,
    dynamic_map,
    host_scalars,
    is_native,
    update,
    update_all,
)
from vescale.optim._blocks import Blocks, FlatBlocks, Part, RowBlocks
from vescale.optim._report import ParameterReport, compare_parameters, shown_names
from vescale.optim._state_loading import ExactStates, options_of
from vescale.optim._step_gradients import StepGradients, check_no_capture, local_part
from vescale.placements import RaggedShard, Region, contiguous_stride, distribute_tensor, local_region, own_region
from vescale.rng import indexed_bits

# What ``AdamW8bit`` keeps for a parameter: which tensors, of what shapes and dtypes, and how they are cut.

STATE_DTYPES = {"uint8": torch.uint8, "bfloat16": torch.bfloat16, "float32": torch.float32}
"""By the name under which a param group has it: torch's full state dicts refuse dtypes."""

OPTIONS_OF_STATES = ("block_size", "block", "min_numel", "state_dtype", "master_weights", "stochastic_rounding")
"""Of a group: they decide which states a parameter has."""

_LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class StateTensor:
    """One state of a parameter: global ``shape``, ``dtype``, the value that it starts with (None: the parameter's), and its
    placements on the parameter's mesh, None for a plain parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int | None
    placements: tuple[Placement, ...] | None

    def local_shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Of this rank's part."""
        if self.placements is None or not isinstance(parameter, DTensor):
            return self.shape
        mesh = parameter.device_mesh
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return (0,)
        return local_region(self.shape, self.placements, tuple(mesh.shape), tuple(coordinate)).local_shape

    def num_bytes(self, parameter: torch.Tensor) -> int:
        return math.prod(self.local_shape(parameter)) * self.dtype.itemsize

    def new(self, parameter: torch.Tensor) -> torch.Tensor:
        """The state before the first step: plain, or a DTensor on the parameter's mesh."""
        held = local_of(parameter) if isinstance(parameter, DTensor) else parameter.detach()
        if self.start is None:
            local = held.to(self.dtype, copy=True).contiguous()
        else:
            local = torch.full(self.local_shape(parameter), self.start, dtype=self.dtype, device=held.device)
        if self.placements is None or not isinstance(parameter, DTensor):
            return local
        stride = contiguous_stride(self.shape)
        return make_dtensor(local, make_spec(parameter.device_mesh, self.placements, self.shape, stride, self.dtype))

    def loaded(self, value: Any, parameter: torch.Tensor, what: str) -> torch.Tensor:
        """A copy of a saved state in this form: another cut is brought to this one (collectives), a plain tensor is cut by
        each rank.

        Raises ValueError for another shape or dtype.
        """
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != self.shape or value.dtype != self.dtype:
            found = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise OptimizerError(
                f"{what} of the state dict is {found}; this optimizer has {self.dtype} of shape {self.shape}. Create "
                "it with the same block_size, block, min_numel and state_dtype as the one that was saved"
            )
        value = value.detach().to(parameter.device, copy=True)  # two optimizers must not write to one state
        if self.placements is None or not isinstance(parameter, DTensor):
            return value.full_tensor() if isinstance(value, DTensor) else value.contiguous()
        mesh = parameter.device_mesh
        if not isinstance(value, DTensor):
            return distribute_tensor(value, mesh, self.placements, src_data_rank=None)
        if tuple(value.placements) != self.placements:
            value = value.redistribute(mesh, self.placements)
        return value


def is_quantized(parameter: torch.Tensor, group: Mapping[str, Any]) -> bool:
    """By the global size, so that it is the same on every mesh."""
    return bool(group["state_dtype"] == "uint8" and parameter.numel() >= max(1, group["min_numel"]))


def has_master(parameter: torch.Tensor, group: Mapping[str, Any]) -> bool:
    wanted = group["master_weights"]
    return parameter.dtype in _LOW_PRECISION and (not group["stochastic_rounding"] if wanted is None else wanted)


def blocks_of(group: Mapping[str, Any]) -> Blocks:
    return FlatBlocks(group["block_size"]) if group["block"] is None else RowBlocks(*group["block"])


def state_tensors(parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, StateTensor]:
    """By key, ``step`` left out. Pure; the same keys, shapes and placements on every rank."""
    shape = tuple(parameter.shape)
    cut = tuple(parameter.placements) if isinstance(parameter, DTensor) else None
    found: dict[str, StateTensor] = {}
    if is_quantized(parameter, group):
        blocks = blocks_of(group)
        grid_cut = None
        if cut is not None and isinstance(parameter, DTensor):
            grid_cut = blocks.grid_placements(shape, cut, tuple(parameter.device_mesh.shape))
        found["exp_avg"] = StateTensor(shape, torch.uint8, dynamic_map(True).zero_code, cut)
        found["exp_avg_sq"] = StateTensor(shape, torch.uint8, dynamic_map(False).zero_code, cut)
        found["exp_avg_max"] = StateTensor(blocks.grid(shape), torch.float32, 0, grid_cut)
        found["exp_avg_sq_max"] = StateTensor(blocks.grid(shape), torch.float32, 0, grid_cut)
    else:
        is_small = parameter.numel() < group["min_numel"] or group["state_dtype"] == "uint8"
        dtype = compute_dtype(parameter.dtype) if is_small else STATE_DTYPES[group["state_dtype"]]
        found["exp_avg"] = found["exp_avg_sq"] = StateTensor(shape, dtype, 0, cut)
    if has_master(parameter, group):
        found["master"] = StateTensor(shape, torch.float32, None, cut)
    return found


def check_states(name: str, parameter: torch.Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raises OptimizerError for states that are not those which the group's options describe."""
    for key, wanted in state_tensors(parameter, group).items():
        value = state.get(key)
        if isinstance(value, torch.Tensor) and value.dtype == wanted.dtype:
            held = own_part(value)
            if tuple(value.shape) == wanted.shape and tuple(held.shape) == wanted.local_shape(parameter):
                continue
        found = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise OptimizerError(
            f"the state {key!r} of parameter {name} is {found}, but the options of its group describe {wanted.dtype} "
            f"of shape {wanted.shape}. States keep the form in which they were created: do not change block_size, "
            "block, min_numel, state_dtype and master_weights of a group, or create a new optimizer"
        )


def check_blocks(name: str, parameter: torch.Tensor, group: Mapping[str, Any]) -> None:
    """Raises ValueError, the same on every rank, if a boundary between ranks cuts a block of the parameter."""
    if not isinstance(parameter, DTensor) or not is_quantized(parameter, group):
        return
    shape, mesh, placements = tuple(parameter.shape), parameter.device_mesh, tuple(parameter.placements)
    if any(placement.is_partial() for placement in placements):
        raise MatrixBlocksError(f"parameter {name} is a pending reduction {placements}; redistribute it first")
    blocks, mesh_shape = blocks_of(group), tuple(mesh.shape)
    cut = blocks.first_cut(shape, placements, mesh_shape)
    if cut is None:
        try:
            blocks.grid_placements(shape, placements, mesh_shape)
        except UnevenBlocksError as error:
            raise MatrixBlocksError(f"parameter {name}: {error}") from error
        return
    rank = int(mesh.mesh[cut.coordinate])
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    raise MatrixBlocksError(
        f"parameter {name} of shape {shape} is placed as {placements}: the part of rank {rank} ends inside block "
        f"{cut.block} ({cut.elements}) of {blocks}, which is quantized as a whole and must not be divided. "
        + how_to_fix(name, shape, placements, mesh_shape, names, blocks)
    )


def how_to_fix(
    name: str,
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    axis_names: Sequence[str],
    blocks: Blocks,
) -> str:
    """The edits that keep blocks whole."""
    count = f"{math.prod(shape):,}"
    others = [Replicate() if isinstance(p, RaggedShard) else p for p in placements]
    if len(others) > 1 and blocks.first_cut(shape, others, mesh_shape) is not None:
        # The axes that cut while the module computes: a layout at rest changes nothing about that.
        cuts = ", ".join(f"{p} on {axis_names[axis]!r}" for axis, p in enumerate(others) if not p.is_replicate())
        size = next((n for n in (128, 64, 32, 16, 8) if _is_whole(FlatBlocks(n), shape, others, mesh_shape)), None)
        finer = (
            (f"Put it into a param group with block_size={size}, with which no block is divided")
            if size
            else "Shard another dim"
        )
        return f"{cuts} creates such parts. {finer}, or into one with a min_numel above its {count} elements"
    axes = [axis for axis, p in enumerate(placements) if isinstance(p, RaggedShard)]
    axes += [axis for axis, p in enumerate(placements) if not p.is_replicate()]
    granule = blocks.granule(shape)
    policy, arguments = f"Elements({granule})", f"block_size={granule}"
    if isinstance(blocks, RowBlocks):
        policy, arguments = f"Rows({blocks.rows})", f"block=({blocks.rows}, {blocks.columns})"
    return (
        f"With fully_shard, pass orig_param_policy=vescale.optim.adamw8bit_layout({arguments}), or a GranularityTable with "
        f"({name!r}, {policy}); in a plan, write plan.shard({name!r}, RaggedShard(block={granule}), "
        f"mesh={axis_names[axes[0]]!r}, phase=INIT). Otherwise choose smaller blocks, or a min_numel above the parameter's "
        f"{count} elements"
    )


def _is_whole(blocks: Blocks, shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]) -> bool:
    return blocks.first_cut(shape, placements, mesh_shape) is None


_UNQUANTIZED = 1024  # elements of the blocks in which values that are no codes are updated; shows in no result


class AdamW8bit(ExactStates):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) with moments of one byte (Dettmers et al., arXiv:2110.02861).

    Moments of a parameter with at least ``min_numel`` elements are codes of a map of 256 values, scaled by the largest
    magnitude of their block. The global tensor decides both: which parameters, and where blocks begin. So the state of any
    mesh has the bits that one device gives for equal gradients, and is loaded on any other mesh.

    ====================  ============  ==================================================================================
    state                 dtype         shape and cut
    ====================  ============  ==================================================================================
    ``exp_avg``           uint8         the parameter's
    ``exp_avg_sq``        uint8         the parameter's
    ``exp_avg_max``       float32       one value a block: ``(ceil(numel / block_size),)``, or with ``block`` the grid of
    ``exp_avg_sq_max``    float32       blocks ``(..., ceil(m / rows), ceil(n / columns))``; a rank has those of its blocks
    ``master``            float32       the parameter's; only with master weights
    ``step``              float32       no dims, on the CPU (``capturable``: on the device)
    ====================  ============  ==================================================================================

    Parameters below ``min_numel`` have float32 moments (float64 for float64). All states exist from the start; those of a
    frozen parameter when it requires a gradient in a step. The update itself uses the moments before they are rounded.

    Communication of a step: one all-reduce of a byte, for which only ranks wait that miss a gradient. They ask the others
    through the store, and take it as zeros if one has it; a parameter without a gradient on all ranks is skipped. One
    all-reduce for Partial gradients; one of a byte with ``skip_nonfinite``.

    Args:
        params: as in ``torch.optim.AdamW``; with ``model.named_parameters()`` errors and reports have names.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``; ``lr`` may be a tensor.
        block_size: elements of a block of the flattened global tensor; the last one may be short.
        block: ``(rows, columns)`` of blocks of each matrix instead, the last two dims; a vector is one row.
        min_numel: global number of elements from which a parameter is quantized.
        state_dtype: ``torch.bfloat16``: moments of large parameters are that instead of codes, 4 bytes an element, rounded
            to nearest; ``torch.float32``: 8 bytes.
        stochastic_rounding: bfloat16 parameters are rounded up or down at random, by Philox numbers of the element's global
            index, the step, the parameter and ``seed``: the same on every mesh, and after a resume.
        master_weights: keep a float32 copy of parameters in lower precision. None: unless they are rounded at random. Where
            a parameter was changed from outside, the copy follows it.
        skip_nonfinite: if a gradient has an inf or nan on any rank, all ranks leave parameters and states as they are: those
            of the meshes of which the parameters' meshes are slices, and of all stages of a pipeline.
        maximize: go up instead of down.
        capturable: ``step``, and a tensor ``lr``, stay on the device, without a wait of the host (CUDA graphs).
        seed: of stochastic rounding; the same on all ranks.

    Raises ValueError, from here or ``add_param_group`` and the same on every rank, if a boundary between ranks cuts a
    block (:func:`adamw8bit_layout` avoids that), and for arguments out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        block_size: int = 256,
        block: tuple[int, int] | None = None,
        min_numel: int = 4096,
        state_dtype: torch.dtype = torch.uint8,
        stochastic_rounding: bool = False,
        master_weights: bool | None = None,
        skip_nonfinite: bool = False,
        maximize: bool = False,
        capturable: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(params, options_of(locals()))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        try:
            _check_group(self.param_groups[index])
            self._make_states(index)
        except BaseException:
            del self.param_groups[index]
            raise

    def _make_states(self, index: int) -> None:
        """States for parameters of a group that have none yet; all are checked before the first is made."""
        group = self.param_groups[index]
        new = [
            (place, p)
            for place, p in enumerate(group["params"])
            if p.requires_grad and not p.is_meta and p not in self.state
        ]
        for place, p in new:
            name = self._name(index, place)
            _check_parameter(name, p, group)
            check_blocks(name, p, group)
        for _, p in new:
            device = p.device if group["capturable"] else torch.device("cpu")
            state: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32, device=device)}
            self.state[p] = state | {key: tensor.new(p) for key, tensor in state_tensors(p, group).items()}

    def _take_replaced(self, replaced: Mapping[torch.Tensor, torch.Tensor]) -> None:
        for key in ("_gradients", "_names", "_compared"):  # of other meshes, and of the model as it was
            self.__dict__.pop(key, None)
        for index in range(len(self.param_groups)):
            self._make_states(index)

    def _name(self, group: int, place: int) -> str:
        return self._shown_names()[group][place]

    def _shown_names(self) -> list[list[str]]:
        names: list[list[str]] = self.__dict__.get("_names", [])
        if [len(each) for each in names] != [len(group["params"]) for group in self.param_groups]:
            self._names = names = shown_names(self.param_groups)
        return names

    def loaded_state(self, parameter: torch.Tensor, state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Codes stay uint8 and maxima float32, cut as this optimizer's."""
        at = [
            (g, i) for g, group in enumerate(self.param_groups) for i, p in enumerate(group["params"]) if p is parameter
        ]
        group, name = self.param_groups[at[0][0]], self._name(*at[0])
        check_blocks(name, parameter, group)
        expected = state_tensors(parameter, group)
        if missing := [key for key in ("step", *expected) if key not in state]:
            raise OptimizerError(
                f"the state dict has no {missing[0]!r} for parameter {name}, only {sorted(state)}; it was saved by a "
                "different optimizer, or with different options"
            )
        step = torch.as_tensor(state["step"], dtype=torch.float32).detach()
        found: dict[str, Any] = {"step": step.to(parameter.device if group["capturable"] else "cpu", copy=True)}
        return found | {key: want.loaded(state[key], parameter, f"{key!r} of {name}") for key, want in expected.items()}

    @eagerly
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; returns the closure's loss. Raises as :class:`AdamW8bit` for parameters that no longer are frozen."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not all(group["capturable"] for group in self.param_groups):
            check_no_capture("the step count and bias corrections", "create the optimizer with capturable=True")
        for index in range(len(self.param_groups)):
            self._make_states(index)
        listed = [
            (group, p, name)
            for group, names in zip(self.param_groups, self._shown_names())
            for p, name in zip(group["params"], names)
            if p in self.state
        ]
        self._compare_listed([p for _, p, _ in listed])
        if not hasattr(self, "_checked"):
            self._checked: dict[int, tuple[Any, ...]] = {}
        for group, p, name in listed:
            form = (*(group[key] for key in OPTIONS_OF_STATES), *map(id, self.state[p].values()))
            if self._checked.get(id(p)) != form:
                check_states(name, p, group, self.state[p])
                self._checked[id(p)] = form
        if not hasattr(self, "_gradients"):
            self._gradients = StepGradients(type(self).__name__)
        everything = [p for group in self.param_groups for p in group["params"]]
        gradients = self._gradients.collect(
            [p for _, p, _ in listed],
            [name for *_, name in listed],
            everything if self.defaults["skip_nonfinite"] else None,
        )
        if gradients is None:
            return loss
        together: list[Update] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        known: dict[tuple[int, float], Scalars] = {}
        written = []
        for number, ((group, p, name), gradient) in enumerate(zip(listed, gradients)):
            if gradient is None:
                continue
            self.state[p]["step"].add_(1)
            param = local_part(p)
            one = self._update(group, p, param, gradient, name, number, known)
            if not is_native(one):
                update(one)
            elif one.noise is not None:  # the numbers of one parameter at a time
                update_all([one])
            else:
                together.append(one)
            if not param.is_contiguous():
                copies.append((param, one.param))
            written.append(p)
        if together:
            update_all(together)
        for param, copied in copies:
            param.copy_(copied)
        increment_version(written)
        return loss

    def _compare_listed(self, listed: Sequence[torch.Tensor]) -> None:
        """When other parameters than before are trained: all ranks that hold them train the same."""
        form = [*map(id, listed)]
        if form == self.__dict__.get("_compared"):
            return
        self._compared = form
        if not dist.is_available() or not dist.is_initialized() or is_alone():
            return
        trained = set(form)
        described = [
            (p.device_mesh.mesh.flatten().tolist(), name, "trained" if id(p) in trained else "frozen")
            for group, names in zip(self.param_groups, self._shown_names())
            for p, name in zip(group["params"], names)
            if isinstance(p, DTensor)
        ]
        with without_modes():
            compare_parameters(described)

    def _update(
        self,
        group: dict[str, Any],
        parameter: torch.Tensor,
        param: torch.Tensor,
        gradient: torch.Tensor,
        name: str,
        number: int,
        known: dict[tuple[int, float], Scalars],
    ) -> Update:
        state = self.state[parameter]
        if group["capturable"]:
            scalars = device_scalars(group, state["step"], compute_dtype(param.dtype))
            step = 0
        else:
            step = int(state["step"].item())
            key = id(group), step
            scalars = known[key] if key in known else known.setdefault(key, host_scalars(group, step))
        region = _region(parameter)
        noise = None
        if group["stochastic_rounding"] and param.dtype == torch.bfloat16 and param.numel():
            stream = zlib.crc32(name.encode()) if "param_names" in group else number
            noise = indexed_bits(group["seed"], stream, step, region.runs()).to(param.device)
        states = {key: local_part(value).contiguous() for key, value in state.items() if key != "step"}
        is_codes = is_quantized(parameter, group)
        parts = _parts(blocks_of(group), region) if is_codes else [Part(1, 1, param.numel(), 1, _UNQUANTIZED)]
        return Update(
            param.contiguous(),
            local_part(gradient).contiguous(),
            states["exp_avg"],
            states["exp_avg_sq"],
            states.get("exp_avg_max"),
            states.get("exp_avg_sq_max"),
            states.get("master"),
            noise,
            parts if param.numel() else [],
            scalars,
        )

    def parameter_reports(self) -> list[ParameterReport]:
        """For :func:`vescale.optim.report`: every rank updates what it holds, and nothing is sent."""
        found = []
        for index, group in enumerate(self.param_groups):
            for place, p in enumerate(group["params"]):
                planned = state_tensors(p, group).values() if p.requires_grad or p in self.state else []
                num_bytes = sum(tensor.num_bytes(p) for tensor in planned) + (4 if planned else 0)
                found.append(ParameterReport(self._name(index, place), _algorithm(p, group), None, num_bytes, 0))
        return found


def adamw8bit_layout(
    block_size: int = 256, *, block: tuple[int, int] | None = None, min_numel: int = 4096
) -> Callable[[str, Any], int | None]:
    """An ``orig_param_policy`` for ``fully_shard`` with which no boundary between ranks divides a block of
    :class:`AdamW8bit`; pass the optimizer's arguments.

    The policy returns the number of elements that stay together, None for parameters that are not quantized.

    Args:
        block_size, min_numel: the optimizer's.
        block: what else stays together: a granularity, as of ``RaggedShard``.
    """
    blocks = FlatBlocks(block_size) if block is None else RowBlocks(*block)

    def policy(name: str, parameter: Any) -> int | None:
        if math.prod(parameter.shape) < max(1, min_numel):
            return None
        held = own_part(parameter)
        return blocks.granule(tuple(held.shape))

    return policy


def _region(parameter: torch.Tensor) -> Region:
    if isinstance(parameter, DTensor):
        found = own_region(parameter.shape, parameter.placements, parameter.device_mesh)
        if found is not None:
            return found
    return _whole(tuple(local_part(parameter).shape))


@functools.lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> Region:
    return Region(shape, tuple(((0, size),) for size in shape))


@functools.lru_cache(maxsize=4096)
def _parts(blocks: Blocks, region: Region) -> tuple[Part, ...]:
    return tuple(blocks.parts(region))


def _algorithm(parameter: torch.Tensor, group: dict[str, Any]) -> str:
    if is_quantized(parameter, group):
        return "adamw8bit"
    is_large = parameter.numel() >= group["min_numel"]
    return "adamw (bfloat16)" if is_large and group["state_dtype"] == "bfloat16" else "adamw"


def _check_group(group: dict[str, Any]) -> None:
    """Raises ValueError for a number out of range."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    if isinstance(lr, torch.Tensor):
        if lr.numel() != 1:
            raise OptimizerError(f"lr is a tensor of shape {tuple(lr.shape)}; pass a single number")
    elif not lr >= 0:
        raise OptimizerError(f"lr is {lr}; expected 0 or more")
    for name, beta in (("betas[0]", beta1), ("betas[1]", beta2)):
        if not 0 <= beta < 1:
            raise OptimizerError(f"{name} is {beta}; expected a number in [0, 1)")
    for name in ("eps", "weight_decay", "min_numel"):
        if not group[name] >= 0:
            raise OptimizerError(f"{name} is {group[name]}; expected 0 or more")
    if isinstance(group["block"], list):
        group["block"] = tuple(group["block"])
    sizes: Any = [group["block_size"]] if group["block"] is None else group["block"]
    expected = 1 if group["block"] is None else 2
    if (
        not isinstance(sizes, (list, tuple))
        or len(sizes) != expected
        or any(type(size) is not int or size < 1 for size in sizes)
    ):
        raise OptimizerError(
            f"block_size is {group['block_size']!r} and block is {group['block']!r}; expected a number of elements, or "
            "(rows, columns), of at least 1"
        )
    group["state_dtype"] = str(group["state_dtype"]).removeprefix("torch.")
    if group["state_dtype"] not in STATE_DTYPES:
        raise OptimizerError(f"state_dtype is {group['state_dtype']}; expected torch.{', torch.'.join(STATE_DTYPES)}")
    if group["stochastic_rounding"] and group["master_weights"]:
        raise OptimizerError(
            "stochastic_rounding and master_weights exclude each other, because a float32 copy needs no rounding; "
            "pass one of them"
        )
    if group["stochastic_rounding"] and group["capturable"]:
        raise OptimizerError("stochastic_rounding draws on the host, by the step count; use it without capturable")
    if group["skip_nonfinite"] and group["capturable"]:
        raise OptimizerError("skip_nonfinite decides on the host; use it without capturable")


def _check_parameter(name: str, parameter: torch.Tensor, group: dict[str, Any]) -> None:
    if not parameter.is_floating_point():
        raise OptimizerError(f"parameter {name} is {parameter.dtype}; AdamW8bit updates real floating-point parameters")
    if group["stochastic_rounding"] and parameter.dtype == torch.float16:
        raise OptimizerError(
            f"parameter {name} is {parameter.dtype}; stochastic rounding needs bfloat16 parameters. Use bfloat16, or "
            "master_weights"
        )
