"""Random programs: models, units, options and schedules drawn together, against one device in float64.

A seed decides everything, alike on all ranks. ``python -m tests.fsdp.test_combinations 0 200`` runs seeds one by one.
"""

from __future__ import annotations

import copy
import random
import sys
import traceback
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from tests.device import device_type
from tests.examples import NIGHTLY
from tests.fsdp.compare import agree, full, gradients_of, parameters_of
from tests.fsdp.models import Adapted, Block, tokens
from tests.ranks import RankPools
from vescale.fsdp import fully_shard

DIM, VOCABULARY = 6, 11
TOLERANCE = 1e-10
"""Relative, in float64; AdamW divides by the root of small numbers."""


class Routed(nn.Module):
    """Ranks and steps use different ones of four parts; the last one is never used."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block(dim) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.experts[int(x.detach().abs().sum() * 1000) % 3](x)


class Loose(nn.Module):
    """Parameters of its own, of which one is empty and one unused; its child's weight is used without calling the child."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.empty, self.unused = nn.Parameter(torch.zeros(0, dim)), nn.Parameter(torch.randn(3, 5))
        self.child = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain + torch.sin(x @ self.child.weight.t()) + self.empty.sum()


class Recurrent(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(dim, dim, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.lstm(x)[0]


KINDS: list[Callable[[int], nn.Module]] = [Block, Adapted, Routed, Loose, Recurrent]


class Model(nn.Module):
    """Embedding, blocks of several kinds, each of which may run more than once and be recomputed in backward, and a head."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(draw.choice(KINDS)(DIM) for _ in range(draw.randint(1, 4)))
        self.head = nn.Linear(DIM, VOCABULARY, bias=draw.random() < 0.5)
        if draw.random() < 0.3:
            self.head.weight = self.embed.weight
        calls = list(range(len(self.blocks)))
        if draw.random() < 0.4:
            calls.insert(draw.randint(0, len(calls)), draw.choice(calls))
        recompute = draw.choice([None, None, False, True])
        self.calls = [(index, draw.choice([None, recompute])) for index in calls]
        self.fails = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for position, (index, reentrant) in enumerate(self.calls):
            if self.fails and position == len(self.calls) // 2:
                raise ArithmeticError("as asked")
            if reentrant is None or not torch.is_grad_enabled():
                x = self.blocks[index](x)
            else:
                x = checkpoint(self.blocks[index], x, use_reentrant=reentrant)
        return self.head(x)


def shard(model: Any, draw: random.Random, num_ranks: int) -> list[str]:
    """Units, options and policies; returns what was drawn."""
    shapes = [(num_ranks,), (num_ranks,), (num_ranks, 1)] + ([(2, 2), (2, 2)] if num_ranks == 4 else [])
    shape = draw.choice(shapes)
    names = ("replicate", "shard") if len(shape) == 2 else ("dp",)
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=names)
    common: dict[str, Any] = {"mesh": mesh}
    if draw.random() < 0.2:
        common["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    placement = draw.choice(["ragged", "ragged", "rows", "last", "blocks"])
    if placement == "rows":
        common["shard_placement_fn"] = lambda p: Shard(0) if p.ndim else None
    elif placement == "last":
        common["shard_placement_fn"] = lambda p: Shard(p.ndim - 1) if p.ndim == 2 else None
    elif placement == "blocks":
        common["orig_param_policy"] = lambda name, p: p.shape[1] if p.ndim == 2 and p.numel() else None
    drawn = [f"mesh {shape}", placement, *(["offload"] if "offload_policy" in common else [])]
    halves = [d for d in range(2, shape[-1]) if shape[-1] % d == 0]

    def options() -> dict[str, Any]:
        after = draw.choice([None, True, False, *halves])
        drawn.append(f"reshard {after}")
        return {**common, "reshard_after_forward": after}

    for index, block in enumerate(model.blocks):
        how = draw.choice(["unit", "unit", "unit", "children", "both", "none", "list"])
        drawn.append(f"{type(block).__name__}: {how}")
        children = [c for c in block.children() if not isinstance(c, nn.ModuleList)]
        if isinstance(block, Loose):
            children = []  # its child's forward is not called, so that nothing would gather it
        if how in ("children", "both"):
            for child in children:
                fully_shard(child, **options())
        if how == "list" and len(children) > 1:
            fully_shard(children[:2], **options())
        if how in ("unit", "both") or (how == "list" and index % 2):
            fully_shard(block, **options())
    fully_shard(model, **options())
    reentrant = any(again for _, again in model.calls)
    repeated = len({index for index, _ in model.calls}) < len(model.calls)
    extra = draw.choice(["", "", "direct", "in place", "more buffers", "sums", "backward unshard"])
    drawn.append(extra)
    model.may_have = ["sum", "in turn", "reversed"] + ["twice"] * (not reentrant)
    if extra == "direct":
        model.set_direct_linear_gradients()
    elif extra == "in place" and not reentrant and not repeated:
        model.set_in_place_gradients()
        model.may_have.remove("twice")  # refused: the parameters are gone
    elif extra == "more buffers":
        model.set_reduce_scatter_max_input_buffers(draw.randint(1, 3))
    elif extra == "sums":
        model.set_force_sum_reduction_for_comms(True)
    if draw.random() < 0.3 and len(model.calls) > 1:
        units = [block for block in model.blocks if hasattr(block, "unshard")]
        for before, after in pairwise(units):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
        drawn.append("explicit prefetch")
    return drawn


def losses(model: nn.Module, what: str, step: int, micro: int, rank: int) -> list[torch.Tensor]:
    """Of one or two forwards, to be differentiated in this order."""
    batches = [tokens(10 * step + micro, rank, (2, 3)), tokens(10 * step + micro + 5, rank, (1, 4))]
    found = [
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1).flatten())
        for ids in batches[: 1 if what in ("one", "twice") else 2]
    ]
    if what == "sum":
        return [found[0] + 2 * found[1]]
    return found[::-1] if what == "reversed" else found


def backwards(model: nn.Module, what: str, step: int, micro: int, ranks: list[int]) -> None:
    """Backward of the mean over ``ranks``."""
    by_rank = [losses(model, what, step, micro, rank) for rank in ranks]
    for of_ranks in zip(*by_rank, strict=True):
        mean = torch.stack(of_ranks).mean()
        if what == "twice":
            mean.backward(retain_graph=True)
        mean.backward()


def accumulate(model: Any, draw: random.Random, step: int, drawn: list[str]) -> tuple[int, str]:
    """One step's backwards of the sharded model; returns how many, and of which losses."""
    rank, micros = dist.get_rank(), draw.choice([1, 1, 2, 3])
    what = draw.choice(["one", "one", "one", *model.may_have])
    how = draw.choice(["every", "last", "kept", "no all-reduce"])
    drawn.append(f"step {step}: {micros} x {how}, {what}")
    for micro in range(micros):
        last = micro == micros - 1
        model.set_requires_gradient_sync(last or how in ("every", "no all-reduce"))
        model.set_requires_all_reduce(last or how != "no all-reduce")
        model.set_reshard_after_backward(last or how != "kept")
        model.set_is_last_backward(last or how != "kept")
        backwards(model, what, step, micro, [rank])
    return micros, what


def between(model: Any, plain: Any, draw: random.Random, drawn: list[str]) -> None:
    """What scripts do between steps, with both models alike."""
    what = draw.choice(["", "", "", "evaluate", "freeze", "thaw", "state dict", "fail", "inference", "unshard", "copy"])
    drawn.append(what)
    ids = tokens(77, 0, (2, 3))
    if what in ("evaluate", "inference"):
        with torch.no_grad() if what == "evaluate" else torch.inference_mode():
            torch.testing.assert_close(model.eval()(ids), plain.eval()(ids), rtol=TOLERANCE, atol=TOLERANCE)
        model.train(), plain.train()
    elif what in ("freeze", "thaw"):
        names = sorted(name for name, _ in plain.named_parameters() if name not in ("embed.weight", "head.weight"))
        chosen = set(draw.sample(names, max(1, len(names) // 3)))
        for one in (model, plain):
            for name, parameter in one.named_parameters():
                if name in chosen:
                    parameter.requires_grad_(what == "thaw")
                    if what == "freeze":
                        parameter.grad = None
    elif what == "state dict":
        assign = (
            draw.random() < 0.5 and plain.head.weight is not plain.embed.weight
        )  # that would untie them on one device
        for one in (model, plain):
            state = {name: value.clone() for name, value in one.state_dict().items()}
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.zero_()
            one.load_state_dict(state, assign=assign)
    elif what == "fail":
        model.fails = True
        with pytest.raises(ArithmeticError, match="as asked"):
            model(ids)
        model.fails = False
    elif what == "unshard":
        model.unshard()
        if draw.random() < 0.5:
            model.reshard()
    elif what == "copy":
        twin = copy.deepcopy(model)
        with torch.no_grad():
            torch.testing.assert_close(twin(ids), plain(ids), rtol=TOLERANCE, atol=TOLERANCE)


def train(seed: int) -> list[str]:
    """A few steps of one random program."""
    draw, rank, num_ranks = random.Random(seed), dist.get_rank(), dist.get_world_size()
    drawn: list[str] = []
    try:
        torch.manual_seed(seed)
        plain = Model(draw).double()
        model: Any = copy.deepcopy(plain)
        drawn += [str(plain.calls), *shard(model, draw, num_ranks)]
        make: Any = draw.choice([torch.optim.AdamW, torch.optim.SGD])
        optimizers = [make(one.parameters(), lr=0.02) for one in (model, plain)]
        keeps = draw.random() < 0.3
        for step in range(3):
            micros, what = accumulate(model, draw, step, drawn)
            for micro in range(micros):
                backwards(plain, what, step, micro, list(range(num_ranks)))
            clip = draw.random() < 0.3
            if clip:
                norms = [full(nn.utils.clip_grad_norm_(one.parameters(), 0.5)) for one in (model, plain)]
                agree(f"step {step}, norm", norms[0], norms[1], "one device", TOLERANCE, TOLERANCE)
            for (name, ours), theirs in zip(gradients_of(model).items(), plain.parameters(), strict=True):
                agree(f"step {step}, {name}.grad", ours, theirs.grad, "one device", TOLERANCE, TOLERANCE)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=not keeps)
            for (name, ours), theirs in zip(parameters_of(model).items(), plain.parameters(), strict=True):
                agree(f"step {step}, {name}", ours.detach(), theirs.detach(), "one device", TOLERANCE, 1e-8)
            between(model, plain, draw, drawn)
    except BaseException as error:
        raise AssertionError(f"seed {seed}, rank {rank}: {drawn}") from error
    return drawn


def train_all(seeds: list[int]) -> int:
    for seed in seeds:
        train(seed)
    return len(seeds)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_random_programs(ranks: RankPools, num_ranks: int) -> None:
    seeds = list(range(100 * num_ranks, 100 * num_ranks + (8 if NIGHTLY else 2)))
    assert ranks.run(train_all, seeds, world_size=num_ranks) == [len(seeds)] * num_ranks


def main() -> None:
    pools = RankPools()
    begin, end = int(sys.argv[1]), int(sys.argv[2])
    for seed in range(begin, end):
        try:
            pools.run(train, seed, world_size=2 + seed % 3, timeout=60)
        except AssertionError:
            print(f"seed {seed}\n{traceback.format_exc()[-6000:]}", flush=True)
    pools.close()


if __name__ == "__main__":
    main()
