"""``MatrixOptimizer``: what optimizers have in common that compute each matrix whole, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from vescale.compat import eagerly, note_writes
from vescale.errors import OptimizerError
from vescale.optim._matrix_blocks import MatrixGrid
from vescale.optim._matrix_exchange import MatrixExchange, MatrixStep, OwnedMatrix, plan_rounds
from vescale.optim._matrix_parameters import Algorithm, MatrixParameter, MatrixParameters, Ownership, local_tensor
from vescale.optim._report import ParameterReport
from vescale.optim._state_loading import ExactStates, options_of
from vescale.optim._step_gradients import LinkedRanks, StepBeats, agreed_gradients, check_no_capture
from vescale.placements import Box

# AdamW, element by element, for the parameters that are no matrices.

ADAMW_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "capturable": False,
}
"""Options of ``torch.optim.AdamW`` that a group with ``algorithm="adamw"`` takes, and their defaults."""


def adamw_states(tensor: torch.Tensor, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The states of ``torch.optim.AdamW``, placed like the parameter; ``step`` on its device with ``capturable``."""
    zeros = {name: torch.zeros_like(tensor, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.tensor(0.0, device=tensor.device if group["capturable"] else "cpu"), **zeros}


def adamw_update(
    locals_: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    states: Sequence[Mapping[str, torch.Tensor]],
    group: Mapping[str, Any],
) -> None:
    """One step of ``torch.optim.AdamW`` on local tensors, with its bits; with ``capturable`` without a wait of the host."""
    if group["capturable"]:
        for local, gradient, state in zip(locals_, gradients, states):
            _on_the_device(local, gradient, state, group)
        return
    beta1, beta2 = group["betas"]
    adamw(
        list(locals_),
        list(gradients),
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _on_the_device(
    local: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], group: Mapping[str, Any]
) -> None:
    """PyTorch's own form of this takes no tensors on the CPU."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    step, average, square = state["step"].add_(1), state["exp_avg"], state["exp_avg_sq"]
    local.mul_(1 - lr * group["weight_decay"])
    average.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
    local.sub_((average / root * (lr / (1 - beta1**step))).to(local.dtype))


# The algorithms of a saved optimizer beside those of the one that loads it.


def check_same_algorithms(own: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Compare algorithms and blocks by parameter name, or by place where the groups have no names.

    Raises ValueError that names the first parameter that differs.
    """
    ours, theirs = _by_name(own), _by_name(saved)
    if not ours.keys() & theirs.keys():  # saved without names, or with other ones; torch compares sizes of groups
        ours, theirs = (dict(enumerate(found.values())) for found in (ours, theirs))
    for name, (algorithm, blocks) in ours.items():
        found = theirs.get(name, (algorithm, blocks))
        if found != (algorithm, blocks):
            raise OptimizerError(
                f"parameter {name!r} was saved with algorithm={found[0]!r} and blocks={found[1]!r}, but this "
                f"optimizer has algorithm={algorithm!r} and blocks={blocks!r}; create the same groups, or load only "
                "the parameters"
            )


def _by_name(groups: Sequence[Mapping[str, Any]]) -> dict[Any, tuple[Any, Any]]:
    found: dict[Any, tuple[Any, Any]] = {}
    for position, group in enumerate(groups):
        names = group.get("param_names") or [f"group {position}, parameter {i}" for i in range(len(group["params"]))]
        for name in names:
            found[name] = (group.get("algorithm"), _plain(group.get("blocks")))
    return found


def _plain(blocks: Any) -> Any:
    return tuple(map(_plain, blocks)) if isinstance(blocks, list | tuple) else blocks


_MOMENTS = ("exp_avg", "exp_avg_sq")
_STATES = (
    *_MOMENTS,
    "momentum_buffer",
    "row_factor",
    "row_root",
    "row_basis",
    "column_factor",
    "column_root",
    "column_basis",
)
_MAX_EXCHANGES = 8  # for different sets of parameters with gradients


class MatrixOptimizer(ExactStates):
    """Base of optimizers whose update of a matrix needs all of it.

    The gradient of a matrix, or what is made of it element by element, goes to the one rank that owns the matrix; the
    update comes back in parts. Groups with ``algorithm="adamw"`` are updated by AdamW on each rank's part.
    """

    algorithm: str

    def __init__(self, params: Iterable[Any], given: Mapping[str, Any]) -> None:
        """``given``: the ``locals()`` of a subclass's constructor. All options but these four have a value in each group."""
        defaults = {"algorithm": self.algorithm, **options_of(given), "blocks": None}
        self._skip_nonfinite, self._split_replicas = defaults.pop("skip_nonfinite"), defaults.pop("split_replicas")
        self._compare_gradients, self._bucket_bytes = defaults.pop("compare_gradients"), defaults.pop("bucket_bytes")
        if self._bucket_bytes < 1:
            raise OptimizerError(f"bucket_bytes={self._bucket_bytes}; a bucket holds at least one byte")
        self._parameters: MatrixParameters | None = None
        self._exchanges: dict[tuple[int, ...], MatrixExchange] = {}
        self._linked = LinkedRanks(type(self).__name__)
        self._beats = StepBeats("gradients of an optimizer")
        super().__init__(params, defaults)
        self._parameters = MatrixParameters(
            Algorithm(self._grid, self._cost, self._kinds, self._dtypes, self._announce), self._split_replicas
        )
        self._follow(announces=True)

    # What a subclass says of its algorithm.

    def _grid(self, parameter: MatrixParameter) -> MatrixGrid | None:
        """The matrices of a parameter; None: it is updated element by element."""
        raise NotImplementedError

    def _cost(self, parameter: MatrixParameter, rows: int, columns: int) -> int:
        raise NotImplementedError

    def _kinds(self, matrices: Sequence[OwnedMatrix]) -> list[int]:
        """Matrices of one kind are also balanced among themselves."""
        return [0] * len(matrices)

    def _announce(self, parameters: Sequence[MatrixParameter]) -> None:
        """New parameters of this rank, perhaps none, before they are given to owners; ranks call it together."""

    def _dtypes(self, parameter: MatrixParameter) -> tuple[torch.dtype, torch.dtype]:
        """What travels to the owner, and back."""
        raise NotImplementedError

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raises ValueError for options of a group that have no meaning."""

    def _make_states(self, parameter: MatrixParameter) -> dict[str, Any]:
        """The states of a parameter of the algorithm, alike on every rank."""
        raise NotImplementedError

    def _begin(self, parameters: Sequence[MatrixParameter]) -> None:
        """Count the step of parameters of the algorithm that have a gradient."""

    def _part(self, parameter: MatrixParameter, gradient: torch.Tensor) -> torch.Tensor:
        """What travels, from this rank's part of the gradient. Called once a step, before any update of the parameter."""
        raise NotImplementedError

    def _compute(self, matrices: Sequence[tuple[OwnedMatrix, torch.Tensor]]) -> list[torch.Tensor]:
        """The update of each matrix, by which the learning rate is multiplied."""
        raise NotImplementedError

    def _rate(self, matrix: OwnedMatrix) -> Any:
        """What the update of a matrix is multiplied by before it is subtracted: a number, or a 0-dim tensor."""
        return self._parameter(matrix).group["lr"]

    def _update_elements(self, parameter: MatrixParameter, gradient: torch.Tensor) -> None:
        """The update of a parameter of the algorithm that has no matrices."""
        raise NotImplementedError

    def _check_capture(self) -> None:
        """Raises ValueError while a CUDA graph is captured and the host computes something of a step."""
        if any(group["algorithm"] == "adamw" and not group["capturable"] for group in self.param_groups):
            check_no_capture("AdamW's step number", 'set capturable=True in groups with algorithm="adamw"')

    # The interface of torch.optim.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in PyTorch. With ``algorithm="adamw"`` the group takes AdamW's options, and has AdamW's defaults for them."""
        algorithm = param_group.get("algorithm", self.algorithm)
        if algorithm not in (self.algorithm, "adamw"):
            raise OptimizerError(
                f'a group has algorithm={algorithm!r}; {type(self).__name__} knows "{self.algorithm}" and "adamw"'
            )
        if algorithm == "adamw":
            unknown = set(param_group) - {*ADAMW_DEFAULTS, "params", "param_names", "algorithm", "initial_lr"}
            foreign = sorted(unknown & set(self.defaults))
            if foreign:
                raise OptimizerError(
                    f'a group with algorithm="adamw" has {foreign}, which only "{self.algorithm}" uses; AdamW takes '
                    f"{sorted(ADAMW_DEFAULTS)}"
                )
            for key, value in ADAMW_DEFAULTS.items():
                param_group.setdefault(key, value)
        is_empty = isinstance(param_group["params"], list) and not param_group["params"]
        if is_empty and self.param_groups and "param_names" in self.param_groups[0]:
            param_group.setdefault("param_names", [])  # of a stage without such parameters; for PyTorch it has no names
        given = set(param_group)
        super().add_param_group(param_group)
        if algorithm == "adamw":
            for key in set(self.defaults) - given - {"algorithm"}:
                del param_group[key]
        try:
            self._check_options(param_group)
            for tensor in param_group["params"]:
                if tensor.is_complex() or not tensor.is_floating_point():
                    raise OptimizerError(
                        f"a parameter of shape {tuple(tensor.shape)} is {tensor.dtype}; expected a real "
                        "floating-point dtype"
                    )
            if self._parameters is not None:
                self._follow(announces=True)
        except BaseException:
            self.param_groups.pop()
            raise

    def _follow(self, replaced: Mapping[torch.Tensor, torch.Tensor] = MappingProxyType({}), **options: bool) -> None:
        """Plan what is in the groups now, whoever has put it there; the groups are the only list of parameters."""
        form = [
            (id(group), *map(id, group["params"]), *(repr(group.get(option)) for option in self._planned))
            for group in self.param_groups
        ]
        if form == self.__dict__.get("_form") and not options:
            return
        for group in self.param_groups:
            self._check_options(group)
        self._exchanges.clear()
        for parameter in self._known().follow(self.param_groups, replaced, check=self._check_states, **options):
            state = self.state.pop(parameter.tensor, None)
            self._fill_states(parameter)
            if state:  # of one that was here before, or of a copy: owners may be others now
                own = self.state.get(parameter.tensor) or self._made_states(parameter)
                self.state[parameter.tensor] = self.loaded_state(parameter.tensor, state, own)
        self._form = form

    _planned: tuple[str, ...] = ("algorithm", "blocks")
    """Options of a group that decide which matrices and states a parameter has."""

    def _check_options(self, group: dict[str, Any]) -> None:
        options = ADAMW_DEFAULTS if group["algorithm"] == "adamw" else self.defaults
        if missing := sorted(options.keys() - group.keys() - {"differentiable"}):  # torch gives that to copies
            raise OptimizerError(
                f"a group has algorithm={group['algorithm']!r} and no {missing}: it was created for a different "
                "algorithm; pass its parameters to add_param_group() of this optimizer"
            )
        if group["algorithm"] != "adamw":
            self._check_group(group)

    def _check_states(self, parameter: MatrixParameter) -> None:
        """Raises ValueError for states that were made for other options."""
        state = self.state.get(parameter.tensor)
        if not state:
            return
        expected = self._expected_states(parameter)
        own = {name: tuple(state[name].shape) for name in state if name.partition(".")[0] in _STATES}
        for name, shape in {**dict.fromkeys(expected), **own}.items():
            if name.partition(".")[0] in _MOMENTS and (shape is None or name not in expected):
                continue  # made when they are needed, and kept
            if shape != expected.get(name):
                raise OptimizerError(
                    f"parameter {parameter.name!r} has a state {name!r} of shape {shape}; expected "
                    f"{expected.get(name)} with {self._shown_options(parameter.group)}: it was created for different "
                    "options; keep those, or reset it: del optimizer.state[parameter]"
                )

    def _shown_options(self, group: Mapping[str, Any]) -> str:
        return ", ".join(f"{option}={group.get(option)!r}" for option in self._planned)

    def _expected_states(self, parameter: MatrixParameter) -> dict[str, tuple[int, ...]]:
        """The shapes of its states by name."""
        return dict.fromkeys(_MOMENTS, parameter.place.shape)

    def _take_replaced(self, replaced: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self._follow(replaced)

    def _known(self) -> MatrixParameters:
        assert self._parameters is not None
        return self._parameters

    def _parameter(self, matrix: OwnedMatrix) -> MatrixParameter:
        return self._known().by_number[matrix.parameter]

    def _fill_states(self, parameter: MatrixParameter) -> None:
        tensor = parameter.tensor
        if tensor.requires_grad and tensor.device.type != "meta" and not self._has_states(parameter):
            self.state[tensor] = {**self._made_states(parameter), **self.state.get(tensor, {})}

    def _made_states(self, parameter: MatrixParameter) -> dict[str, Any]:
        if parameter.group["algorithm"] == "adamw":
            return adamw_states(parameter.tensor, parameter.group)
        return self._make_states(parameter)

    def _has_states(self, parameter: MatrixParameter) -> bool:
        return bool(self.state.get(parameter.tensor))

    @eagerly
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient on any rank.

        Communication: two all-to-alls for each bucket of matrices whose parts are on several ranks, one more along
        replicas, and where there are such, one all-reduce of two bytes a parameter in which ranks learn which gradients
        exist.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow()
        self._check_capture()
        parameters = self._known().all
        if any(parameter.tensor.device.type == "meta" for parameter in parameters):
            raise OptimizerError("a parameter is on the meta device; materialize the model before the first step")
        for parameter in parameters:
            self._fill_states(parameter)
        compare = [p for p in parameters if p.travels] if self._compare_gradients is None else parameters
        gradients = agreed_gradients(
            parameters,
            self._beats,
            compare=() if self._compare_gradients is False else {frozenset(p.ranks) for p in compare},
            linked=self._linked.of([p.tensor for p in parameters]) if self._skip_nonfinite else None,
        )
        if not gradients:
            return loss
        active = [p for p in parameters if p.number in gradients]
        note_writes([p.tensor for p in active])
        own = [p for p in active if p.group["algorithm"] != "adamw"]
        self._begin(own)
        numbers = tuple(p.number for p in own if p.grid is not None)
        if numbers:
            self._exchange(numbers).run(_Step(self, gradients))
        for parameter in own:
            if parameter.grid is None:
                self._update_elements(parameter, gradients[parameter.number])
        adamw = [p for p in active if p.group["algorithm"] == "adamw"]
        for group in self.param_groups:
            members = [p for p in adamw if p.group is group]
            if members:
                states = [{k: local_tensor(v) for k, v in self.state[p.tensor].items()} for p in members]
                adamw_update([p.local for p in members], [gradients[p.number] for p in members], states, group)
        return loss

    def _exchange(self, numbers: tuple[int, ...]) -> MatrixExchange:
        """How the matrices of these parameters travel."""
        found = self._exchanges.get(numbers)
        if found is None:
            chosen = set(numbers)
            # Costly matrices first: an owner's own are then computed in an order in which owners end together.
            matrices = sorted(
                (m for m in self._known().matrices if m.parameter in chosen),
                key=lambda m: (-m.cost, m.parameter, m.block),
            )
            device = self._known().by_number[numbers[0]].local.device if numbers else torch.device("cpu")
            found = MatrixExchange(plan_rounds(matrices, self._bucket_bytes), device, type(self).__name__)
            while len(self._exchanges) >= _MAX_EXCHANGES:
                del self._exchanges[next(iter(self._exchanges))]
            self._exchanges[numbers] = found
        return found

    def _apply(self, matrix: OwnedMatrix, block: Box, update: torch.Tensor) -> None:
        target, rate = block.view(self._parameter(matrix).local), self._rate(matrix)
        if isinstance(rate, torch.Tensor):
            target.sub_(update.to(target.dtype) * rate.to(target.dtype))
        else:
            target.add_(update, alpha=-rate)

    def decay(self, parameter: MatrixParameter) -> None:
        """Weight decay as in AdamW: by the group's learning rate, apart from the gradient."""
        parameter.local.mul_(1 - parameter.group["lr"] * parameter.group["weight_decay"])

    @property
    def ownership(self) -> Ownership:
        """Who computes which matrix, and the planned cost of each rank: of matrices on meshes that this rank is part of."""
        self._follow()
        return self._known().ownership

    def parameter_reports(self) -> list[ParameterReport]:
        """One for each parameter, in the order of the groups. No communication."""
        self._follow()
        parameters = self._known().all
        numbers = tuple(p.number for p in parameters if p.grid is not None and p.tensor.requires_grad)
        received = self._exchange(numbers).received_bytes()
        reports = []
        for parameter in parameters:
            owners = [_owner_rank(matrix) for matrix in parameter.matrices]
            owner = None if not owners else owners[0] if len(set(owners)) == 1 else tuple(owners)
            states = self.state.get(parameter.tensor, {}).values()
            held = sum(local_tensor(s).nbytes for s in states if isinstance(s, torch.Tensor))
            algorithm = parameter.group["algorithm"]
            reports.append(ParameterReport(parameter.name, algorithm, owner, held, received.get(parameter.number, 0)))
        return reports

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in PyTorch, but states keep the dtype that they were saved in. After an error the optimizer is as it was.

        Raises ValueError for a state of another algorithm, naming the parameter.
        """
        check_same_algorithms(self.param_groups, state_dict["param_groups"])
        super().load_state_dict(state_dict)
        self._follow()
        for parameter in self._known().all:
            if parameter.group.get("capturable") and (state := self.state.get(parameter.tensor)):
                state["step"] = state["step"].to(parameter.tensor.device)

    def __getstate__(self) -> dict[str, Any]:
        own = {key: value for key, value in self.__dict__.items() if key.startswith("_") and key in _OPTIONS}
        if phases := own.get("_phases"):  # a copy counts its parameters anew
            places = {number: place for place, number in enumerate(self._known().by_number)}
            own["_phases"] = {(places[n], block): phase for (n, block), phase in phases.items() if n in places}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.__dict__.get("_parameters") is None and "_bucket_bytes" in self.__dict__:  # a copy
            self._exchanges = {}
            self._linked = LinkedRanks(type(self).__name__)
            self._beats = StepBeats("gradients of an optimizer")
            self._parameters = MatrixParameters(
                Algorithm(self._grid, self._cost, self._kinds, self._dtypes, lambda _: None), self._split_replicas
            )
            self._follow(announces=True)


_OPTIONS = {"_skip_nonfinite", "_bucket_bytes", "_split_replicas", "_compare_gradients", "_orthogonalize", "_phases"}


def _owner_rank(matrix: OwnedMatrix) -> int:
    mesh = matrix.place.mesh
    rank = dist.get_rank() if dist.is_initialized() else 0
    if mesh is None:
        return rank
    own = mesh.get_coordinate()
    assert own is not None
    place = tuple(
        mine if axis in matrix.repeated else there for axis, (there, mine) in enumerate(zip(matrix.owner, own))
    )
    return int(mesh.mesh[place])


class _Step(MatrixStep):
    def __init__(self, optimizer: MatrixOptimizer, gradients: dict[int, torch.Tensor]) -> None:
        self._optimizer, self._gradients = optimizer, gradients
        self._parts: dict[int, torch.Tensor] = {}

    def part(self, parameter: int) -> torch.Tensor:
        if parameter not in self._parts:
            known = self._optimizer._known().by_number[parameter]
            self._parts[parameter] = self._optimizer._part(known, self._gradients[parameter])
        return self._parts[parameter]

    def release(self, parameter: int) -> None:
        self._parts.pop(parameter, None)

    def compute(self, matrices: Sequence[tuple[OwnedMatrix, torch.Tensor]]) -> list[torch.Tensor]:
        return self._optimizer._compute(matrices)

    def apply(self, matrix: OwnedMatrix, block: Box, update: torch.Tensor) -> None:
        self._optimizer._apply(matrix, block, update)
