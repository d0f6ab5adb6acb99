"""What surrounds a step of the optimizers with owners: bytes, layouts, groups, engines, checkpoints, bad input."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device import device_type
from tests.optim.meshes import GRIDS, LINES, assert_equal, build, on_mesh, set_gradients
from tests.placements.on_ranks import make_mesh
from tests.ranks import RankPools
from tests.whole import whole
from vescale.comm import record_comms
from vescale.fsdp import fully_shard
from vescale.optim import SOAP, AdamW8bit, Muon, Shampoo, clip_grad_norm_, muon_groups, muon_layout
from vescale.placements import local_region


class Block(nn.Module):
    """Packed projections, experts, an embedding with a tied head, norms. Gradients have full rank: in null spaces of SOAP's
    factors, bases are a matter of rounding."""

    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.norm = nn.LayerNorm(dim)
        self.experts = nn.Parameter(torch.randn(3, dim, dim) / dim**0.5)
        self.head = nn.Linear(dim, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + torch.tanh(q) * k + v
        return self.head(x + torch.einsum("bsd,edf->bsf", x, self.experts))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())


def groups_of(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    return muon_groups(model, adamw=[r"(embed|head)\.weight"], blocks={r"qkv\.weight": 3}, verbose=False, **options)


# Groups by name.


def test_groups_are_made_by_name_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = Block()
    groups = muon_groups(
        model, adamw=[r"head\.weight"], blocks={r"qkv\.weight": (12, 20, 4)}, adamw_options={"lr": 3e-4}
    )
    names = [[name for name, _ in group["params"]] for group in groups]
    assert names == [["experts"], ["qkv.weight"], ["embed.weight", "qkv.bias", "norm.weight", "norm.bias"]]
    assert [group["algorithm"] for group in groups] == ["muon", "muon", "adamw"] and groups[2]["lr"] == 3e-4
    printed = capsys.readouterr().out
    assert "experts  3 x 12 x 12: 3 matrices of 12 x 12" in printed
    assert "1 matrix of 12 x 12, 1 matrix of 20 x 12, 1 matrix of 4 x 12" in printed and "qkv.bias" in printed
    optimizer = Muon(groups, lr=0.02)
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.02, 3e-4]
    assert "momentum" not in optimizer.param_groups[2] and optimizer.param_groups[2]["weight_decay"] == 1e-2
    reports = {report.name: report for report in optimizer.parameter_reports()}
    assert reports["qkv.weight"].algorithm == "muon" and reports["qkv.bias"].algorithm == "adamw"


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"adamw": [r"heat\.weight"]}, r"matches none of 7 parameters; did you mean 'head.weight'"),
        ({"adamw": ["head"]}, "matches none"),
        ({"blocks": {"qkv.weight.*x": 3}}, "of blocks matches none"),
        ({"blocks": {r"qkv\.weight": 5}}, "5 does not divide the 36"),
        ({"blocks": {r"qkv\.weight": [30, 7]}}, "sum to 37"),
        ({"blocks": {r"qkv\.weight": ("dim", 2, 3)}}, "pass a number of equal blocks"),
        ({"blocks": {r"norm\.weight": 2}}, "is not a matrix"),
        ({"adamw": [r"qkv\..*"], "blocks": {r"qkv\.weight": 3}}, "of adamw"),
        ({"adamw": "head"}, "a list of patterns"),
        ({"adamw": ["(head"]}, "not a valid regular expression"),
    ],
)
def test_wrong_patterns_are_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        muon_groups(Block(), verbose=False, **arguments)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"adjust_lr": "keller"}, "adjust_lr='keller'"),
        ({"ns_steps": -1}, "ns_steps=-1"),
        ({"batch": 0}, "batch=0"),
        ({"coefficients": (1.0, 2.0)}, "three numbers"),
        ({"momentum": -0.5}, "momentum=-0.5"),
        ({"bucket_bytes": 0}, "bucket_bytes=0"),
    ],
)
def test_wrong_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon([nn.Parameter(torch.ones(3, 2))], **options)


def test_a_vector_is_not_taken_for_a_matrix() -> None:
    with pytest.raises(ValueError, match=r'has shape \(4,\).*algorithm="adamw"'):
        Muon([nn.Parameter(torch.ones(4))])
    with pytest.raises(ValueError, match=r"\['momentum'\], which only"):
        Muon([{"params": [nn.Parameter(torch.ones(4))], "algorithm": "adamw", "momentum": 0.9}])
    with pytest.raises(ValueError, match="knows"):
        Muon([{"params": [nn.Parameter(torch.ones(4, 4))], "algorithm": "sgd"}])


# One device.


def test_adamw_groups_have_the_bits_of_torch() -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(6, 4))]
    theirs = copy.deepcopy(ours)
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
    optimizer = Muon([{"params": ours, "algorithm": "adamw", **options}, {"params": [nn.Parameter(torch.ones(2, 2))]}])
    reference = torch.optim.AdamW(theirs, **options)
    for _ in range(5):
        for a, b in zip(ours, theirs):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        optimizer.step()
        reference.step()
    for a, b in zip(ours, theirs):
        assert torch.equal(a, b) and torch.equal(optimizer.state[a]["exp_avg_sq"], reference.state[b]["exp_avg_sq"])


def test_singular_values_end_near_one() -> None:
    """Of each block by itself, in all dialects of ``adjust_lr``; the update is the parameter's change."""
    for adjust, scale in (
        ("original", 1.0),
        ("match_rms_adamw", 0.2 * math.sqrt(32)),
        ("spectral", math.sqrt(8 / 32)),
    ):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.zeros(2, 16, 32))
        optimizer = Muon(
            [{"params": [parameter], "blocks": [8, 8]}],
            lr=1.0,
            weight_decay=0.0,
            ns_dtype=torch.float32,
            adjust_lr=adjust,
        )
        parameter.grad = torch.randn(2, 16, 32) * torch.tensor([1.0, 1000.0]).view(2, 1, 1)
        optimizer.step()
        for block in parameter.detach().view(4, 8, 32):
            values = torch.linalg.svdvals(block) / scale
            assert values.min() > 0.5 and values.max() < 1.4, adjust


