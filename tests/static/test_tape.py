"""A tape of a recorded step: models of which nobody can say in advance what their functions do are static, too."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.device import device_type
from tests.ranks import RankPools
from tests.static.models import Mlp, both, compare, mesh_of, same
from vescale import Plan, parallelize, plan_zoo
from vescale.errors import StaticStepError
from vescale.static import report
from vescale.static._gradients import shown_local
from vescale.static._program import TapeProgram

pytestmark = pytest.mark.helper("tape")


def _llama(heads: int = 4) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, head_dim=8, intermediate_size=64, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=heads, vocab_size=64, max_position_embeddings=64,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.double()


def llama_with_labels(name: str, sizes: dict[str, int]) -> str:
    """As scripts and trainers call it."""
    mesh = init_device_mesh(device_type(), tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    models = [parallelize(_llama(), plan_zoo.load(name, mesh), mode=mode) for mode in ("eager", "static")]
    for step in range(6):
        ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(step))
        outputs = []
        for model in models:
            model.zero_grad()
            outputs.append(model(input_ids=ids, labels=ids, use_cache=False))
            outputs[-1].loss.backward()
        assert same(outputs[0].loss, outputs[1].loss) and same(outputs[0].logits, outputs[1].logits), step
        for (parameter, p), (_, q) in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
            assert same(p.grad, q.grad), (step, parameter, str(report(models[1])))
    return str(report(models[1]))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("llama", {"dp": 1, "tp": 2}), ("llama_cp", {"dp": 1, "cp": 2, "tp": 1}), ("llama_zero3", {"dp": 2, "tp": 1})],
    ids=["tp", "cp", "zero3"],
)
def test_llama_with_labels_is_static(ranks: RankPools, name: str, sizes: dict[str, int]) -> None:
    for found in ranks.run(llama_with_labels, name, sizes, world_size=2):
        assert found.startswith("5 static steps, 1 recordings"), found
        assert "eager:" not in found


class Net(nn.Module):
    """What is cut decides about ``shape``, which no call in the source names."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> Any:
        return self.mlp(x)


def released_late() -> str:
    """A thread of gloo that releases a tensor on rank 1, which it has reduced, has no turn for a while."""
    asked, found = [], TapeProgram._kept
    models = both(lambda: Net().double())

    def kept(program: TapeProgram) -> list[tuple[int, torch.Tensor]]:
        asked.append(program.steps)
        is_late = dist.get_rank() == 1 and program.steps == 1 and asked.count(1) < 4
        return [(0, torch.ones(1))] if is_late else found(program)

    TapeProgram._kept = kept  # type: ignore[method-assign]
    try:
        for step in range(5):
            compare(models, torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(step)).double())
    finally:
        TapeProgram._kept = found  # type: ignore[method-assign]
    assert dist.get_rank() == 0 or asked.count(1) == 4, asked
    return str(report(models[1]))


def test_a_tensor_that_is_about_to_be_released_is_not_kept(ranks: RankPools) -> None:
    """The rank ran the step again in eager mode, with collectives in which no other rank took part."""
    for found in ranks.run(released_late, world_size=2):
        assert "eager:" not in found, found


class Sliced(nn.Module):
    """A slice with the same numbers in each step, of a dim that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :4] * self.scale


def slices() -> str:
    mesh = mesh_of()
    models = []
    for mode in ("eager", "static"):
        plan = Plan(mesh)
        plan.shard("<in:x>", Shard(1))
        models.append(parallelize(Sliced().double(), plan, mode=mode))
    for step, length in enumerate((4, 4, 4, 8, 4, 6)):
        compare(
            (models[0], models[1]), torch.randn(2, length, 8, generator=torch.Generator().manual_seed(step)).double()
        )
    return str(report(models[1]))


def test_equal_numbers_mean_other_things_where_sizes_differ(ranks: RankPools) -> None:
    """Half of the first four rows is on each rank; of eight, all four are on the first one."""
    found = ranks.run(slices, world_size=2)[0]
    assert "__getitem__ gets different arguments" in found, found


def freed_model() -> bool:
    models = both(lambda: Net().double())
    for step in range(4):
        compare(models, torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step)).double())
    assert report(models[1]).static_steps == 3
    held = weakref.ref(models[1])
    del models
    gc.collect()
    return held() is None


def test_a_tape_does_not_keep_its_model(ranks: RankPools) -> None:
    assert all(ranks.run(freed_model, world_size=2))


class LeavesGarbage(Net):
    """Its activations are in a cycle that ends with the forward."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.mlp(x)
        held: list[Any] = [h * 2]
        held.append(held)
        return h


