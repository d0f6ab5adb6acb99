"""Random programs under ``parallelize``: models, plans of tensor-parallel and ZeRO lines, units and schedules drawn
together, against one device in float64. A seed decides everything, alike on all ranks.

``python -m tests.runtime.test_random_programs 0 200`` runs seeds one by one.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

from tests.examples import NIGHTLY
from tests.ranks import RankPools
from tests.runtime.zero import mesh_of
from tests.whole import whole, whole_tensors
from vescale import no_sync, optim, parallelize
from vescale.placements import RaggedShard
from vescale.plans import INIT, RUN, Plan

WIDTH = 6
TOLERANCE = 1e-10


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Adapted(Mlp):
    """A frozen block with two trainable factors."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.b(self.a(x))


class Scaled(nn.Module):
    """A number, a vector, and a matrix that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.gain = nn.Parameter(torch.tensor(1.25)), nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.gain) * self.scale


KINDS = [Mlp, Mlp, Adapted, Scaled]


class Model(nn.Module):
    """Blocks of several kinds, each of which may run more than once and be recomputed in backward."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(draw.choice(KINDS)() for _ in range(draw.randint(1, 3)))
        self.head = nn.Linear(WIDTH, 11, bias=draw.random() < 0.5)
        if draw.random() < 0.3:
            self.head.weight = self.embed.weight
        calls = list(range(len(self.blocks)))
        if draw.random() < 0.4:
            calls.insert(draw.randint(0, len(calls)), draw.choice(calls))
        recompute = draw.choice([None, None, False, True])
        self.calls = [(index, draw.choice([None, recompute])) for index in calls]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for index, reentrant in self.calls:
            if reentrant is None or not torch.is_grad_enabled():
                x = self.blocks[index](x)
            else:
                x = checkpoint(self.blocks[index], x, use_reentrant=reentrant)
        return self.head(x)


def make_plan(model: Model, draw: random.Random, num_ranks: int) -> tuple[Plan, list[str]]:
    """Over data-parallel axes, and maybe one of tensor parallelism; returns what was drawn, too."""
    meshes = [{"dp": num_ranks}]
    if num_ranks == 4:
        meshes += [{"dp": 2, "tp": 2}] * 2 + [{"replicate": 2, "dp": 2}]
    sizes = draw.choice(meshes)
    plan = Plan(mesh_of(sizes))
    data_parallel = [axis for axis in sizes if axis != "tp"]
    plan.shard("<in:ids>", {axis: Shard(0) for axis in data_parallel})
    drawn = [str(sizes)]
    for index, block in enumerate(model.blocks):
        if "tp" in sizes and isinstance(block, Mlp) and draw.random() < 0.7:
            plan.shard(rf"blocks\.{index}\.up\.(weight|bias)", Shard(0), mesh="tp")
            plan.shard(rf"blocks\.{index}\.down\.weight", Shard(1), mesh="tp")
            drawn.append(f"tp {index}")
    paths = draw.choice(["", ".*", ".*", ".*weight", r"blocks\..*", r"(embed|head)\..*"])
    if paths:
        plan.shard(paths, RaggedShard(), mesh="dp", phase=INIT)
        plan.shard(paths, Replicate(), mesh="dp", phase=RUN)
        stage = draw.choice([1, 2, 3, 3])
        drawn.append(f"zero {stage} of {paths}")
        if stage < 3 and paths == ".*":
            after = None if stage == 2 else False
            plan.unit(r"blocks\.\d+", reshard_after_forward=False, reshard_after_backward=after)
            plan.unit("", reshard_after_backward=after)
    return plan, drawn