def test_batches_change_rounding_only() -> None:
    torch.manual_seed(0)
    start = [torch.randn(2, 8, 24), torch.randn(24, 8), torch.randn(8, 24)]
    ours, others = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
    options: dict[str, Any] = {"lr": 0.1, "ns_dtype": torch.float32}
    batched, single = Muon(ours, batch=3, **options), Muon(others, **options)
    for _ in range(3):
        for a, b in zip(ours, others):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        batched.step()
        single.step()
    for a, b in zip(ours, others):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_another_orthogonalization() -> None:
    def exact(matrix: torch.Tensor) -> torch.Tensor:
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        return u @ v

    parameter = nn.Parameter(torch.zeros(6, 4))
    optimizer = Muon([parameter], lr=1.0, weight_decay=0.0, orthogonalize=exact, adjust_lr="original")
    parameter.grad = torch.randn(6, 4)
    optimizer.step()
    torch.testing.assert_close(parameter.T @ parameter, torch.eye(4) * 6 / 4)
    optimizer = Muon([parameter], orthogonalize=lambda matrix: matrix[:2])
    with pytest.raises(ValueError, match="returned"):
        optimizer.step()
    with pytest.raises(ValueError, match="orthogonalize=3"):
        Muon([parameter], orthogonalize=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Muon, Shampoo, SOAP])
def test_nonfinite_gradients_are_skipped(kind: Any) -> None:
    torch.manual_seed(0)
    matrix, vector, late = (nn.Parameter(torch.randn(shape)) for shape in ((4, 6), (3,), (2, 2)))
    late.requires_grad_(False)
    optimizer = kind(
        [{"params": [matrix, late]}, {"params": [vector], "algorithm": "adamw"}], lr=0.1, skip_nonfinite=True
    )
    assert late not in optimizer.state
    for step in range(4):
        before = copy.deepcopy((optimizer.state_dict(), matrix, vector))
        matrix.grad, vector.grad = torch.randn(4, 6), torch.randn(3)
        if step == 2:
            vector.grad[1] = math.nan
        if step == 1:
            late.requires_grad_(True)
            late.grad = torch.randn(2, 2)
        optimizer.step()
        same = torch.equal(matrix, before[1]) and torch.equal(vector, before[2])
        assert same == (step == 2), step
        if step == 2:
            for number, states in before[0]["state"].items():
                for name, value in states.items():
                    assert torch.equal(optimizer.state_dict()["state"][number][name], value)
    assert late in optimizer.state


