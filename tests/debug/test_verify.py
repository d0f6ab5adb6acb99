"""``verify`` certifies what is equal, and finds planted defects, each in the module where it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.examples import NIGHTLY
from tests.plan_zoo.models import labels, model_of
from tests.ranks import RankPools
from vescale import Plan, plan_zoo
from vescale.debug import Divergence, verify
from vescale.debug._verify_job import Job, run_mesh, run_one_device
from vescale.placements import RaggedShard
from vescale.plans import MeshAxes


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def on_mesh() -> bool:
    return dist.is_initialized()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.o = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (4, 2)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.down(F.gelu(self.up(x))))


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return x * (1 + 0.1 * self.steps)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.attention, self.mlp, self.norm, self.count = Attention(), Mlp(), nn.LayerNorm(8), Counter()
        self.head = nn.Linear(8, 12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.attention(self.norm(x))
        return self.head(self.count(x + self.mlp(x)))


IDS = torch.tensor([[1, 5, 3, 7], [2, 11, 0, 4]])


def plan_of(mesh: Any) -> Plan:
    plan = (
        Plan(mesh)
        .shard(r"attention.(q|k|v).weight", Shard(0), mesh="tp")
        .shard("attention.o.weight", Shard(1), mesh="tp")
    )
    plan.shard("mlp.up.(weight|bias)", Shard(0), mesh="tp").shard("mlp.down.weight", Shard(1), mesh="tp")
    plan.shard("(attention.o|mlp.down).<out>", Replicate(), mesh="tp")
    return plan


# Each defect: a model (or plan) that is right on one device and wrong on the mesh.


class _Through(torch.autograd.Function):
    """The tensor with its forward, or its gradient, changed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Any, backward: Any) -> torch.Tensor:
        ctx.change = backward
        return forward(x) if forward is not None else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (ctx.change(grad) if ctx.change is not None else grad), None, None


def changed(path: str, forward: Any = None, backward: Any = None) -> nn.Module:
    """The module at ``path`` computes its forward or its input's gradient otherwise on a mesh."""
    model = Net()
    module = model.get_submodule(path)
    original = module.forward

    def wrong(x: torch.Tensor) -> torch.Tensor:
        if not on_mesh():
            return original(x)
        if backward is not None:
            x = _Through.apply(x, None, backward)
        y = original(x)
        return _Through.apply(y, forward, None) if forward is not None else y

    module.forward = wrong  # type: ignore[method-assign]
    return model


def local_change(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, DTensor):
            return fn(x)
        return DTensor.from_local(fn(x.to_local()), x.device_mesh, x.placements, run_check=False)

    return change


def scaled_output() -> nn.Module:
    return changed("mlp.up", forward=lambda x: x * 1.001)


def noise_on_one_rank() -> nn.Module:
    return changed("norm", forward=local_change(lambda x: x + 1e-3 * (rank() == 1)))


def averaged_twice() -> nn.Module:
    return changed("attention.q", backward=lambda g: g / 2)


def gradient_lost_on_one_rank() -> nn.Module:
    return changed("head", backward=local_change(lambda g: g * (rank() != 1)))


def gradient_of_wrong_sign() -> nn.Module:
    return changed("mlp.down", backward=lambda g: -g)


def swapped_heads() -> nn.Module:
    return changed("attention.k", forward=local_change(lambda x: x.flip(-1)))


