"""A tape of a recorded step: models of which nobody can say in advance what their functions do are static, too."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from tests.device import device_type
from tests.ranks import RankPools
from tests.static.models import Mlp, both, compare, mesh_of, same, tp_plan
from vescale import Plan, parallelize, plan_zoo
from vescale.static import report
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
    ("name", "sizes"), [("llama", {"dp": 1, "tp": 2}), ("llama_cp", {"dp": 1, "cp": 2, "tp": 1})], ids=["tp", "cp"]
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


def other_sizes() -> str:
    """The arguments of ``view`` and slices are others in each step."""
    models = both(lambda: Net().double())
    for step in range(6):
        x = torch.randn(2 + step % 2, 3 + step, 8, generator=torch.Generator().manual_seed(step)).double()
        compare(models, x)
    return str(report(models[1]))


def test_other_sizes_stay_on_the_tape(ranks: RankPools) -> None:
    found = ranks.run(other_sizes, world_size=2)[0]
    assert found.startswith("5 static steps, 1 recordings") and "eager:" not in found


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


class Raises(Net):
    def forward(self, x: torch.Tensor) -> Any:
        if x[0, 0, 0].item() > 100:
            raise OSError("the disk is full")
        return self.mlp(x)


def exceptions(first: int) -> str:
    models = both(lambda: Raises().double(), tp_plan)
    for step in range(first + 4):
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step)).double()
        if step == first:
            for model in models:
                with pytest.raises(OSError, match="the disk is full"):
                    model(x + 1000)
        else:
            compare(models, x)
    return str(report(models[1]))


@pytest.mark.parametrize("first", [2, 4])
def test_exceptions_of_the_model_are_raised_and_it_stays_static(ranks: RankPools, first: int) -> None:
    found = ranks.run(exceptions, first, world_size=2)[0]
    assert "eager:" not in found and not found.startswith("0 static"), found


# Files and modules that change while a program runs

_MODEL = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(F.relu(self.up(x)) * 2.0)
"""


def _from_file(folder: str, text: str) -> type[nn.Module]:
    """The model, whose file has another text afterwards."""
    file = Path(folder, f"model_{torch.distributed.get_rank()}.py")
    held: dict[str, Any] = {"__name__": "model"}
    exec(compile(_MODEL, str(file), "exec"), held)
    file.write_text(text)
    made: type[nn.Module] = held["Net"]
    return made


def edited_file(folder: str) -> str:
    return _steps(_from_file(folder, _MODEL.replace("2.0", "3.0")))


def replaced_function(folder: str) -> str:
    return _steps(_from_file(folder, _MODEL), replaces=True)


def _steps(kind: type[nn.Module], replaces: bool = False) -> str:
    mesh, models = mesh_of(), []
    for mode in ("eager", "static"):
        torch.manual_seed(0)
        plan = Plan(mesh)
        plan.shard("up.(weight|bias)", Shard(0))
        plan.shard("down.weight", Shard(1))
        models.append(parallelize(kind().double(), plan, mode=mode))
    own = F.relu
    for step in range(6):
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step)).double()
        try:
            if replaces and step >= 3:
                F.relu = lambda h: torch.softmax(h, -1)  # type: ignore[assignment]
            compare((models[0], models[1]), x)
        finally:
            F.relu = own  # type: ignore[assignment]
    return str(report(models[1]))


def test_a_constant_is_edited_after_the_import(ranks: RankPools, tmp_path: Path) -> None:
    ranks.run(edited_file, str(tmp_path), world_size=2)


def test_a_function_of_a_module_is_replaced(ranks: RankPools, tmp_path: Path) -> None:
    found = ranks.run(replaced_function, str(tmp_path), world_size=2)[0]
    assert "softmax was not recorded at this place" in found


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


class Alternates(Net):
    """Two ways, which take turns, as two losses do."""

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(self.mlp(x)) if x[0, 0, 0].item() > 0 else self.mlp(x)


def alternating() -> str:
    models = both(lambda: Alternates().double())
    for step in range(8):
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step)).double()
        x[0, 0, 0] = (-1) ** step
        compare(models, x)
    return str(report(models[1]))


def test_two_ways_have_two_tapes(ranks: RankPools) -> None:
    for found in ranks.run(alternating, world_size=2):
        assert found.startswith("6 static steps, 2 recordings"), found


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


class Catches(Net):
    """The model raises an error, catches it, and goes on."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.mlp(x)
        try:
            h = h.view(-1, 5) if x[0, 0, 0].item() > 100 else h
        except RuntimeError:
            h = h * 3
        return h


def caught_errors() -> str:
    models = both(lambda: Catches().double())
    for step in range(6):
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step)).double()
        if step == 3:
            x = x + 1000
        compare(models, x)
    return str(report(models[1]))


def test_an_error_that_the_model_catches(ranks: RankPools) -> None:
    for found in ranks.run(caught_errors, world_size=2):
        assert "was not recorded at this place" in found and not found.startswith("0 static"), found


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