def test_what_surrounds_a_step() -> None:
    """Closures, schedules, groups added later, copies, state dicts; states keep their dtype."""
    torch.manual_seed(0)
    first, second = nn.Parameter(torch.randn(4, 6).bfloat16()), nn.Parameter(torch.randn(5))
    optimizer = Shampoo([("a", first)], lr=0.1, precondition_frequency=2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.add_param_group({"params": [("b", second)], "algorithm": "adamw", "lr": 0.2})

    def closure() -> torch.Tensor:
        first.grad, second.grad = torch.randn(4, 6).bfloat16(), torch.randn(5)
        return torch.tensor(3.0)

    assert optimizer.step(closure) == 3.0
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.1]
    parameters = [nn.Parameter(p.detach().clone()) for p in (first, second)]
    other = Shampoo([("a", parameters[0])], lr=7.0, precondition_frequency=2)
    other.add_param_group({"params": [("b", parameters[1])], "algorithm": "adamw"})
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.state[parameters[0]]["row_factor"].dtype == torch.float32
    copied, twins = copy.deepcopy((optimizer, [first, second]))
    for _ in range(3):
        closure()
        for mine, theirs, third in zip((first, second), parameters, twins):
            theirs.grad, third.grad = mine.grad.clone(), mine.grad.clone()
        for each in (optimizer, other, copied):
            each.step()
    for mine, theirs, third in zip((first, second), parameters, twins):
        assert torch.equal(mine, theirs) and torch.equal(mine, third)


class HostReads(TorchDispatchMode):
    """Counts the numbers that the host reads."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_scalars_stay_on_the_device() -> None:
    """Matrices, and AdamW with ``capturable``: the host reads nothing, and numbers are those of ``torch.optim``."""
    torch.manual_seed(0)
    first, second, third = (nn.Parameter(torch.randn(*shape)) for shape in ((6, 4), (5,), (5,)))
    with torch.no_grad():
        third.copy_(second)
    lr = torch.tensor(0.1)
    groups = [{"params": [first]}, {"params": [second], "algorithm": "adamw", "lr": lr, "capturable": True}]
    optimizer, alone = Muon(groups, lr=lr), torch.optim.AdamW([third], lr=0.1)
    for step in range(4):
        first.grad, second.grad = torch.randn(6, 4), torch.randn(5)
        third.grad = second.grad
        if step == 2:
            lr.mul_(0.5)
            alone.param_groups[0]["lr"] = 0.05
            optimizer.load_state_dict(optimizer.state_dict())
        with HostReads() as reads:
            optimizer.step()
        alone.step()
        assert reads.count == 0
        torch.testing.assert_close(second, third)


@pytest.mark.parametrize("kind", [Muon, Shampoo, SOAP, AdamW8bit], ids=lambda kind: kind.__name__)
def test_what_cannot_be_captured(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's numbers would be those of the first replay in all others: an error, where nothing has changed."""
    for name in ("is_available", "is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    parameter = nn.Parameter(torch.ones(4, 4))
    parameter.grad = torch.ones(4, 4)
    with pytest.raises(ValueError, match="captured in a graph"):
        kind([{"params": [parameter], **({"algorithm": "adamw"} if kind is Muon else {})}], lr=0.1).step()
    assert torch.equal(parameter, torch.ones(4, 4))
    if kind in (Muon, AdamW8bit):
        kind([parameter], lr=0.1, **({"capturable": True} if kind is AdamW8bit else {})).step()
        assert not torch.equal(parameter, torch.ones(4, 4))


@pytest.mark.parametrize("kind", [Muon, Shampoo, SOAP], ids=lambda kind: kind.__name__)
def test_a_refused_group_leaves_no_trace(kind: Any) -> None:
    """Its parameters are new when they are given again, and updated by the options that they have then."""
    torch.manual_seed(0)
    first, second, third = (nn.Parameter(torch.randn(6, 4)) for _ in range(3))
    optimizer = kind([first], lr=0.1)
    with pytest.raises(ValueError, match="does not divide"):
        optimizer.add_param_group({"params": [second, nn.Parameter(torch.randn(5, 4))], "blocks": 2})
    assert len(optimizer.param_groups) == len(optimizer.parameter_reports()) == 1 and second not in optimizer.state
    optimizer.add_param_group({"params": [second], "algorithm": "adamw", "lr": 0.5})
    with torch.no_grad():
        third.copy_(second)
    alone = torch.optim.AdamW([third], lr=0.5)
    for _ in range(2):
        for parameter in (first, second):
            parameter.grad = torch.randn(6, 4)
        third.grad = second.grad
        optimizer.step()
        alone.step()
    torch.testing.assert_close(second, third)


def test_the_state_of_another_algorithm_is_refused() -> None:
    a, b = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(4, 4))
    saved = Muon([{"params": [("a", a), ("b", b)]}]).state_dict()
    optimizer = Muon([{"params": [("a", a)]}, {"params": [("b", b)], "algorithm": "adamw"}])
    with pytest.raises(ValueError, match=r"'b' was saved with algorithm='muon'.*'adamw'"):
        optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"'a' was saved with algorithm='muon'.*'soap'"):
        SOAP([{"params": [("a", a), ("b", b)]}]).load_state_dict(saved)
    with pytest.raises(ValueError, match="blocks"):
        Muon([{"params": [("a", a), ("b", b)], "blocks": 2}]).load_state_dict(saved)


