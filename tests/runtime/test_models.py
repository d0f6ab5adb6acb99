"""Models that are no Llama: attention inside torch functions, convolutions, group norm, assignments."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from tests.ranks import RankPools, run_cases
from tests.runtime.compare import assert_same_step, pair
from vescale.plans import Plan

DP = {"dp": 2}


def over_batch(plan: Plan, names: tuple[str, ...] = ("x",)) -> None:
    for name in names:
        plan.shard(f"<in:{name}>", Shard(0), mesh="dp")


def data(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


class Attention(nn.Module):
    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.weights = weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, weights = self.attention(x, x, x, need_weights=self.weights)
        return y if weights is None else y + weights.sum()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.encoder(x, mask=mask, is_causal=True)


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(16, 4, 1, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.transformer(x, x.flip(-1))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, 8)
        self.conv2 = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.norm2 = nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm1(self.conv1(x)))
        x = x + F.interpolate(F.relu(self.norm2(self.conv2(x))), scale_factor=2)
        x = F.max_pool2d(F.gelu(self.up(x[:, :, ::2, ::2])), 2)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Assigns(nn.Module):
    """Item assignment, masks, constants that are no buffers, factories of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = torch.arange(1.0, 7.0, dtype=torch.float64)  # neither parameter nor buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.scale
        z = torch.zeros_like(y)
        z[:, 0] = 3.0
        z[:, 1:] = y[:, :-1]
        z[1] = 2.5  # cuts the sharded dim
        mask = torch.ones(6, 6, dtype=torch.bool, device=x.device).tril()
        weights = torch.eye(6, dtype=x.dtype) + torch.full((6, 6), 0.5, dtype=x.dtype) * mask
        z = z @ weights + x.new_ones(6) * torch.linspace(0, 1, 6, dtype=x.dtype)
        steps = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], dtype=x.dtype)
        rows, columns = torch.tril_indices(6, 6)
        assert len(steps.tolist()) == 6 and steps.sum().item() > 2 and bool((steps > 0).all())
        return z * steps + weights[rows, columns].sum() + y.masked_fill(~mask[:1], 0.0)


