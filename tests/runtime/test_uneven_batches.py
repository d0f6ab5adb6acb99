"""Batches and sequences that the ranks do not divide, in strict mode against one device: gradients, collectives and bytes.

Ranks are simulated: each step runs on up to eight of them in this process.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.device import device_type
from tests.plan_zoo.models import _DECODER, _GPT2, _WHISPER, _model, tokens
from tests.ranks import RankPools
from tests.runtime.hf import quiet
from tests.simulate import simulate
from tests.whole import whole, whole_tensors
from vescale import Plan, parallelize, plan_zoo
from vescale.comm import CommRecord, record_comms
from vescale.placements import InterleavedShard
from vescale.plans import PlanError
from vescale.runtime import ImplicitCommunicationError, implicit_communication

R, S0, S1 = Replicate(), Shard(0), Shard(1)
WIDTH, HIDDEN, CLASSES = 6, 12, 11
Objective = Callable[[nn.Module, Mapping[str, torch.Tensor], torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Layers on three dims, flattened tokens, a chunk of packed features, a mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(CLASSES, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN // 2, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        words = self.norm(x).reshape(-1, WIDTH)  # as routers of experts and Conv1D do
        gate, up = self.up(words).chunk(2, dim=-1)
        x = x + self.down(F.silu(gate) * up).view(x.shape)
        scores = self.head(x)
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=0.1)
        return loss + x.square().mean() + scores.logsumexp(-1).square().sum() / 100


class SequenceParallel(nn.Module):
    """``up`` and ``down`` work on a cut sequence themselves: nothing is gathered before them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.down(F.gelu(self.up(self.norm(x))))
        return (y.flatten(0, 1).square() * torch.arange(1.0, 1 + WIDTH, dtype=x.dtype)).mean()