# Bytes.


def bytes_equal_the_bound(num_ranks: int) -> None:
    """Every element of a matrix travels to its owner once and back once; nothing of what the owner holds."""
    for cases in (LINES[num_ranks], *([GRIDS] if num_ranks == 4 else [])):
        own, reference = build(cases)
        optimizer, _ = Muon(own, lr=0.02, bucket_bytes=2000), Muon(reference)
        set_gradients(own, reference, 0)
        with record_comms() as ledger:
            optimizer.step()
        expected, planned = 0, 0
        for parameter in optimizer._known().all:
            mesh = parameter.place.mesh
            if mesh is None:
                continue
            coordinate = tuple(mesh.get_coordinate())
            held = local_region(parameter.place.shape, parameter.place.placements, tuple(mesh.shape), coordinate)
            for matrix in parameter.matrices:
                mine = sum(p[0].numel for b in held.boxes if (p := b.intersect(matrix.box)) is not None)
                expected += (matrix.box.numel - mine) * 4 if matrix.owner == coordinate else mine * 2
        planned = sum(report.step_bytes for report in optimizer.parameter_reports())
        moved = sum(record.bytes for record in ledger.records if record.op == "all_to_all_v")
        assert moved == expected == planned, (moved, expected, planned)
        (flags,) = [record for record in ledger.records if record.op != "all_to_all_v"]
        assert flags.bytes <= 4 * len(cases) + 2


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bytes_equal_the_bound(ranks: RankPools, num_ranks: int) -> None:
    ranks.run(bytes_equal_the_bound, num_ranks, world_size=num_ranks)


def whole_matrices_stay() -> None:
    mesh = init_device_mesh(device_type(), (4,))
    torch.manual_seed(0)
    model = Block()
    groups = groups_of(model)
    fully_shard(model, mesh=mesh, orig_param_policy=muon_layout(model, groups))
    optimizer = Muon(groups_of(model), lr=0.02)
    assert all(report.step_bytes == 0 for report in optimizer.parameter_reports())
    loss_of(model, torch.arange(16).view(2, 8) % 10).backward()
    with record_comms() as ledger:
        optimizer.step()
    assert ledger.bytes() == 0 and not ledger.records


def test_whole_matrices_communicate_nothing(ranks: RankPools) -> None:
    ranks.run(whole_matrices_stay, world_size=4)


# Engines and checkpoints.