class DataDependent(nn.Module):
    """nonzero, boolean masks, bincount, unique: shapes that depend on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        chosen = y[y > 0]
        rows = torch.nonzero(y.sum(1) > 0).squeeze(1)
        counts = torch.bincount((y > 0).sum(1), minlength=8)
        classes = torch.unique((y > 0).sum(1))
        return chosen.square().sum() + y.index_select(0, rows).sum() + counts.max() + classes.numel()


class VmappedMask(nn.Module):
    """Masks as transformers makes some of them: a function of positions under vmap, which makes tensors itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def causal(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return query.new_zeros((), dtype=torch.bool) | (query >= key) & torch.ones((), dtype=torch.bool)

        positions = torch.arange(x.shape[0])
        mask = torch.vmap(torch.vmap(causal, in_dims=(None, 0)), in_dims=(0, None))(positions, positions)
        y = self.linear(x)
        return F.softmax((y @ y.T).masked_fill(~mask, -1e9), -1) @ y


class Apply(nn.Module):
    """Applies another function in each case, since ``parallelize`` takes longer than a case."""

    function: Any

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


# What stock DTensor gets wrong (uneven means, gradients of smooth_l1, norms), refuses, or has no rule for.
FUNCTIONS = {
    "mse": lambda y: F.mse_loss(y, torch.zeros_like(y)),
    "smooth_l1": lambda y: (
        F.smooth_l1_loss(y, torch.ones_like(y)) + F.huber_loss(y, torch.ones_like(y), reduction="sum")
    ),
    "bce": lambda y: F.binary_cross_entropy_with_logits(y, torch.ones_like(y), pos_weight=torch.full((6,), 2.0).to(y)),
    "bce of probabilities": lambda y: F.binary_cross_entropy(y.sigmoid(), torch.ones_like(y) * 0.3),
    "soft margin": lambda y: F.soft_margin_loss(y, torch.ones_like(y)) + F.l1_loss(y, torch.ones_like(y)),
    "unreduced": lambda y: F.mse_loss(y, torch.ones_like(y), reduction="none").sum(),
    "mean": lambda y: (y * 2).relu().mean(),
    "variance": lambda y: y.var() + y.std(0).sum(),
    "extremes": lambda y: y.max() + y.amax(0).sum() + y.min(),
    "norms": lambda y: y.norm() + (-y.norm(dim=0)).sum() + y.norm(p=1, dim=1).sum(),
    "softmax over rows": lambda y: y.square().softmax(0).square().sum(),  # squared: a bias alone would cancel
    "cumsum": lambda y: y.cumsum(0).square().sum(),
    "sort": lambda y: (y.sort(0)[0] * torch.arange(6.0, dtype=y.dtype)).sum() + y.topk(2, dim=0)[0].sum(),
    "cat": lambda y: torch.cat([y, y * 2], 0)[1:].square().sum(),
    "roll": lambda y: (y.roll(1, 0).flip(0) * y).sum(),
    "logsumexp": lambda y: y.logsumexp(0).sum(),
    "gather": lambda y: y.gather(0, torch.zeros(2, 6, dtype=torch.long)).square().sum(),
    "unbind": lambda y: torch.stack(y.unbind(0)[::2]).square().sum(),
    "split": lambda y: y.split(2, 0)[1].square().sum() + y.chunk(3, 1)[0].sum(),
    "iterate": lambda y: next(iter(y)).square().sum(),
    "unfold": lambda y: y.unfold(1, 3, 2).square().sum(),
    "cdist": lambda y: torch.cdist(y, torch.ones(2, 6, dtype=y.dtype)).sum(),
    "scatter": lambda y: torch.zeros_like(y).scatter_add(1, torch.zeros(y.shape, dtype=torch.long), y).square().sum(),
    "kl": lambda y: F.kl_div(y.log_softmax(-1), torch.ones_like(y).softmax(-1), reduction="batchmean"),
    "einsum": lambda y: torch.einsum("bi,bj->ij", y, y).square().sum(),
}


def functions(rows: int) -> None:
    """Each over evenly and unevenly sharded rows."""

    reference, model = pair(Apply, over_batch, DP, strict=False)

    def same(name: str) -> None:
        for each in (reference, model):
            each.zero_grad()
            each.function = FUNCTIONS[name]
        assert_same_step(reference, model, data(rows, 6), loss=lambda y: y, max_implicit=99)

    run_cases(same, [(name,) for name in FUNCTIONS])


def test_functions_over_sharded_rows(ranks: RankPools) -> None:
    for rows in (4, 5):
        ranks.run(functions, rows, world_size=2)


def models() -> None:
    assert_same_step(*pair(lambda: Attention(False), over_batch, DP), data(4, 6, 16))
    assert_same_step(*pair(Encoder, over_batch, DP), data(4, 6, 16))
    assert_same_step(*pair(Seq2Seq, over_batch, DP), data(4, 6, 16))
    assert_same_step(*pair(ConvNet, over_batch, DP), data(4, 3, 8, 8))


def attention_with_weights() -> None:
    assert_same_step(*pair(lambda: Attention(True), over_batch, DP, strict=False), data(4, 6, 16), max_implicit=9)


def assigns() -> None:
    reference, model = pair(Assigns, over_batch, DP, strict=False)
    assert_same_step(reference, model, data(4, 6), max_implicit=9)


def data_dependent() -> None:
    reference, model = pair(DataDependent, over_batch, DP, strict=False)
    assert_same_step(reference, model, data(4, 6), loss=lambda y: y, max_implicit=20)


def inference() -> None:
    """The fast paths of nn.MultiheadAttention and nn.TransformerEncoder in eval mode, and inference mode."""
    x = data(4, 6, 16)
    for build in (lambda: Attention(False), Encoder):
        reference, model = pair(build, over_batch, DP)
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                torch.testing.assert_close(model.eval()(x).full_tensor(), reference.eval()(x))


def test_models_over_the_batch(ranks: RankPools) -> None:
    ranks.run(models, world_size=2)


def test_attention_with_weights(ranks: RankPools) -> None:
    ranks.run(attention_with_weights, world_size=2)


def test_assignments_and_factories(ranks: RankPools) -> None:
    ranks.run(assigns, world_size=2)


def vmapped() -> None:
    reference, model = pair(VmappedMask, over_batch, DP, strict=False)
    assert_same_step(reference, model, data(4, 6), max_implicit=99)


def test_vmapped_masks(ranks: RankPools) -> None:
    ranks.run(vmapped, world_size=2)


def test_data_dependent_shapes(ranks: RankPools) -> None:
    ranks.run(data_dependent, world_size=2)


def test_inference_fast_paths(ranks: RankPools) -> None:
    ranks.run(inference, world_size=2)
