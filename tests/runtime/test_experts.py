"""Regions of experts against one device: cut by expert, by features, with a batch over dp, with experts nobody chose."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tests.examples import NIGHTLY, daily_sample
from tests.ranks import RankPools, run_cases
from tests.runtime.compare import assert_same_step, pair
from tests.whole import whole
from vescale.comm import record_comms
from vescale.placements import InterleavedShard
from vescale.plans import Plan, PlanError


class Experts(nn.Module):
    """Stacked gate and up, as in transformers; ``separate``: one module an expert, unused ones without a gradient."""

    def __init__(self, separate: bool) -> None:
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj = nn.Parameter(torch.randn(4, 2 * 6, 8))
        self.down_proj = nn.Parameter(torch.randn(4, 8, 6))
        self.separate = separate

    def forward(self, hidden_states: torch.Tensor, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, slot = (top_k_index == expert).nonzero(as_tuple=True)
            if self.separate and len(token) == 0:
                continue
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            found = F.linear(F.silu(gate) * up, self.down_proj[expert])
            out = out.index_add(0, token, found * top_k_weights[token, slot, None])
        return out


class Mixture(nn.Module):
    def __init__(self, favourite: int | None, separate: bool) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = Experts(separate)
        self.favourite = favourite

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, 8)
        logits = self.router(flat)
        if self.favourite is not None:  # every token chooses this expert and the one after it
            logits = logits + 100 * F.one_hot(torch.tensor([self.favourite, self.favourite + 1]), 4).sum(0)
        weights, index = torch.topk(logits.softmax(-1), 2, dim=-1)
        return self.experts(flat, index, weights).reshape(x.shape)


def entries(cut: str, dispatch: str = "mask", tokens: str = "whole") -> Any:
    """``tokens``: how they lie on ep: ``whole`` on every rank, or their ``sequence`` sharded."""

    def add(plan: Plan) -> None:
        if "dp" in plan.axes:
            plan.shard("<in:x>", Shard(0), mesh="dp")
        plan.local("experts", kind="experts", dispatch=dispatch if cut == "experts" else None)
        if cut == "experts":
            plan.shard("experts.(gate_up|down)_proj", Shard(0), mesh="ep")
        elif cut == "features":
            plan.shard("experts.gate_up_proj", InterleavedShard(1, 2), mesh="ep")
            plan.shard("experts.down_proj", Shard(2), mesh="ep")
        if tokens == "sequence":
            plan.shard("<in:x>", Shard(1), mesh="ep")
            return
        plan.shard("<in:x>", Replicate(), mesh="ep")
        plan.shard("experts.<in>", Replicate(), mesh="ep")
        plan.shard("experts.<out>", Replicate(), mesh="ep")

    return add


def step(cut: str, dispatch: str, tokens: str, sizes: dict[str, int], favourite: int | None, separate: bool) -> None:
    reference, model = pair(lambda: Mixture(favourite, separate), entries(cut, dispatch, tokens), sizes)
    length = 8 if tokens == "sequence" else 7
    for seed in (5, 6):
        x = torch.randn(2, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert_same_step(reference, model, x, tolerance=1e-10)
    assert model.get_submodule("experts").num_experts == 4
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if favourite == 0 and "experts" in name:
            assert whole(parameter.grad)[:2].any() and not whole(parameter.grad)[2:].any()


CASES = [
    (*how, sizes, favourite, separate)
    for how in (
        ("experts", "mask", "whole"),
        ("experts", "all_to_all", "whole"),
        ("experts", "all_to_all", "sequence"),
        ("experts", "mask", "sequence"),
        ("features", "mask", "whole"),
        ("features", "mask", "sequence"),
        ("whole", "mask", "whole"),
    )
    for favourite, separate in ((None, False), (0, True), (2, True))
    for sizes in ({"ep": 2}, {"dp": 2, "ep": 2}, {"ep": 4})
]


def run_all(world_size: int) -> int:
    chosen = [c for c in CASES if world_size == torch.tensor(list(c[3].values())).prod()]
    # three features a rank and piece do not go over four ranks
    return run_cases(step, daily_sample(c for c in chosen if not (c[0] == "features" and c[3]["ep"] == 4)))


@pytest.mark.parametrize(("world_size", "num_cases", "num_daily"), [(2, 21, 6), (4, 36, 9)])
def test_step_equals_one_device(ranks: RankPools, world_size: int, num_cases: int, num_daily: int) -> None:
    assert set(ranks.run(run_all, world_size, world_size=world_size)) == {num_cases if NIGHTLY else num_daily}


class BiasedExperts(nn.Module):
    """As in GPT-OSS: transposed weights, gate and up in turns, biases; batched, arguments in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj = nn.Parameter(torch.randn(4, 8, 16))
        self.gate_up_proj_bias = nn.Parameter(torch.randn(4, 16))
        self.down_proj = nn.Parameter(torch.randn(4, 8, 8))
        self.down_proj_bias = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: torch.Tensor, weights: Any, ids: Any) -> torch.Tensor:
        pairs = x.unsqueeze(-2).unsqueeze(-2).expand(*ids.shape, 1, x.shape[-1])
        both = (pairs @ self.gate_up_proj[ids]).squeeze(-2) + self.gate_up_proj_bias[ids]
        hidden = F.silu(both[..., ::2]) * both[..., 1::2]
        out = (hidden.unsqueeze(-2) @ self.down_proj[ids]).squeeze(-2) + self.down_proj_bias[ids]
        return (out * weights.unsqueeze(-1)).sum(-2)