def losses(model: nn.Module, what: str, step: int, micro: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + micro)
    found = []
    for rows in (4, 8)[: 1 if what in ("one", "twice") else 2]:
        ids = torch.randint(0, 11, (rows, 3), generator=generator)
        labels = ids.roll(1).flatten()
        labels[: rows // 2] = -100  # some ranks have fewer
        found.append(nn.functional.cross_entropy(model(ids).flatten(0, 1), labels))
    if what == "sum":
        return [found[0] + 2 * found[1]]
    return found[::-1] if what == "reversed" else found


def accumulate(model: Any, pause: Any, what: str, step: int, micros: int, how: str) -> None:
    """One step's backwards; ``pause(model)`` around those that are not to communicate."""
    for micro in range(micros):
        with pause(model) if how == "last" and micro < micros - 1 else contextlib.nullcontext():
            for loss in losses(model, what, step, micro):
                if what == "twice":
                    loss.backward(retain_graph=True)
                loss.backward()


def between(model: Any, plain: Any, draw: random.Random, drawn: list[str]) -> None:
    what = draw.choice(["", "", "evaluate", "freeze", "thaw", "state dict"])
    drawn.append(what)
    if what == "evaluate":
        ids = torch.arange(12).view(4, 3) % 11
        with torch.no_grad():
            torch.testing.assert_close(whole(model.eval()(ids)), plain.eval()(ids), rtol=TOLERANCE, atol=TOLERANCE)
        model.train(), plain.train()
    elif what in ("freeze", "thaw"):
        names = sorted(name for name, _ in plain.named_parameters() if name not in ("embed.weight", "head.weight"))
        chosen = set(draw.sample(names, len(names) // 3))
        for one in (model, plain):
            for name, parameter in one.named_parameters():
                if name in chosen:
                    parameter.requires_grad_(what == "thaw")
                    if what == "freeze":
                        parameter.grad = None
    elif what == "state dict":
        state = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_state_dict(state)


def train(seed: int) -> list[str]:
    draw, num_ranks = random.Random(seed), dist.get_world_size()
    drawn: list[str] = []
    try:
        torch.manual_seed(seed)
        plain = Model(draw).double()
        model: Any = copy.deepcopy(plain)
        plan, drawn = make_plan(plain, draw, num_ranks)
        drawn.append(str(plain.calls))
        parallelize(model, plan)
        optimizers = [torch.optim.AdamW(one.parameters(), lr=0.02) for one in (model, plain)]
        keeps = draw.random() < 0.3
        reentrant = any(again for _, again in plain.calls)
        for step in range(3):
            micros, how = draw.choice([1, 1, 2, 3]), draw.choice(["every", "last"])
            what = draw.choice(["one", "one", "sum", "in turn", "reversed"] + ["twice"] * (not reentrant))
            drawn.append(f"step {step}: {micros} x {how}, {what}")
            accumulate(model, no_sync, what, step, micros, how)
            accumulate(plain, contextlib.nullcontext, what, step, micros, how)
            if draw.random() < 0.3:
                drawn.append("clip")
                norm = optim.clip_grad_norm_(model.parameters(), 0.5)
                expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
                torch.testing.assert_close(whole(norm), expected, rtol=TOLERANCE, atol=TOLERANCE)
            same("grad", step, model, plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=not keeps)
            same("", step, model, plain)
            between(model, plain, draw, drawn)
    except BaseException as error:
        raise AssertionError(f"seed {seed}, rank {dist.get_rank()}: {drawn}") from error
    return drawn


def same(what: str, step: int, model: nn.Module, plain: nn.Module) -> None:
    found: Any = whole_tensors({name: own.grad if what else own for name, own in model.named_parameters()})
    for (name, own), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        one: Any = own.grad if what else own.detach()
        expected: Any = other.grad if what else other.detach()
        assert (one is None) == (expected is None), f"step {step}, {name} {what}: {one}, one device {expected}"
        if one is None:
            continue
        assert one.placements == own.placements, f"step {step}, {name} {what}: {one.placements}, not {own.placements}"
        torch.testing.assert_close(
            found[name],
            expected,
            rtol=TOLERANCE,
            atol=TOLERANCE if what else 1e-8,
            msg=lambda m, name=name: f"step {step}, {name} {what}: {m}",
        )


def train_all(seeds: list[int]) -> int:
    for seed in seeds:
        train(seed)
    return len(seeds)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_random_programs(ranks: RankPools, num_ranks: int) -> None:
    seeds = list(range(100 * num_ranks, 100 * num_ranks + (8 if NIGHTLY else 2)))
    assert ranks.run(train_all, seeds, world_size=num_ranks) == [len(seeds)] * num_ranks


def main() -> None:
    pools = RankPools()
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            pools.run(train, seed, world_size=2 if seed % 3 == 0 else 4, timeout=60)
        except AssertionError:
            print(f"seed {seed}\n{traceback.format_exc()[-6000:]}", flush=True)
    pools.close()


if __name__ == "__main__":
    main()