def next_rank_s_kv_head() -> nn.Module:
    """Each rank uses the keys of its neighbour."""

    def roll(x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return parts[(rank() + 1) % len(parts)]

    return changed("attention.v", forward=local_change(roll))


def dropout_that_depends_on_the_rank() -> nn.Module:
    model = Net()
    original = model.mlp.drop.forward

    def wrong(x: torch.Tensor) -> torch.Tensor:
        if on_mesh() and rank() == 1:
            torch.rand(3)
        return original(x)

    model.mlp.drop.forward = wrong  # type: ignore[method-assign]
    return model


def other_masks() -> nn.Module:
    model = Net()
    original = model.mlp.drop.forward

    def wrong(x: torch.Tensor) -> torch.Tensor:
        y = original(x)
        return _Through.apply(y, lambda t: t.roll(1, 1), None) if on_mesh() else y

    model.mlp.drop.forward = wrong  # type: ignore[method-assign]
    return model


def numbers_drawn_in_a_norm() -> nn.Module:
    return changed("norm", forward=lambda x: (torch.rand(1), x.view_as(x))[1])


def stale_buffer() -> nn.Module:
    model = Net()
    original = model.count.forward

    def wrong(x: torch.Tensor) -> torch.Tensor:
        before = model.count.steps.clone()
        y = original(x)
        if on_mesh() and rank() == 1:
            model.count.steps = before
        return y

    model.count.forward = wrong  # type: ignore[method-assign]
    return model


def buffer_of_another_value() -> nn.Module:
    model = Net()
    if on_mesh():
        model.count.steps.fill_(1)
    return model


def parameter_of_another_value() -> nn.Module:
    model = Net()
    if on_mesh():
        with torch.no_grad():
            model.mlp.down.bias[2] += 1e-7
    return model


def another_epsilon() -> nn.Module:
    model = Net()
    if on_mesh():
        model.norm.eps = 1e-3
    return model


def bias_added_by_every_rank() -> nn.Module:
    model = Net()
    down = model.mlp.down

    def wrong(x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, down.weight)
        return y + down.bias * (2 if on_mesh() else 1)

    down.forward = wrong  # type: ignore[method-assign]
    return model


def frozen_on_the_mesh() -> nn.Module:
    model = Net()
    if on_mesh():
        model.norm.bias.requires_grad_(False)
    return model


def rows_of_another_embedding() -> nn.Module:
    return changed("embed", forward=lambda x: x.roll(1, 0))


def half_precision_inside() -> nn.Module:
    return changed("attention.o", forward=lambda x: x.bfloat16().float())


def gradient_not_reduced(mesh: Any) -> Plan:
    """Each rank's part of a sum, said to be whole: k and v's inputs get no reduction."""
    return plan_of(mesh).annotate("head.weight.grad", Partial())


def wrong_placement(mesh: Any) -> Plan:
    """Every rank's whole batch, said to be its part of a larger one."""
    return plan_of(mesh).shard("<in:ids>", Shard(0), mesh="tp", given="local")


DEFECTS: list[tuple[Any, Any, str]] = [
    (scaled_output, plan_of, "mlp.up"),
    (noise_on_one_rank, plan_of, "norm"),
    (averaged_twice, plan_of, "attention.q"),
    (gradient_lost_on_one_rank, plan_of, "head"),
    (gradient_of_wrong_sign, plan_of, "mlp.down"),
    (swapped_heads, plan_of, "attention.k"),
    (next_rank_s_kv_head, plan_of, "attention.v"),
    (dropout_that_depends_on_the_rank, plan_of, "mlp.drop"),
    (other_masks, plan_of, "mlp.drop"),
    (numbers_drawn_in_a_norm, plan_of, "norm"),
    (stale_buffer, plan_of, "count"),
    (buffer_of_another_value, plan_of, "count"),
    (parameter_of_another_value, plan_of, "mlp.down"),
    (another_epsilon, plan_of, "norm"),
    (bias_added_by_every_rank, plan_of, "mlp.down"),
    (frozen_on_the_mesh, plan_of, "norm"),
    (rows_of_another_embedding, plan_of, "embed"),
    (half_precision_inside, plan_of, "attention.o"),
    (Net, gradient_not_reduced, "head"),
    (Net, wrong_placement, "embed"),
]


def job_of(model_fn: Any, plan: Any, folder: Path) -> Job:
    steps = 2 if model_fn is stale_buffer else 1
    return Job(
        model_fn, plan, (IDS,), MeshAxes.of({"tp": 2}), None, None, steps, 0, 60.0, str(folder / model_fn.__name__)
    )


def compare_all(jobs: list[Job]) -> list[tuple[int, Divergence] | None]:
    return [run_mesh(job, rank()).divergence for job in jobs]


def test_planted_defects_are_found_in_their_modules(ranks: RankPools, tmp_path: Path) -> None:
    defects = DEFECTS if NIGHTLY else DEFECTS[::2]
    jobs = [job_of(model_fn, plan, tmp_path) for model_fn, plan, _ in defects]
    for job in {job.reference: job for job in jobs}.values():
        run_one_device(job)
    by_rank = ranks.run(compare_all, jobs, world_size=2)
    wrong = []
    for (model_fn, plan, module), *found in zip(defects, *by_rank, strict=True):
        first = min((f for f in found if f is not None), key=lambda f: (f[0], f[1].rank), default=None)
        if first is None or first[1].module != module:
            wrong.append(f"{model_fn.__name__} {plan.__name__}, in {module}: {first and first[1].text()}")
    assert not wrong, "\n".join(wrong)


def sharded_over_two_axes(mesh: Any) -> Plan:
    plan = Plan(mesh).shard("<in>", Shard(0), mesh=("dp", "ep"))
    for phase, placement in (("init", RaggedShard()), ("run", Replicate())):
        plan.shard(".*", placement, mesh=("dp", "ep"), phase=phase)
    return plan


def compare(job: Job) -> Any:
    return run_mesh(job, rank())


def test_parameters_sharded_over_two_axes(ranks: RankPools, tmp_path: Path) -> None:
    batch = (IDS.repeat(2, 1),)
    axes = MeshAxes.of({"dp": 2, "ep": 2})
    job = Job(Net, sharded_over_two_axes, batch, axes, None, None, 2, 0, 60.0, str(tmp_path / "net"))
    run_one_device(job)
    for found in ranks.run(compare, job, world_size=4):
        assert found.divergence is None, found.divergence[1].text()
        assert {"parameter", "parameter gradient", "optimizer", "loss"} <= found.counts.keys(), found.counts


def mixture() -> nn.Module:
    return model_of("mixtral").build()


def plan_of_mixture(mesh: Any) -> Plan:
    return plan_zoo.load("mixtral", mesh)


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}])
def test_values_inside_of_experts_are_a_rank_s(axes: dict[str, int], ranks: RankPools, tmp_path: Path) -> None:
    """An activation in a module of experts has the tokens of this rank, or for its experts; what they return is compared."""
    batch = {**model_of("mixtral").inputs(), "labels": labels()}
    job = Job(mixture, plan_of_mixture, batch, MeshAxes.of(axes), None, None, 1, 0, 60.0, str(tmp_path / "mixture"))
    run_one_device(job)
    for found in ranks.run(compare, job, world_size=2):
        assert found.divergence is None, found.divergence[1].text()