class SeparateExperts(nn.ModuleList):
    """One module an expert, with biases, all in one list."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)) for _ in range(4))

    def forward(self, x: torch.Tensor, weights: Any, ids: Any) -> torch.Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self):
            *where, slot = (ids == number).nonzero(as_tuple=True)
            out = out.index_put(
                tuple(where), expert(x[tuple(where)]) * weights[(*where, slot)][:, None], accumulate=True
            )
        return out


class Unflattened(nn.Module):
    """Tokens keep their batch and sequence dims."""

    def __init__(self, experts: type[nn.Module]) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = torch.topk(self.router(x).softmax(-1), 2, dim=-1)
        return x + self.experts(x, weights, ids=ids)


def biased_entries(roles: dict[str, str], tokens: dict[str, Any], dispatch: str, separate: bool) -> Any:
    """``roles``: what each axis does to the experts: ``experts``, ``features`` or ``data``."""

    def add(plan: Plan) -> None:
        plan.local("experts", kind="experts", dispatch=dispatch)
        plan.shard("<in:x>", tokens)
        for axis, role in roles.items():
            if role == "experts":
                plan.shard("experts.*", Shard(0), mesh=axis)
            if role == "features" and separate:
                plan.shard(r"experts.\d+.0.(weight|bias)", Shard(0), mesh=axis)
                plan.shard(r"experts.\d+.2.weight", Shard(1), mesh=axis)
            elif role == "features":
                plan.shard("experts.gate_up_proj", Shard(2), mesh=axis)
                plan.shard("experts.(gate_up_proj_bias|down_proj)", Shard(1), mesh=axis)
            if role != "data" and tokens[axis] == Replicate():
                plan.shard("experts.<in>", Replicate(), mesh=axis)
                plan.shard("experts.<out>", Replicate(), mesh=axis)

    return add


def biased(roles: dict[str, str], tokens: dict[str, Any], dispatch: str, separate: bool) -> None:
    sizes = dict.fromkeys(roles, 2)
    build = SeparateExperts if separate else BiasedExperts
    add = biased_entries(roles, tokens, dispatch, separate)
    reference, model = pair(lambda: Unflattened(build), add, sizes)
    for seed in (5, 6):
        x = torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert_same_step(reference, model, x, tolerance=1e-10)


S0, S1, R = Shard(0), Shard(1), Replicate()
BIASED = [
    ({"tp": "features"}, {"tp": R}, "mask", False),
    ({"tp": "features"}, {"tp": S1}, "mask", False),
    ({"tp": "features"}, {"tp": R}, "mask", True),
    ({"ep": "experts"}, {"ep": R}, "mask", False),
    ({"ep": "experts"}, {"ep": S1}, "all_to_all", False),
    ({"ep": "experts"}, {"ep": R}, "all_to_all", False),
    ({"dp": "data", "tp": "features"}, {"dp": S0, "tp": R}, "mask", True),
    # experts over the axis of the batch; over that and the one of the sequence; their features over another
    ({"dp": "experts", "tp": "data"}, {"dp": S0, "tp": R}, "all_to_all", False),
    ({"dp": "experts", "tp": "experts"}, {"dp": S0, "tp": S1}, "all_to_all", False),
    ({"dp": "experts", "tp": "experts"}, {"dp": S0, "tp": R}, "all_to_all", False),
    ({"dp": "experts", "tp": "experts"}, {"dp": S0, "tp": S1}, "mask", False),
    ({"ep": "experts", "tp": "features"}, {"ep": S0, "tp": R}, "all_to_all", False),
    ({"ep": "experts", "tp": "features"}, {"ep": S0, "tp": S1}, "all_to_all", False),
]


def run_biased(world_size: int) -> int:
    return run_cases(biased, [case for case in BIASED if 2 ** len(case[0]) == world_size])


@pytest.mark.parametrize(("world_size", "num_cases"), [(2, 6), (4, 7)])
def test_biases_features_and_axes_that_overlap(ranks: RankPools, world_size: int, num_cases: int) -> None:
    assert set(ranks.run(run_biased, world_size, world_size=world_size)) == {num_cases}


def moved_bytes(favourite: int | None) -> tuple[list[int], int, int]:
    """(bytes of each all-to-all, how many tokens this rank has for the other, and the other for it)."""
    _, model = pair(lambda: Mixture(favourite, False), entries("experts", "all_to_all", "sequence"), {"ep": 2})
    x = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    chosen: list[torch.Tensor] = []
    model.get_submodule("experts").register_forward_pre_hook(lambda _, args: chosen.append(args[1].full_tensor()))
    with record_comms() as ledger:
        model(x.requires_grad_()).sum().backward()
    assert [record.bytes for record in ledger.records if record.requester == "experts experts: counts"] == [2 * 4]
    owner = chosen[0].view(2, 8, 2) // 2  # two experts a rank
    to = [[int((owner[:, 4 * i : 4 * i + 4] == j).any(-1).sum()) for j in range(2)] for i in range(2)]
    rank = torch.distributed.get_rank()
    moved = [record.bytes for record in ledger.records if record.op == "all_to_all_v"]
    return moved, to[rank][1 - rank], to[1 - rank][rank]


@pytest.mark.parametrize("favourite", [None, 0, 1, 2])
def test_only_routed_tokens_move(ranks: RankPools, favourite: int | None) -> None:
    """A row is 8 numbers, 2 weights and 2 ids; its result 8 numbers; the gradients 8, and 8 with those of 2 weights."""
    for moved, sent, received in ranks.run(moved_bytes, favourite, world_size=2):
        row, weights, ids = 8 * 8, 2 * 8, 2 * 4
        assert moved == [received * (row + weights + ids), sent * row, received * row, sent * (row + weights)]


def refused() -> None:
    def mixed(plan: Plan) -> None:
        plan.local("experts", kind="experts")
        plan.shard("experts.down_proj", Shard(2), mesh="ep")

    with pytest.raises(
        PlanError, match=r"region 'experts' shards some parameters over 'ep' and leaves gate_up_proj replicated"
    ):
        pair(lambda: Mixture(None, False), mixed, {"ep": 2})

    def unlike(plan: Plan) -> None:
        plan.local("experts", kind="experts")
        plan.shard("experts.down_proj", Shard(0), mesh="ep")
        plan.shard("experts.gate_up_proj", Shard(2), mesh="ep")

    with pytest.raises(PlanError, match=r"on dim 2, .* on dim 0 over 'ep': shard dim 0 of all"):
        pair(lambda: Mixture(None, False), unlike, {"ep": 2})


def test_plans_that_cannot_be_right_are_refused(ranks: RankPools) -> None:
    ranks.run(refused, world_size=2)


class WritingExperts(Experts):
    """Write to an input of theirs; count their calls, and draw a number in each."""

    num_calls: torch.Tensor

    def __init__(self, written: str) -> None:
        super().__init__(separate=False)
        self.written = written
        self.register_buffer("num_calls", torch.zeros(1))

    def forward(self, hidden_states: torch.Tensor, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        self.num_calls += torch.rand(1).ceil()
        given = {"hidden_states": hidden_states, "top_k_index": top_k_index, "top_k_weights": top_k_weights}
        if self.written:
            given[self.written].mul_(1 if self.written == "top_k_index" else 0.5)
        return super().forward(hidden_states, top_k_index, top_k_weights)


class WrittenMixture(Mixture):
    """All tokens choose experts of the first rank. The inputs of the experts are read again afterwards."""

    def __init__(self, written: str) -> None:
        super().__init__(None, False)
        self.experts = WritingExperts(written)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = (x * 2).reshape(-1, 8)
        weights, index = torch.topk(self.router(x.reshape(-1, 8)).softmax(-1), 2, dim=-1)
        weights, index = weights * 1.5, index % 2
        out = self.experts(flat, index, weights)
        return (out + flat * 3 + weights.sum(-1, keepdim=True) + index.sum(-1, keepdim=True)).reshape(x.shape)


def written(sizes: dict[str, int]) -> None:
    x = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for name in ("hidden_states", "top_k_weights", "top_k_index"):
        reference, model = pair(functools.partial(WrittenMixture, name), entries("whole"), sizes)
        assert_same_step(reference, model, x, tolerance=1e-10)
        for how in (("experts", "mask"), ("experts", "all_to_all"), ("features", "mask")):
            _, model = pair(functools.partial(WrittenMixture, name), entries(*how), sizes)
            for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):  # the last rank has no token
                with mode(), pytest.raises(PlanError, match=f"'experts' write to their input '{name}' in place"):
                    model(x)


def probed(dispatch: str) -> None:
    """What the experts do to find out what they return leaves no trace: in buffers, or in streams of random numbers."""
    reference, model = pair(lambda: WrittenMixture(""), entries("experts", dispatch), {"ep": 2})
    x = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    rank, state = torch.distributed.get_rank(), torch.get_rng_state()
    assert_same_step(reference, model, x, tolerance=1e-10)
    assert model.get_buffer("experts.num_calls").item() == (1 if rank == 0 else 0)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.rand(1), (torch.rand(1) if rank == 0 else None)  # of one device, and of this rank's experts
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("sizes", [{"ep": 2}, pytest.param({"dp": 2, "ep": 2}, marks=pytest.mark.slow)], ids=str)
def test_writes_to_inputs(ranks: RankPools, sizes: dict[str, int]) -> None:
    ranks.run(written, sizes, world_size=2 * len(sizes))


@pytest.mark.parametrize("dispatch", ["mask", "all_to_all"])
def test_the_first_call_leaves_no_trace(ranks: RankPools, dispatch: str) -> None:
    ranks.run(probed, dispatch, world_size=2)


class Counting(nn.Module):
    """Experts whose attributes are all 4; which of them count experts shows in the forward alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.num_experts = self.expert_dim = self.expert_width = self.n = 4
        self.weight = nn.Parameter(torch.randn(4, 4, 4))
        self.kind = kind

    def forward(self, x: torch.Tensor, ids: Any, weights: Any) -> torch.Tensor:
        by_attribute = {"named": self.num_experts, "unnamed": self.n, "misnamed": self.expert_dim}
        out = torch.zeros_like(x)
        for expert in range(by_attribute.get(self.kind, len(self.weight))):
            chosen = (ids == expert) * weights
            scale = self.expert_width if self.kind != "all" else self.num_experts * self.n / self.expert_dim
            out = (
                out
                + chosen.sum(-1, keepdim=True) * torch.tanh(x @ self.weight[expert] / scale**0.5) / self.expert_width
            )
        return out


class Counted(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4, bias=False)
        self.experts = Counting(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = torch.topk(self.router(x).softmax(-1), 2, dim=-1)
        return self.experts(x, index, weights)


def counted_step(kind: str, dispatch: str) -> None:
    def add(plan: Plan) -> None:
        plan.local("experts", kind="experts", dispatch=dispatch).shard("experts.weight", Shard(0), mesh="ep")
        for path in ("<in:x>", "experts.<in>", "experts.<out>"):
            plan.shard(path, Replicate(), mesh="ep")

    reference, model = pair(lambda: Counted(kind), add, {"ep": 2})
    for seed in (5, 6):
        x = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert_same_step(reference, model, x, tolerance=1e-10)
    assert {v for k, v in vars(model.get_submodule("experts")).items() if type(v) is int} == {4}


def run_counted(cases: list[tuple[Any, ...]]) -> int:
    return run_cases(counted_step, cases)


def test_attributes_that_count_experts(ranks: RankPools) -> None:
    """Whatever they are called, and whatever else has the same number."""
    kinds = ("named", "unnamed", "misnamed", "none", "all")
    ranks.run(run_counted, [(kind, dispatch) for kind in kinds for dispatch in ("mask", "all_to_all")], world_size=2)