def garbage() -> str:
    models = both(lambda: LeavesGarbage().double())
    gc.disable()
    try:
        for step in range(5):
            compare(models, torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step)).double())
    finally:
        gc.enable()
    return str(report(models[1]))


def test_what_only_a_cycle_of_garbage_holds_is_not_kept(ranks: RankPools) -> None:
    for found in ranks.run(garbage, world_size=2):
        assert found.startswith("4 static steps, 1 recordings") and "eager:" not in found, found


def later_loss() -> str:
    """An auxiliary loss that is turned on later, in the forward."""

    class Auxiliary(Net):
        has_loss = False

        def forward(self, x: torch.Tensor) -> Any:
            h = self.mlp(x)
            return h.square().mean() + (0.1 * h.abs().mean() if self.has_loss else 0.0)

    models = both(lambda: Auxiliary().double())
    for step in range(8):
        for model in models:
            model.has_loss = step >= 4
        compare(models, torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step)).double())
    return str(report(models[1]))


def test_an_auxiliary_loss_that_comes_later(ranks: RankPools) -> None:
    for found in ranks.run(later_loss, world_size=2):
        assert found.startswith("6 static steps, 2 recordings"), found


class ReturnsWritten(Net):
    """A tensor that is written to, in an object of the output, as caches of convolutions are."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.mlp(x)
        state = torch.zeros_like(h[:, 0])
        state.copy_(h[:, -1])
        return h, SimpleNamespace(states={0: state})


def written_outputs() -> str:
    models = both(lambda: ReturnsWritten().double())
    for step in range(5):
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step)).double()
        (eager, kept), (static, kept_too) = (model(x) for model in models)
        assert same(eager, static) and same(kept.states[0], kept_too.states[0]), step
        for y in (eager, static):
            y.sum().backward()
    return str(report(models[1]))


def test_an_output_that_was_written_to(ranks: RankPools) -> None:
    for found in ranks.run(written_outputs, world_size=2):
        assert found.startswith("4 static steps, 1 recordings") and "eager:" not in found, found


def other_meshes() -> None:
    """A model that is given DTensors of another mesh: an equal one is as good, ranks in another order are not."""
    models = both(lambda: Net())
    meshes = [init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",)) for _ in range(2)]

    meshes.append(DeviceMesh(device_type(), [1, 0], mesh_dim_names=("tp",)))
    results: list[list[str]] = []
    for mesh in meshes:
        found = []
        for model in models:
            try:
                for _ in range(2):
                    model(
                        DTensor.from_local(torch.randn(2, 4, 8), mesh, [Replicate()], run_check=False)
                    ).square().mean().backward()
                found.append("ran")
            except Exception as problem:
                found.append(type(problem).__name__)
        results.append(found)
    assert all(one[0] == one[1] for one in results) and results[0] == ["ran", "ran"], results


def test_dtensors_of_other_meshes(ranks: RankPools) -> None:
    ranks.run(other_meshes, world_size=2)


class Appends(Net):
    def forward(self, x: torch.Tensor, held: Any) -> torch.Tensor:  # type: ignore[override]
        held["h"] = self.mlp.up(x)
        return self.mlp.down(held["h"])


def written_containers() -> str:
    models = both(Appends)
    for _ in range(3):
        given: list[Any] = [{}, {}]
        x = torch.randn(2, 4, 8)
        for model, held in zip(models, given, strict=True):
            model(x, held).square().mean().backward()
        assert same(given[0]["h"], given[1]["h"])
    return str(report(models[1]))


def test_an_input_that_the_forward_adds_to(ranks: RankPools) -> None:
    assert "changes what an input holds" in ranks.run(written_containers, world_size=2)[0]


def missing_gradients() -> None:
    weight: Any = both(Net)[1].get_parameter("mlp.down.weight")
    with pytest.raises(StaticStepError, match="the parameter weight"):
        shown_local(weight, None, "weight").tensor.sum().backward()


def test_a_later_gradient_is_not_lost(ranks: RankPools) -> None:
    ranks.run(missing_gradients, world_size=2)