def test_a_defect_through_processes() -> None:
    """The whole way, with all that a person is told."""
    found = verify(gradient_lost_on_one_rank, plan_of, IDS, ["tp=2"], steps=1)
    assert not found and not found.meshes[0].error
    text = str(found)
    for part in (
        "tp=2: DIFFERENT",
        "gradient head.gradient of <in:0>",
        "on rank 1",
        "element [0, 0, 0] is 0.0",
        "of step 0",
    ):
        assert part in text, text
    divergence = found.to_json()["meshes"][0]["divergence"]
    assert divergence["module"] == "head" and divergence["rank"] == 1 and divergence["index"] == [0, 0, 0]


def test_stages_are_said_not_to_run() -> None:
    plan = Plan({"pp": 1}).pipeline(split_before=["head"], microbatches=1)
    found = verify(Net, plan, IDS, steps=1)
    assert found and "pipeline was not run" in str(found)
    assert "'pp'" in found.to_json()["meshes"][0]["note"]


def ranks_that_differ() -> nn.Module:
    torch.manual_seed(rank())
    return Net()


def test_a_job_that_fails_is_told(tmp_path: Path) -> None:
    found = verify(ranks_that_differ, plan_of, IDS, ["tp=2"], steps=1)
    assert not found and "has other values" in found.meshes[0].error, str(found)
    assert found.to_json()["meshes"][0]["verdict"] == "failed"


def test_what_verify_refuses() -> None:
    with pytest.raises(TypeError, match=r"model_fn is .* other processes cannot import"):
        verify(lambda: Net(), plan_of, IDS, ["tp=2"])
    with pytest.raises(ValueError, match="has no axis 'dp'; pass sizes of tp"):
        verify(Net, Plan({"tp": 2}), IDS, ["dp=2"])
    with pytest.raises(ValueError, match="no mesh"):
        verify(Net, plan_of, IDS)
    with pytest.raises(ValueError, match="expected at least 1"):
        verify(Net, plan_of, IDS, ["tp=2"], steps=0)


def test_equal_on_every_mesh() -> None:
    found = verify(Net, Plan({"tp": 2}), IDS, ["tp=2"], steps=1)
    assert found, str(found)
    found = verify(Net, plan_of, {"ids": IDS}, [{"tp": 2}, "tp=4"])
    assert found, str(found)
    for mesh in found.meshes:
        assert mesh.compared["dropout"] == 2 and mesh.compared["parameter"] == 13, mesh.compared
        assert 0 < max(mesh.worst.values()) < 1, mesh.worst