def trains_like_one_device(kind: Any, mesh_shape: tuple[int, ...], layout: bool) -> None:
    """With different data on each rank, accumulation and clipping; gradients differ by the order of additions only."""
    torch.manual_seed(0)
    alone = Block().double()  # eigenvectors of small eigenvalues amplify the rounding of gradients
    model = copy.deepcopy(alone)
    mesh = init_device_mesh(device_type(), mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    fully_shard(model, mesh=mesh, orig_param_policy=muon_layout(model) if layout else None)
    assert next(model.parameters()).placements[-1].local_units is not None
    optimizers = []
    for each in (model, alone):
        groups = groups_of(each)
        for group in groups:
            group["algorithm"] = {"muon": kind.algorithm}.get(group["algorithm"], group["algorithm"])
        optimizers.append(kind(groups, lr=0.01, **({"ns_dtype": torch.float32} if kind is Muon else {})))
    for step in range(4):
        ids = torch.randint(0, 40, (2, 8, 16), generator=torch.Generator().manual_seed(step))
        for number, micro in enumerate(ids):
            (loss_of(alone, micro) / 2).backward()
            own = micro.chunk(dist.get_world_size())[dist.get_rank()]
            model.set_requires_gradient_sync(number == 1)
            (loss_of(model, own) / 2).backward()
        for each, optimizer in zip((model, alone), optimizers):
            clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    for (name, parameter), expected in zip(model.named_parameters(), alone.parameters()):
        torch.testing.assert_close(whole(parameter), expected, rtol=1e-3, atol=2e-4, msg=name)


@pytest.mark.parametrize(
    "kind,mesh_shape,layout", [(Muon, (4,), False), (Muon, (2, 2), True), (Shampoo, (2, 2), False), (SOAP, (4,), False)]
)
def test_trains_like_one_device(ranks: RankPools, kind: Any, mesh_shape: tuple[int, ...], layout: bool) -> None:
    ranks.run(trains_like_one_device, kind, mesh_shape, layout, world_size=4)


KINDS: list[tuple[Any, dict[str, Any]]] = [
    (Muon, {"lr": 0.05}),
    (Shampoo, {"lr": 0.05, "max_preconditioner_dim": 7, "precondition_frequency": 2}),
    (SOAP, {"lr": 0.05, "precondition_frequency": 3}),
]


def cut(model: nn.Module, mesh: Any, dims: Any) -> None:
    """All parameters on the mesh: matrices along ``dims``, one for each axis, vectors whole."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placements = [Shard(d) if parameter.ndim > 1 and d is not None else Replicate() for d in dims]
            setattr(module, name, nn.Parameter(on_mesh(parameter.detach(), mesh, placements)))


def small_model() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Module()
    model.wide, model.tall, model.bias = nn.Linear(18, 5, bias=False), nn.Linear(4, 13), nn.Parameter(torch.randn(3))
    model.experts = nn.Parameter(torch.randn(3, 4, 6))
    return model


def optimizer_of(model: nn.Module, kind: Any, options: dict[str, Any]) -> Any:
    groups = muon_groups(model, verbose=False)
    for group in groups:
        group["algorithm"] = {"muon": kind.algorithm}.get(group["algorithm"], group["algorithm"])
    return kind(groups, **options)


def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * step + index)
        gradient = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            gradient = on_mesh(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient
    optimizer.step()


def save(folder: str, number: int, dims: Any, shape: tuple[int, ...]) -> None:
    kind, options = KINDS[number]
    model = small_model()
    if shape:
        cut(model, make_mesh(nested(shape)), dims)
    optimizer = optimizer_of(model, kind, options)
    for step in range(5):
        one_step(model, optimizer, step)
    saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=folder)


def nested(shape: tuple[int, ...]) -> Any:
    def lists(tensor: torch.Tensor) -> Any:
        return tuple(map(lists, tensor)) if tensor.ndim else int(tensor)

    return lists(torch.arange(math.prod(shape)).reshape(shape))


def load_and_go_on(folder: str, number: int, dims: Any, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    kind, options = KINDS[number]
    model = small_model()
    if shape:
        cut(model, make_mesh(nested(shape)), dims)
    optimizer = optimizer_of(model, kind, {**options, "lr": 9.0})
    states = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(states, checkpoint_id=folder)
    model.load_state_dict(states["model"])
    set_optimizer_state_dict(model, optimizer, states["optimizer"])
    for step in range(5, 10):
        one_step(model, optimizer, step)
    return {name: whole(value).detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_states_move_between_meshes(ranks: RankPools, tmp_path: Path, number: int) -> None:
    kind, options = KINDS[number]
    model = small_model()
    optimizer = optimizer_of(model, kind, options)
    for step in range(10):
        one_step(model, optimizer, step)
    expected = dict(model.named_parameters())
    # The same bits as here: on the CPU.
    ranks.run(save, str(tmp_path), number, (0, 1), (2, 2), world_size=4, device="cpu")
    for dims, shape in (((1,), (3,)), ((None,), (1,))):
        given = str(tmp_path), number, dims, shape
        for found in ranks.run(load_and_go_on, *given, world_size=math.prod(shape), device="cpu"):
            for name, value in found.items():
                assert torch.equal(value, expected[name]), (name, shape)


# Ranks that differ.


def gradients_of_other_kinds() -> None:
    """Pending sums and other placements are brought to the parameter's; ranks that differ get an error on all ranks."""
    mesh = make_mesh((0, 1, 2))
    values = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    shares = [torch.full((6, 5), n + 1.0) * values for n in range(3)]
    parameters = [nn.Parameter(on_mesh(values, mesh, [Shard(0)])) for _ in range(3)]
    twins = [nn.Parameter(values.clone()) for _ in range(3)]
    optimizer, alone = Muon(parameters, lr=0.1), Muon(twins, lr=0.1)
    parameters[0].grad = DTensor.from_local(shares[dist.get_rank()], mesh, [Partial()])
    parameters[1].grad = on_mesh(values, mesh, [Shard(1)])
    twins[0].grad, twins[1].grad = shares[0] + shares[1] + shares[2], values.clone()
    optimizer.step()
    alone.step()
    for a, b in zip(parameters, twins):
        torch.testing.assert_close(whole(a), b)
    for bad in (torch.zeros(6, 5), None):
        parameters[0].grad = bad if dist.get_rank() == 1 else on_mesh(values, mesh, [Shard(1)])
        with pytest.raises(RuntimeError, match=r"parameter 'group 0, parameter 0'"):
            optimizer.step()
    with pytest.raises(ValueError, match=r"the optimizer's.*pass the same parameters on every rank"):
        Muon(parameters[: 1 + (dist.get_rank() == 2)])
    skipping = Muon(parameters, lr=0.1, skip_nonfinite=True)
    before = [whole(p).clone() for p in parameters]
    for parameter in parameters:
        parameter.grad = on_mesh(values, mesh, [Shard(0)])
    if dist.get_rank() == 2:
        parameters[1].grad.to_local()[0, 0] = math.inf
    skipping.step()
    found = [whole(p) for p in parameters]
    assert all(map(torch.equal, found, before))


def test_gradients_of_other_kinds(ranks: RankPools) -> None:
    ranks.run(gradients_of_other_kinds, world_size=3)


def late_groups() -> None:
    """Parameters that are added later leave the owners of the others as they are."""
    own, reference = build(LINES[2][:6])
    more, others = build(LINES[2][6:])
    optimizer, alone = SOAP(own, lr=0.1), SOAP(reference, lr=0.1)
    for step in range(4):
        if step == 2:
            before = [m.owner for m in optimizer._known().matrices]
            for each, groups in ((optimizer, more), (alone, others)):
                for group in groups:
                    each.add_param_group(group)
            assert [m.owner for m in optimizer._known().matrices][: len(before)] == before
            own, reference = [*own, *more], [*reference, *others]
        set_gradients(own, reference, step)
        optimizer.step()
        alone.step()
    assert_equal(optimizer, alone)


def test_late_groups(ranks: RankPools) -> None:
    ranks.run(late_groups, world_size=2)


# What runs beside what.


def order_of_a_step() -> list[str]:
    """Events of a step with six matrices, each a bucket of its own, on two ranks."""
    from vescale.optim import _matrix_exchange as module

    events: list[str] = []

    class Watched:
        def __init__(self, pending: Any, what: str) -> None:
            self.pending, self.what = pending, what

        def wait(self) -> torch.Tensor:
            events.append(f"{self.what} ends")
            return self.pending.wait()

    start = module.all_to_all_v

    def watched(*args: Any, requester: str, **options: Any) -> Any:
        events.append(f"{requester} begins")
        return Watched(start(*args, requester=requester, **options), requester)

    def exact(matrix: torch.Tensor) -> torch.Tensor:
        events.append("compute")
        return matrix

    mesh = init_device_mesh(device_type(), (2,))
    parameters = [nn.Parameter(DTensor.from_local(torch.randn(2, 4), mesh, [Shard(0)])) for _ in range(6)]
    optimizer = Muon(parameters, orthogonalize=exact, bucket_bytes=1)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "all_to_all_v", watched)
        optimizer.step()
    return [event.replace("Muon: ", "") for event in events]


def test_a_bucket_is_computed_while_others_travel(ranks: RankPools) -> None:
    for events in ranks.run(order_of_a_step, world_size=2):
        ends = [n for n, event in enumerate(events) if event == "gather ends"]
        begins = [n for n, event in enumerate(events) if event == "gather begins"]
        scattered = [n for n, event in enumerate(events) if event == "scatter begins"]
        taken = [n for n, event in enumerate(events) if event == "scatter ends"]
        assert len(begins) == len(ends) == len(scattered) == len(taken) > 2 and "compute" in events
        for bucket in range(1, len(begins)):
            assert begins[bucket] < ends[bucket - 1]  # before the bucket in front of it is computed
            assert taken[bucket - 1] > scattered[bucket]  # after the bucket behind it has been computed