def check(
    model: nn.Module,
    sizes: Mapping[str, int],
    make_plan: Callable[[DeviceMesh], Plan],
    objective: Callable[[nn.Module], torch.Tensor],
) -> list[CommRecord]:
    """The communication of a step in strict mode that has one device's loss and gradients within 1e-12."""
    expected_model, model = copy.deepcopy(model), copy.deepcopy(model)
    mesh = init_device_mesh(device_type(), tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    parallelize(model, make_plan(mesh), strict=True)
    expected = objective(expected_model)
    expected.backward()
    with record_comms() as ledger:
        found: Any = objective(model)
        found.backward()
    assert abs(found.detach().full_tensor() - expected) <= 1e-12 * abs(expected)
    gradients: Any = whole_tensors({name: own.grad for name, own in model.named_parameters()})
    for (name, own), other in zip(model.named_parameters(), expected_model.parameters(), strict=True):
        if other.grad is None:
            assert own.grad is None, name
            continue
        assert isinstance(own.grad, DTensor) and own.grad.placements == own.placements, name
        difference = (gradients[name] - other.grad).abs().max()
        assert difference <= 1e-12 * max(float(other.grad.abs().max()), 1e-6), (name, difference)
    assert not implicit_communication(model)
    return ledger.records


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


def labeled(batch: int, length: int, classes: int = CLASSES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch + 10 * length)
    ids, labels = (torch.randint(0, classes, (batch, length), generator=generator) for _ in range(2))
    labels[0, length // 2 + 1 :] = -100
    return ids, labels


@pytest.mark.parametrize(
    ("ranks", "batch", "length"),
    [(2, 5, 7), (2, 1, 7), (2, 1, 1), (4, 3, 5), (4, 5, 3), (3, 4, 2), pytest.param(8, 3, 9, marks=pytest.mark.slow)],
)
def test_batches(ranks: int, batch: int, length: int) -> None:
    """All that moves are the sums of the loss and the gradients."""
    model, (ids, labels) = seeded(Net), labeled(batch, length)
    gradients = sum(p.numel() for p in model.parameters()) * 8
    plan = lambda mesh: Plan(mesh).shard("<in>", S0, mesh="dp")  # noqa: E731
    for records in simulate(check, ranks, model, {"dp": ranks}, plan, lambda m: m(ids, labels)):
        buckets = [r for r in records if ".grad" in r.requester]
        assert {r.op for r in records} == {"all_reduce"}
        assert sum(r.bytes for r in buckets) <= 2 * gradients * (ranks - 1) / ranks + 64
        assert all(r.bytes <= 8 * 8 for r in records if r not in buckets), records


class LastToken(nn.Module):
    """As models that generate take it, by a list or a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor, by_list: bool) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(x[:, [-1], :] if by_list else x[torch.arange(len(ids)) > 0])


def _last_token(model: nn.Module, ids: torch.Tensor, by_list: bool) -> None:
    model, ids = model.to(device_type()), ids.to(device_type())
    with torch.no_grad():
        expected = model(ids, by_list)
        mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
        plan = Plan(mesh).shard("<in:ids>", S0, mesh="dp").shard("<out>", R, mesh="dp")
        found = parallelize(copy.deepcopy(model), plan, strict=by_list)(ids, by_list)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("by_list", [True, False])
def test_indices(batch: int, by_list: bool, ranks: RankPools) -> None:
    """A list of another dim moves nothing, also where a rank has no rows; what a mask takes is gathered."""
    ranks.run(_last_token, seeded(LastToken), labeled(batch, 4)[0], by_list, world_size=2)


def _refused(model: nn.Module, ids: torch.Tensor) -> str:
    model, ids = model.to(device_type()), ids.to(device_type())
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    with pytest.raises(ImplicitCommunicationError) as raised, torch.no_grad():
        parallelize(model, Plan(mesh).shard("<in:ids>", S0, mesh="dp"), strict=True)(ids, False)
    return str(raised.value)


def test_an_operand_without_elements_is_not_taken_for_another(ranks: RankPools) -> None:
    """The input of the model has none on that rank, either."""
    first, second = ranks.run(_refused, seeded(LastToken), labeled(1, 4)[0], world_size=2)
    assert "the output of 'embed'" in first and "input 0" not in second, (first, second)


def _rows_of_each_rank(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> None:
    model, ids, labels = (x.to(device_type()) for x in (model, ids, labels))

    def objective(m: nn.Module) -> torch.Tensor:
        rows = slice(None)
        if isinstance(next(m.parameters()), DTensor):
            rows = slice(0, 3) if dist.get_rank() == 0 else slice(3, 5)
        return m(ids[rows], labels[rows])

    records = check(model, {"dp": 2}, lambda mesh: Plan(mesh).shard("<in>", S0, mesh="dp", given="local"), objective)
    assert {r.op for r in records} == {"all_reduce"}


def test_parts_that_ranks_give(ranks: RankPools) -> None:
    """On processes, which wait for each other and so know the sizes of all parts."""
    ranks.run(_rows_of_each_rank, seeded(Net), *labeled(5, 3), world_size=2)


def test_sizes_that_from_local_is_given() -> None:
    """Stock ``from_local`` keeps them as they are: a tuple has no ``numel``."""
    simulate(_view_of_given_sizes, 3, nn.Linear(3, 3))


def _view_of_given_sizes(linear: nn.Module) -> None:
    mesh = init_device_mesh(device_type(), (3,), mesh_dim_names=("dp",))
    model = parallelize(copy.deepcopy(linear), Plan(mesh).shard("<in>", S0, mesh="dp"))
    x = torch.arange(48.0).view(16, 3)
    placed = DTensor.from_local(x.chunk(3)[dist.get_rank()], mesh, [S0], shape=(16, 3), stride=(3, 1))
    expected = linear(x).flatten()
    torch.testing.assert_close(model(placed).flatten().full_tensor(), expected)
    torch.testing.assert_close(placed.flatten().full_tensor(), x.flatten())


@pytest.mark.parametrize(
    ("sizes", "batch", "length"),
    [
        ({"tp": 2}, 2, 7),
        ({"tp": 4}, 3, 5),
        ({"tp": 4}, 2, 3),
        ({"dp": 2, "tp": 2}, 5, 7),
        ({"tp": 2, "dp": 2}, 5, 7),
        ({"dp": 2, "tp": 2}, 1, 3),
        ({"dp": 2, "tp": 2}, 3, 4),
        pytest.param({"dp": 3, "tp": 2}, 4, 5, marks=pytest.mark.slow),
    ],
)
def test_linear_on_a_cut_sequence(sizes: dict[str, int], batch: int, length: int) -> None:
    model = seeded(SequenceParallel)
    x = torch.randn(batch, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def plan(mesh: DeviceMesh) -> Plan:
        found = Plan(mesh).shard("<in>", S1, mesh="tp")
        return found.shard("<in>", S0, mesh="dp") if "dp" in sizes else found

    num_ranks = sizes["tp"] * sizes.get("dp", 1)
    for records in simulate(check, num_ranks, model, sizes, plan, lambda m: m(x)):
        assert Counter(r.op for r in records if ".grad" not in r.requester) <= Counter(all_reduce=len(sizes)), records


@pytest.mark.parametrize("length", [3, 6])
def test_runs_of_one_token(length: int) -> None:
    """Of a sequence in as many runs as it has tokens the first rank has all, and the second none. Only sums are moved."""
    model = seeded(SequenceParallel)
    x = torch.randn(3, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plan = lambda mesh: Plan(mesh).shard("<in>", InterleavedShard(1, length), mesh="cp")  # noqa: E731
    for records in simulate(check, 2, model, {"cp": 2}, plan, lambda m: m(x)):
        assert Counter(r.op for r in records if ".grad" not in r.requester) <= Counter(all_reduce=1), records


HF: dict[str, Callable[[], nn.Module]] = {
    "llama": _model("LlamaForCausalLM", _DECODER),
    "gpt2": _model(
        "GPT2LMHeadModel", {**_GPT2, "vocab_size": 65, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    ),
    "whisper": _model("WhisperForConditionalGeneration", {**_WHISPER, "vocab_size": 67}),
}
# Beside the gradients: what sequences that the ranks divide cost, see tests/plan_zoo/test_training.py.
COUNTS = {
    "llama": {"reduce_scatter_v": 10, "all_gather_v": 10, "all_to_all_v": 2},
    "gpt2": {"reduce_scatter_v": 10, "all_gather_v": 10},
    "whisper": {"reduce_scatter_v": 23, "all_gather_v": 24},
}


def hf_inputs(name: str, batch: int, length: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    ids, labels = tokens(batch, length), tokens(batch, length, seed=2)
    labels[0, length // 2 + 1 :] = -100
    if name != "whisper":
        return {"input_ids": ids}, labels
    audio = torch.randn(batch, 8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return {"input_features": audio, "decoder_input_ids": ids}, labels


@pytest.mark.parametrize(
    ("name", "sizes", "batch", "length"),
    [
        ("llama", {"dp": 2, "tp": 2}, 5, 7),
        ("llama", {"dp": 2, "tp": 1}, 1, 8),
        ("llama", {"dp": 1, "tp": 4}, 2, 3),
        ("gpt2", {"dp": 2, "tp": 2}, 5, 7),
        ("gpt2", {"dp": 4, "tp": 1}, 3, 7),
        ("whisper", {"dp": 2, "tp": 2}, 5, 7),
        ("whisper", {"dp": 2, "tp": 1}, 1, 8),
        pytest.param("gpt2", {"dp": 1, "tp": 4}, 2, 3, marks=pytest.mark.slow),
        pytest.param("whisper", {"dp": 1, "tp": 4}, 2, 3, marks=pytest.mark.slow),
    ],
)
def test_hugging_face_models(name: str, sizes: dict[str, int], batch: int, length: int) -> None:
    pytest.importorskip("transformers")
    quiet()
    model, (inputs, labels) = seeded(HF[name]), hf_inputs(name, batch, length)

    def objective(m: nn.Module) -> torch.Tensor:
        logits = m(**inputs).logits
        return F.cross_entropy(logits.flatten(0, -2), labels.reshape(-1), ignore_index=-100)

    load = lambda mesh: plan_zoo.load(name, mesh)  # noqa: E731
    for records in simulate(check, sizes["dp"] * sizes["tp"], model, sizes, load, objective):
        found = Counter(r.op for r in records if ".grad" not in r.requester and r.op != "all_reduce")
        assert found == (COUNTS[name] if sizes["tp"] > 1 else {}), found


class Tied(nn.Module):
    def __init__(self, rows: int, smoothing: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(rows, WIDTH), nn.Linear(WIDTH, rows, bias=False)
        self.head.weight = self.embed.weight
        self.smoothing = smoothing

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(torch.tanh(self.embed(ids))).flatten(0, 1)
        return F.cross_entropy(scores, labels.view(-1), ignore_index=-100, label_smoothing=self.smoothing)


@pytest.mark.parametrize(
    ("rows", "sizes", "smoothing"),
    [
        (19, {"tp": 8}, 0.1),  # the last rank holds none
        (19, {"dp": 2, "tp": 4}, 0.1),
        (50_257, {"tp": 8}, 0.1),  # GPT-2's
        (51_865, {"tp": 3}, 0.0),  # Whisper's
        *(
            pytest.param(rows, {"tp": ranks}, smoothing, marks=pytest.mark.slow)
            for rows in (50_257, 51_865)
            for ranks in (2, 3, 8)
            for smoothing in (0.0, 0.1)
            if (rows, ranks, smoothing) not in ((50_257, 8, 0.1), (51_865, 3, 0.0))
        ),
    ],
)
def test_vocabularies(rows: int, sizes: dict[str, int], smoothing: float) -> None:
    """A batch of three; ids and labels at both ends of every rank's rows, some labels ignored. What moves are sums of
    numbers a token, never the logits or the table."""
    model, (ids, labels) = seeded(lambda: Tied(rows, smoothing)), labeled(3, 7, rows)
    step = -(-rows // sizes["tp"])
    ends = torch.tensor([min(r, rows - 1) for at in range(0, rows, step) for r in (at, at + step - 1)])
    ids.view(-1)[: len(ends)] = ends
    labels.view(-1)[-len(ends) :] = ends.flip(0)
    labels[1, 2] = -100

    def plan(mesh: DeviceMesh) -> Plan:
        found = Plan(mesh).shard("embed.weight", S0, mesh="tp").shard("embed.<out>", R, mesh="tp")
        found.shard("head.<in>", R, mesh="tp")
        return found.shard("<in>", S0, mesh="dp") if "dp" in sizes else found

    for records in simulate(check, 8 if "dp" in sizes else sizes["tp"], model, sizes, plan, lambda m: m(ids, labels)):
        assert {r.op for r in records} <= {"all_reduce"}, records
        assert sum(r.bytes for r in records if ".grad" not in r.requester) <= 2 * 8 * ids.numel() * (2 * WIDTH + 6)


class Regional(nn.Module):
    def __init__(self, flattens: bool) -> None:
        super().__init__()
        self.up, self.inside, self.down = nn.Linear(WIDTH, HIDDEN), Inside(flattens), nn.Linear(HIDDEN, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.inside(self.up(x))).square().mean()


class Inside(nn.Module):
    def __init__(self, flattens: bool) -> None:
        super().__init__()
        self.linear, self.flattens = nn.Linear(HIDDEN, HIDDEN), flattens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.flatten(0, 1) if self.flattens else x).tanh()


def of_local_regions(model: nn.Module, batch: int, flattens: bool) -> None:
    x = torch.linspace(-1, 1, batch * 3 * WIDTH, dtype=torch.float64).view(batch, 3, WIDTH)
    plan = lambda mesh: Plan(mesh).shard("<in>", S0, mesh="dp").local("inside", inputs=S0, outputs=S0)  # noqa: E731
    size = torch.distributed.get_world_size()
    if flattens and batch % size:
        with pytest.raises(PlanError, match=r"local region 'inside'.*the global size is not known"):
            check(model, {"dp": size}, plan, lambda m: m(x))
    else:
        check(model, {"dp": size}, plan, lambda m: m(x))


@pytest.mark.parametrize(
    ("ranks", "batch", "flattens"), [(2, 5, False), (4, 5, False), (2, 1, False), (2, 4, True), (2, 5, True)]
)
def test_local_regions(ranks: int, batch: int, flattens: bool) -> None:
    """How large an output is, is known from the parts of the inputs; nothing is communicated for it."""
    simulate(of_local_regions, ranks, seeded(lambda: Regional(flattens)), batch, flattens)


def _views_of_rows(sizes: dict[str, int], rows: int) -> tuple[list[str], int]:
    """Views of rows that all axes cut: those that are wrong, and the number of collectives."""
    mesh = init_device_mesh(device_type(), tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    parallelize(nn.Identity(), Plan(mesh))
    values = torch.arange(rows * 24.0).reshape(rows, 4, 6)
    x = distribute_tensor(values, mesh, [S0] * mesh.ndim, src_data_rank=None)
    shapes = ((rows * 4, 6), (rows * 24,), (rows, 24), (rows * 2, 2, 6), (rows, 2, 2, 6))
    with record_comms() as moved:
        views = [x.view(shape) for shape in shapes]
    return [str(v.placements) for v in views if not torch.equal(whole(v), values.view(v.shape))], len(moved.records)


@pytest.mark.parametrize("sizes, rows", [({"dp": 1, "tp": 2}, 5), ({"dp": 2, "tp": 2}, 6), ({"dp": 1, "tp": 3}, 7)])
def test_views_of_rows_that_several_axes_cut(sizes: dict[str, int], rows: int) -> None:
    """PyTorch compares the rows with each axis for itself, and asked the ranks for parts that they do not have."""
    assert all(found == ([], 0) for found in simulate(_views_of_rows, math.prod(sizes.values()), sizes, rows))


@pytest.mark.parametrize("sizes, batch", [({"dp": 1, "ep": 2}, 5), ({"dp": 2, "ep": 2}, 6)])
def test_batches_that_two_axes_cut(sizes: dict[str, int], batch: int) -> None:
    model, (ids, labels) = seeded(Net), labeled(batch, 3)
    plan = lambda mesh: Plan(mesh).shard("<in>", S0, mesh="dp").shard("<in>", S0, mesh="ep")  # noqa: E731
    for records in simulate(check, math.prod(sizes.values()), model, sizes, plan, lambda m: m(ids, labels)):
        assert {r.op for r in records} == {"all_reduce"}
