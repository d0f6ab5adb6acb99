"""Losses and augmentations of many kinds of training, as people write them: :data:`FORWARDS`.

Each is a function of the model and entries of :func:`batch_for`. Some compute across the rows of the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["FORWARDS", "Net", "batch_for"]

WIDTH, WORDS, LENGTH, FEATURES = 8, 12, 5, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A body of four blocks for rows of features, or of tokens, and heads for what a forward computes of it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.embed, self.inp = nn.Embedding(WORDS, WIDTH), nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head, self.value, self.back = nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, FEATURES)
        self.sigmas = nn.Parameter(torch.tensor([0.1, -0.2]))
        self.register_buffer("queue", torch.randn(7, WIDTH))

    def forward(self, **batch: Any) -> Any:
        return FORWARDS[self.name](self, **batch)

    def body(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = block(h)
        return h

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.inp(x))

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.value(self.rows(x)).squeeze(-1)

    def classes(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(x))

    def tokens(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.embed(ids))

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.tokens(ids))

    def logps(self, ids: torch.Tensor) -> torch.Tensor:
        """Of each token, given those before: ``[rows, tokens - 1]``."""
        return self.logits(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def batch_for(name: str, rows: int) -> dict[str, torch.Tensor]:
    """The entries that a forward takes."""
    draws = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(rows, *shape, generator=draws, dtype=torch.float64)

    ids = torch.randint(1, WORDS, (rows, LENGTH), generator=draws)
    lengths = torch.randint(2, LENGTH, (rows,), generator=draws)
    mask = (torch.arange(LENGTH - 1) < lengths[:, None]).double()
    all_entries = {
        "ids": ids,
        "labels": ids.masked_fill(torch.rand(rows, LENGTH, generator=draws) < 0.4, -100),
        "lengths": lengths,
        "mask": mask,
        "x": randn(FEATURES),
        "x2": randn(FEATURES),
        "image": randn(FEATURES),
        "y": torch.randint(0, WORDS, (rows,), generator=draws),
        "two": torch.arange(rows) % 3 % 2,
        "r": randn(),
        "w": randn().abs() + 0.1,
        "t": torch.rand(rows, generator=draws, dtype=torch.float64) * 0.9 + 0.05,
        "adv": randn(LENGTH - 1),
        "old": -randn(LENGTH - 1).abs(),
        "ref": -randn(LENGTH - 1).abs(),
        "returns": randn(LENGTH - 1),
        "target": randn(FEATURES),
        "targets": randn(LENGTH, FEATURES),
        "z": randn(WIDTH),
        "many": (randn(WORDS) > 0.5).double(),
        "steps": torch.randint(0, 10, (rows,), generator=draws),
        "speech": torch.randint(1, WORDS, (rows, 2), generator=draws),
    }
    return {entry: all_entries[entry] for entry in list(inspect.signature(FORWARDS[name]).parameters)[1:]}


FORWARDS: dict[str, Callable[..., Any]] = {}


def forward(function: Callable[..., Any]) -> Callable[..., Any]:
    FORWARDS[function.__name__] = function
    return function


def whiten(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean()) / (x.std() + 1e-8)


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (x * mask).sum() / mask.sum()


def masked_whiten(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mean = masked_mean(x, mask)
    return (x - mean) * torch.rsqrt(masked_mean((x - mean) ** 2, mask) + 1e-8)


def clipped(ratio: torch.Tensor, adv: torch.Tensor, high: float = 0.2) -> torch.Tensor:
    return -torch.min(ratio * adv, ratio.clamp(0.8, 1 + high) * adv)


def k3(ref: torch.Tensor, logps: torch.Tensor) -> torch.Tensor:
    return torch.exp(ref - logps) - (ref - logps) - 1


def group_norm(r: torch.Tensor, size: int = 2) -> torch.Tensor:
    groups = r.view(-1, size)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


# Reinforcement learning: names of the entries are those of the batch.
FORWARDS |= {
    "reinforce": lambda net, ids, mask, r: -((net.logps(ids) * mask).sum(1) * r).mean(),
    "reinforce_baseline": lambda net, ids, mask, r: -((net.logps(ids) * mask).sum(1) * (r - r.mean())).mean(),
    "reinforce_whitened": lambda net, ids, mask, r: -((net.logps(ids) * mask).sum(1) * whiten(r)).mean(),
    "reinforce_min_max": lambda net, ids, mask, r: -(
        (net.logps(ids) * mask).sum(1) * ((r - r.min()) / (r.max() - r.min()))
    ).mean(),
    "reinforce_ranks": lambda net, ids, mask, r: -((net.logps(ids) * mask).sum(1) * r.argsort().argsort() / len(r)).mean(),
    "reinforce_median": lambda net, ids, mask, r: -((net.logps(ids) * mask).sum(1) * (r > r.median())).mean(),
    "reinforce_quantile": lambda net, ids, mask, r: -((net.logps(ids) * mask).sum(1) * (r > r.quantile(0.7))).mean(),
    "reinforce_sign": lambda net, ids, mask, r: -((net.logps(ids) * mask).sum(1) * r.sign()).mean(),
    "rloo": lambda net, ids, mask, r: -((net.logps(ids) * mask).sum(1) * (r - (r.sum() - r) / (len(r) - 1))).mean(),
    "rloo_pairs": lambda net, ids, mask, r: -(
        (net.logps(ids) * mask).sum(1) * (r.view(-1, 2) - r.view(-1, 2).flip(1)).flatten()
    ).mean(),
    "grpo": lambda net, ids, mask, r, old: masked_mean(
        clipped((net.logps(ids) - old).exp(), group_norm(r)[:, None]), mask
    ),
    "grpo_rows": lambda net, ids, mask, r, old: (
        (clipped((net.logps(ids) - old).exp(), group_norm(r)[:, None]) * mask).sum(1) / mask.sum(1)
    ).mean(),
    "grpo_groups_of_all": lambda net, ids, mask, r: -masked_mean(
        net.logps(ids) * group_norm(r, len(r))[:, None], mask
    ),
    "dr_grpo": lambda net, ids, mask, r, old: (
        clipped((net.logps(ids) - old).exp(), (r - r.mean())[:, None]) * mask
    ).sum() / (len(ids) * 4),
    "dapo": lambda net, ids, mask, adv, old: masked_mean(clipped((net.logps(ids) - old).exp(), adv, 0.28), mask),
    "ppo_whitened": lambda net, ids, mask, adv, old: masked_mean(
        clipped((net.logps(ids) - old).exp(), masked_whiten(adv, mask)), mask
    ),
    "ppo_whitened_mean": lambda net, ids, adv, old: clipped((net.logps(ids) - old).exp(), whiten(adv)).mean(),
    "ppo_kl": lambda net, ids, mask, ref: masked_mean(k3(ref, net.logps(ids)), mask),
    "ppo_normalized_mask": lambda net, ids, mask, adv: -(net.logps(ids) * adv * (mask / mask.sum())).sum(),
    "a2c": lambda net, x, r: (net.score(x) - r).square().mean(),
    "a2c_normalized_returns": lambda net, x, r: (net.score(x) - (r - r.mean()) / r.std(unbiased=False)).square().mean(),
    "awr": lambda net, x, y, r: (F.cross_entropy(net.classes(x), y, reduction="none") * (r / 0.5).exp().clamp(max=5)).mean(),
    "awac": lambda net, x, y, r: (F.cross_entropy(net.classes(x), y, reduction="none") * (r / 0.5).softmax(0)).sum(),
    "awac_times_rows": lambda net, x, y, r: (
        F.cross_entropy(net.classes(x), y, reduction="none") * (r / 0.5).softmax(0) * len(r)
    ).mean(),
    "per": lambda net, x, r, w: (w / w.max() * F.smooth_l1_loss(net.score(x), r, reduction="none")).mean(),
    "per_probabilities": lambda net, x, r, w: (
        (len(w) * w / w.sum()).pow(-0.4) * F.smooth_l1_loss(net.score(x), r, reduction="none")
    ).mean(),
    "dqn": lambda net, x, y, r: F.smooth_l1_loss(net.classes(x).gather(1, y[:, None]).squeeze(1), r),
    "dqn_range": lambda net, x, y, r: F.smooth_l1_loss(net.classes(x)[torch.arange(len(x)), y], r),
    "c51": lambda net, x, target: -(target.softmax(-1) * net.classes(x)[:, :FEATURES].log_softmax(-1)).sum(-1).mean(),
    "quantile_huber": lambda net, x, r: (lambda q: (
        (torch.linspace(0.1, 0.9, WORDS) - (r[:, None] < q).double()).abs()
        * F.huber_loss(q, r[:, None].expand(-1, WORDS), reduction="none")
    ).mean())(net.classes(x)),
    "entropy_bonus": lambda net, x: -torch.distributions.Categorical(logits=net.classes(x)).entropy().mean(),
    "decision_rtg": lambda net, ids, r: F.mse_loss(net.value(net.tokens(ids)).squeeze(-1), r[:, None].expand(-1, LENGTH)),
    "discounted": lambda net, ids, returns: -(
        net.logps(ids) * (returns * 0.9 ** torch.arange(4)).flip(1).cumsum(1).flip(1)
    ).mean(),
    "discounted_whitened": lambda net, ids, returns: -(net.logps(ids) * whiten(returns.flip(1).cumsum(1).flip(1))).mean(),
    "best_half": lambda net, x, y, r: F.cross_entropy(net.classes(x), y.masked_fill(r < r.median(), -100)),
    "best_of_two": lambda net, x, y, r: F.cross_entropy(
        net.classes(x), y.masked_fill((r.view(-1, 2) < r.view(-1, 2).amax(1, keepdim=True)).flatten(), -100)
    ),
    "moving_scale": lambda net, x, r: ((net.score(x) - r) / r.abs().mean().clamp(min=0.1)).square().mean(),
    "percentile_scale": lambda net, x, r: -(net.score(x) * (r / (r.quantile(0.95) - r.quantile(0.05)).clamp(min=1))).mean(),
    "actor_whitens_values": lambda net, x, r: ((whiten(net.score(x)) - r) ** 2).mean(),
    "baseline_of_values": lambda net, x, r: (net.score(x) * (r - net.score(x).mean().detach())).mean(),
}  # fmt: skip


@forward
def grpo_without_old(net: Net, ids: Any, mask: Any, r: Any, ref: Any) -> Any:
    logps = net.logps(ids)
    loss = -torch.exp(logps - logps.detach()) * group_norm(r)[:, None] + 0.04 * k3(ref, logps)
    return ((loss * mask).sum(1) / mask.sum(1)).mean()


@forward
def grpo_whitened_in_batch(net: Net, ids: Any, mask: Any, r: Any) -> Any:
    logps = net.logps(ids)
    loss = -torch.exp(logps - logps.detach()) * whiten(r)[:, None]
    return (loss * mask).sum() / mask.sum()


@forward
def gspo(net: Net, ids: Any, mask: Any, r: Any, old: Any) -> Any:
    ratio = (((net.logps(ids) - old) * mask).sum(1) / mask.sum(1)).exp()
    return clipped(ratio, whiten(r)).mean()


@forward
def ppo_full(net: Net, ids: Any, mask: Any, adv: Any, old: Any, returns: Any) -> Any:
    h = net.tokens(ids)[:, :-1]
    logp = net.head(h).log_softmax(-1)
    policy = clipped((logp.gather(-1, ids[:, 1:, None]).squeeze(-1) - old).exp(), masked_whiten(adv, mask))
    values = net.value(h).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return (
        masked_mean(policy, mask)
        + 0.5 * masked_mean((values - returns).square(), mask)
        - 0.01 * masked_mean(entropy, mask)
    )


@forward
def ppo_value_clipped(net: Net, ids: Any, mask: Any, returns: Any, old: Any) -> Any:
    values = net.value(net.tokens(ids)[:, :-1]).squeeze(-1)
    kept = old + (values - old).clamp(-0.2, 0.2)
    return 0.5 * masked_mean(torch.max((values - returns) ** 2, (kept - returns) ** 2), mask)


@forward
def gae(net: Net, ids: Any, mask: Any, adv: Any, returns: Any) -> Any:
    last, found = torch.zeros_like(adv[:, 0]), []
    for n in reversed(range(adv.shape[1])):
        last = adv[:, n] + 0.95 * last * mask[:, n]
        found.append(last)
    advantages = masked_whiten(torch.stack(found[::-1], 1), mask)
    return -masked_mean(net.logps(ids) * advantages, mask)


@forward
def running_returns(net: Net, x: Any, r: Any) -> Any:
    scaled = r.clone()
    scaled -= scaled.mean()
    scaled /= scaled.std()
    return -(net.score(x) * scaled).mean()


@forward
def vtrace(net: Net, ids: Any, old: Any, returns: Any) -> Any:
    logps = net.logps(ids)
    rho = (logps.detach() - old).exp().clamp(max=1)
    return -(rho * logps * returns).mean()


@forward
def class_frequencies(net: Net, x: Any, y: Any) -> Any:
    weights = (1 - 0.9) / (1 - 0.9 ** torch.bincount(y, minlength=WORDS).double().clamp(min=1))
    return F.cross_entropy(net.classes(x), y, weight=weights / weights.sum() * WORDS)


@forward
def stratified_times(net: Net, x: Any, target: Any) -> Any:
    t = (torch.arange(len(x)).double() + 0.5) / len(x)
    return F.mse_loss(net.back(net.rows(x * (1 - t[:, None]) + target * t[:, None])), target - x)


@forward
def clipped_at_quantile(net: Net, x: Any, y: Any) -> Any:
    each = F.cross_entropy(net.classes(x), y, reduction="none")
    return torch.where(each < each.detach().quantile(0.8), each, torch.zeros_like(each)).sum() / len(each)


@forward
def masked_selection(net: Net, ids: Any, mask: Any) -> Any:
    return -net.logps(ids).masked_select(mask.bool()).mean()


@forward
def weighted_terms(net: Net, x: Any, y: Any, r: Any) -> Any:
    h = net.rows(x)
    terms = F.cross_entropy(net.head(h), y), F.mse_loss(net.value(h).squeeze(-1), r), net.back(h).abs().mean()
    return (torch.stack(terms) * torch.tensor([0.5, 0.3, 0.2]).double()).sum()


@forward
def assigned_terms(net: Net, x: Any, y: Any, r: Any) -> Any:
    h, terms = net.rows(x), torch.zeros(2).double()
    terms[0] = F.cross_entropy(net.head(h), y)
    terms[1] = F.mse_loss(net.value(h).squeeze(-1), r, reduction="sum")
    return terms.sum()


def pairs(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return values[::2], values[1::2]


# Preferences
FORWARDS |= {
    "dpo_alternating": lambda net, ids, mask, ref: -F.logsigmoid(
        0.1 * torch.sub(*pairs(((net.logps(ids) - ref) * mask).sum(1)))
    ).mean(),
    "dpo_chunks": lambda net, ids, mask, ref: -F.logsigmoid(
        0.1 * torch.sub(*((net.logps(ids) - ref) * mask).sum(1).chunk(2))
    ).mean(),
    "dpo_half": lambda net, ids, mask: (lambda s: -F.logsigmoid(s[: len(s) // 2] - s[len(s) // 2 :]).mean())(
        (net.logps(ids) * mask).sum(1)
    ),
    "dpo_view_halves": lambda net, ids, mask: -F.logsigmoid(
        torch.sub(*(net.logps(ids) * mask).sum(1).view(2, -1))
    ).mean(),
    "dpo_view_pairs": lambda net, ids, mask: -F.logsigmoid((net.logps(ids) * mask).sum(1).view(-1, 2).diff(dim=1)).mean(),
    "ipo": lambda net, ids, mask, ref: (
        (torch.sub(*pairs(((net.logps(ids) - ref) * mask).sum(1) / mask.sum(1))) - 5) ** 2
    ).mean(),
    "simpo": lambda net, ids, mask: -F.logsigmoid(
        2 * torch.sub(*pairs((net.logps(ids) * mask).sum(1) / mask.sum(1))) - 0.5
    ).mean(),
    "hinge": lambda net, ids, mask: torch.relu(1 - torch.sub(*pairs((net.logps(ids) * mask).sum(1)))).mean(),
    "robust_dpo": lambda net, ids, mask: F.binary_cross_entropy_with_logits(
        torch.sub(*pairs((net.logps(ids) * mask).sum(1))), torch.full((len(ids) // 2,), 0.9, dtype=torch.float64)
    ),
    "reward_model": lambda net, x, x2: -F.logsigmoid(torch.sub(*net.score(torch.cat([x, x2])).chunk(2))).mean(),
    "reward_model_split": lambda net, x, x2: -F.logsigmoid(torch.sub(*net.score(torch.cat([x, x2])).split(len(x)))).mean(),
    "reward_model_stacked": lambda net, x, x2: -F.logsigmoid(torch.sub(*net.score(torch.stack([x, x2])))).mean(),
    "reward_model_margin": lambda net, x, x2, w: -F.logsigmoid(
        torch.sub(*net.score(torch.cat([x, x2])).chunk(2)) - w
    ).mean(),
    "reward_model_centered": lambda net, x, x2: (
        -F.logsigmoid(torch.sub(*net.score(torch.stack([x, x2])))).mean() + 0.01 * 0
    ),
    "plackett_luce": lambda net, x, target: -(
        (lambda s: s - s.logcumsumexp(1))(net.classes(x)[:, :FEATURES].gather(1, target.argsort(1)))
    ).sum(1).mean(),
    "all_pairs": lambda net, x, r: F.softplus(
        -(lambda z: z[:, None] - z[None])(net.score(x)) * (r[:, None] - r[None]).sign()
    ).mean(),
    "listnet_over_rows": lambda net, x, r: -(r.softmax(0) * net.score(x).log_softmax(0)).sum(),
    "kto_mean_kl": lambda net, ids, mask, ref, two: (
        lambda d: (1 - torch.sigmoid(0.1 * (2 * two - 1) * (d - d.mean().detach().clamp(min=0)))).mean()
    )(((net.logps(ids) - ref) * mask).sum(1)),
    "kto_given_kl": lambda net, ids, mask, ref, two, w: (
        1 - torch.sigmoid(0.1 * (2 * two - 1) * (((net.logps(ids) - ref) * mask).sum(1) - w.mean()))
    ).mean(),
    "kto_counts": lambda net, ids, mask, ref, two: (
        (1 - torch.sigmoid((2 * two - 1) * ((net.logps(ids) - ref) * mask).sum(1)))
        * torch.where(two > 0, (1 - two).sum() / two.sum().clamp(min=1), 1.0)
    ).mean(),
    "kto_split_by_label": lambda net, ids, mask, ref, two: (
        lambda d: (1 - d[two == 1].sigmoid()).sum() / len(d) + (1 - (-d[two == 0]).sigmoid()).sum() / len(d)
    )(((net.logps(ids) - ref) * mask).sum(1)),
    "bco": lambda net, ids, mask, ref, two, r: -F.logsigmoid(
        (2 * two - 1) * (((net.logps(ids) - ref) * mask).sum(1) - r.mean())
    ).mean(),
    "aot": lambda net, ids, mask: -F.logsigmoid(
        (lambda c, d: c.sort(0).values - d.sort(0).values)(*pairs((net.logps(ids) * mask).sum(1)))
    ).mean(),
}  # fmt: skip


@forward
def dpo_concatenated(net: Net, speech: Any, ids: Any, mask: Any, ref: Any) -> Any:
    """Chosen and rejected are made one batch in the forward, as TRL does."""
    both = torch.cat([ids, ids.flip(1)])
    logps = (net.logps(both) * mask.repeat(2, 1)).sum(1)
    chosen, rejected = logps[: len(ids)], logps[len(ids) :]
    return -F.logsigmoid(0.1 * (chosen - rejected - (ref * mask).sum(1))).mean()


@forward
def orpo(net: Net, ids: Any, labels: Any, mask: Any) -> Any:
    logits = net.logits(ids)
    nll = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    logps = (logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1) * mask).sum(1) / mask.sum(1)
    chosen, rejected = pairs(logps)
    odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    return nll - 0.1 * F.logsigmoid(odds).mean()


@forward
def cpo(net: Net, ids: Any, mask: Any) -> Any:
    logps = (net.logps(ids) * mask).sum(1)
    chosen, rejected = pairs(logps)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean() - chosen.mean()


@forward
def dpo_weighted(net: Net, ids: Any, mask: Any, w: Any) -> Any:
    chosen, rejected = pairs((net.logps(ids) * mask).sum(1))
    weight = w[::2] / w[::2].sum()
    return -(weight * F.logsigmoid(chosen - rejected)).sum()


@forward
def sft_packed_weights(net: Net, ids: Any, labels: Any) -> Any:
    logits = net.logits(ids)[:, :-1]
    targets = labels[:, 1:]
    weights = 1 / (targets != -100).sum(1, keepdim=True).clamp(min=1) * (targets != -100)
    each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (each * weights).sum() / weights.sum()


def similar(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T / 0.1


# Contrastive and self-supervised
FORWARDS |= {
    "info_nce": lambda net, x, z: F.cross_entropy(similar(net.rows(x), z), torch.arange(len(x))),
    "info_nce_both_ways": lambda net, x, z: (
        lambda s: (F.cross_entropy(s, torch.arange(len(x))) + F.cross_entropy(s.T, torch.arange(len(x)))) / 2
    )(similar(net.rows(x), z)),
    "siglip": lambda net, x, z: -F.logsigmoid(
        similar(net.rows(x), z) * (2 * torch.eye(len(x), dtype=torch.float64) - 1)
    ).mean(),
    "sup_con": lambda net, x, y: (
        lambda s: -((y[:, None] == y[None]) * s.log_softmax(1)).sum(1).div((y[:, None] == y[None]).sum(1)).mean()
    )((lambda h: similar(h, h))(net.rows(x))),
    "moco": lambda net, x, z: (lambda h: F.cross_entropy(
        torch.cat([(h * z).sum(1, keepdim=True), h @ net.queue.T], 1), torch.zeros(len(x)).long()
    ))(net.rows(x)),
    "byol": lambda net, x, z: 2 - 2 * F.cosine_similarity(net.rows(x), z).mean(),
    "negatives_rolled": lambda net, x, z: F.triplet_margin_loss(net.rows(x), z, z.roll(1, 0)),
    "negatives_flipped": lambda net, x, z: F.triplet_margin_loss(net.rows(x), z, z.flip(0)),
    "negatives_of_model": lambda net, x, z: F.triplet_margin_loss(
        *(lambda h: (h, z, h.roll(1, 0)))(net.rows(x))
    ),
    "triplet": lambda net, x, z, x2: F.triplet_margin_loss(*(lambda h: (h[0], z, h[1]))(net.rows(torch.stack([x, x2])))),
    "hard_negatives": lambda net, x, z: torch.relu(
        9 + (lambda d: (d + 9 * torch.eye(len(d))).min(1).values)(torch.cdist(net.rows(x), z)) * -1
    ).mean(),
    "barlow": lambda net, x, z: (
        (lambda h: ((h - h.mean(0)) / h.std(0)).T @ z / len(z))(net.rows(x)) - torch.eye(WIDTH)
    ).square().sum(),
    "vicreg": lambda net, x, z: (lambda h: F.mse_loss(h, z) + torch.relu(1 - (h.var(0) + 1e-4).sqrt()).mean())(net.rows(x)),
    "dino": lambda net, x, z: -((z - z.mean(0)).softmax(-1) * net.rows(x).log_softmax(-1)).sum(-1).mean(),
    "swav": lambda net, x, z: -(
        (lambda q: q / q.sum(1, keepdim=True))((z / 0.5).exp() / (z / 0.5).exp().sum(0)) * net.rows(x).log_softmax(-1)
    ).sum(-1).mean(),
    "prototypes_given": lambda net, x, y: F.cross_entropy(net.rows(x) @ net.queue.T, y % 7),
    "prototypes_of_batch": lambda net, x, two: (
        lambda h: F.cross_entropy(-torch.cdist(h, torch.stack([h[two == 0].mean(0), h[two == 1].mean(0)])), two)
    )(net.rows(x)),
    "center": lambda net, x, y: (net.rows(x) - net.queue[y % 7]).square().sum(1).mean(),
    "koleo": lambda net, x: -torch.log(
        (lambda h: (torch.cdist(h, h) + 9 * torch.eye(len(h))).min(1).values)(net.rows(x)) + 1e-8
    ).mean(),
    "uniformity": lambda net, x: (lambda h: torch.pdist(h).pow(2).mul(-2).exp().mean().log())(net.rows(x)),
    "decorrelated_inputs": lambda net, x, z: F.mse_loss(net.rows((x - x.mean(0)) / x.std(0)), z),
    "mae": lambda net, ids, targets: (
        lambda m: ((net.back(net.tokens(ids)) - targets).square().mean(-1) * m).sum() / m.sum()
    )(ids % 2),
    "data2vec": lambda net, x, z: F.smooth_l1_loss(net.rows(x), F.layer_norm(z, (WIDTH,))),
    "batch_normalized_targets": lambda net, x, z: F.smooth_l1_loss(net.rows(x), F.batch_norm(z, None, None, training=True)),
}  # fmt: skip


def each_class(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net.classes(x), y, reduction="none")


# Classification and several tasks
FORWARDS |= {
    "two_tasks": lambda net, x, y, r: (
        lambda h: F.cross_entropy(net.head(h), y) + 0.5 * F.mse_loss(net.value(h).squeeze(-1), r)
    )(net.rows(x)),
    "uncertainties": lambda net, x, y, r: (
        lambda h: F.cross_entropy(net.head(h), y) * (-net.sigmas[0]).exp()
        + net.sigmas[0]
        + F.mse_loss(net.value(h).squeeze(-1), r) * (-net.sigmas[1]).exp()
        + net.sigmas[1]
    )(net.rows(x)),
    "tasks_by_rows": lambda net, x, y, r, two: (
        lambda h: (F.cross_entropy(net.head(h), y, reduction="none") * two).sum() / two.sum()
        + ((net.value(h).squeeze(-1) - r) ** 2 * (1 - two)).sum() / (1 - two).sum()
    )(net.rows(x)),
    "tasks_selected": lambda net, x, y, r, two: (
        lambda h: F.cross_entropy(net.head(h)[two == 1], y[two == 1], reduction="sum") / len(x)
    )(net.rows(x)),
    "class_frequencies": lambda net, x, y: (
        each_class(net, x, y) * (len(y) / torch.bincount(y, minlength=WORDS).clamp(min=1).double())[y]
    ).mean(),
    "class_weights_given": lambda net, x, y: F.cross_entropy(net.classes(x), y, weight=torch.linspace(1, 2, WORDS).double()),
    "effective_number": lambda net, x, y: (
        lambda w: (each_class(net, x, y) * w[y]).sum() / w[y].sum()
    )((1 - 0.9) / (1 - 0.9 ** torch.bincount(y, minlength=WORDS).clamp(min=1).double())),
    "pos_weight": lambda net, x, many: F.binary_cross_entropy_with_logits(
        net.classes(x), many, pos_weight=(1 - many).sum() / many.sum()
    ),
    "pos_weight_by_class": lambda net, x, many: F.binary_cross_entropy_with_logits(
        net.classes(x), many, pos_weight=((1 - many).sum(0) + 1) / (many.sum(0) + 1)
    ),
    "multi_label": lambda net, x, many: F.binary_cross_entropy_with_logits(net.classes(x), many),
    "easier_than_the_mean": lambda net, x, y: (
        lambda each: (each * (each.detach() < each.detach().mean())).sum() / len(x)
    )(each_class(net, x, y)),
    "harder_than_the_mean": lambda net, x, y: (lambda each: torch.where(each > each.mean(), each, 0.1 * each).mean())(
        each_class(net, x, y)
    ),
    "focal": lambda net, x, y: (lambda c: ((1 - (-c).exp()) ** 2 * c).mean())(each_class(net, x, y)),
    "focal_normalized": lambda net, x, y, w: (
        lambda c: (w / w.sum() * (1 - (-c).exp()) ** 2 * c).sum()
    )(each_class(net, x, y)),
    "weights_by_mean": lambda net, x, y, w: (each_class(net, x, y) * w / w.mean()).mean(),
    "weights_quotient": lambda net, x, y, w: (each_class(net, x, y) * w).sum() / w.sum(),
    "weights_normalized_rows": lambda net, x, y, w: (each_class(net, x, y) * F.normalize(w, p=1, dim=0)).sum(),
    "dice_of_batch": lambda net, x, many: 1 - (
        lambda p: 2 * (p * many).sum() / (p.sum() + many.sum())
    )(net.classes(x).sigmoid()),
    "dice_of_rows": lambda net, x, many: (
        1 - (lambda p: 2 * (p * many).sum(1) / (p.sum(1) + many.sum(1) + 1))(net.classes(x).sigmoid())
    ).mean(),
    "ohem": lambda net, x, y: each_class(net, x, y).topk(len(y) // 2).values.mean(),
    "ohem_in_rows": lambda net, ids, labels: F.cross_entropy(
        net.logits(ids).transpose(1, 2), labels, reduction="none"
    ).topk(2, dim=1).values.mean(),
    "small_loss_selection": lambda net, x, y: (
        lambda c: c[c <= c.detach().median()].mean()
    )(each_class(net, x, y)),
    "label_smoothing": lambda net, x, y: F.cross_entropy(net.classes(x), y, label_smoothing=0.1),
    "distillation": lambda net, x, many: F.kl_div(net.classes(x).log_softmax(-1), many.softmax(-1), reduction="batchmean"),
    "distillation_mean": lambda net, x, many: F.kl_div(
        net.classes(x).log_softmax(-1), many.softmax(-1), reduction="none"
    ).sum(-1).mean(),
    "distillation_standardized": lambda net, x, many: F.mse_loss(net.classes(x), (many - many.mean()) / many.std()),
    "distillation_rkd": lambda net, x, z: (lambda h: F.smooth_l1_loss(torch.cdist(h, h), torch.cdist(z, z)))(net.rows(x)),
    "hinge_classes": lambda net, x, y: F.multi_margin_loss(net.classes(x), y),
    "ordinal": lambda net, x, y: F.binary_cross_entropy_with_logits(
        net.classes(x), (torch.arange(WORDS) < y[:, None]).double()
    ),
    "entropy_of_mean": lambda net, x: (lambda p: (p * p.log()).sum())(net.classes(x).softmax(-1).mean(0)),
    "mmd": lambda net, x, two: (
        lambda h: (h[two == 0].mean(0) - h[two == 1].mean(0)).square().sum()
    )(net.rows(x)),
    "coral_centered": lambda net, x, r: (lambda z: ((z - z.mean()) * (r - r.mean())).mean())(net.score(x)),
    "pearson": lambda net, x, r: 1 - (
        lambda z: ((z - z.mean()) * (r - r.mean())).sum() / (z - z.mean()).norm() / (r - r.mean()).norm()
    )(net.score(x)),
    "r_squared_scale": lambda net, x, r: (net.score(x) - r).square().sum() / (r - r.mean()).square().sum(),
    "standardized_targets": lambda net, x, r: F.mse_loss(net.score(x), (r - r.mean()) / r.std()),
    "scaled_by_largest": lambda net, x, r: F.mse_loss(net.score(x), r / r.abs().max()),
    "rows_as_factor": lambda net, x, r: (net.score(x) - r).square().sum() / len(x),
    "rows_as_inner_factor": lambda net, x, r: ((net.score(x) - r).square() / len(x)).sum(),
    "first_row": lambda net, x, r: (net.score(x) - r[0]).square().mean(),
    "first_row_of_model": lambda net, x, r: (lambda z: (z - z[0].detach()).square().mean())(net.score(x)),
    "last_row_weight": lambda net, x, r: ((net.score(x) - r).square() * r[-1].abs()).mean(),
    "positions_of_rows": lambda net, x, r: ((net.score(x) - r).square() * torch.linspace(0, 1, len(x)).double()).mean(),
    "cox": lambda net, x, r, two: -((lambda z: (z - z.logcumsumexp(0)) * two)(net.score(x))).mean(),
    "sorted_quantiles": lambda net, x, r: (net.score(x).sort(0).values - r.sort(0).values).abs().mean(),
    "l2_penalty": lambda net, x, r: F.mse_loss(net.score(x), r) + 1e-3 * net.head.weight.square().sum(),
    "variance_penalty": lambda net, x, r: (lambda z: F.mse_loss(z, r) + 0.1 * z.var())(net.score(x)),
    "activation_penalty": lambda net, x, r: (
        lambda h: F.mse_loss(net.value(h).squeeze(-1), r) + 0.01 * h.square().mean()
    )(net.rows(x)),
    "temporal_smoothness": lambda net, ids, targets: (
        lambda p: F.mse_loss(p, targets) + 0.1 * (p[:, 1:] - p[:, :-1]).square().mean()
    )(net.back(net.tokens(ids))),
    "row_smoothness": lambda net, x, target: (
        lambda p: F.mse_loss(p, target) + 0.1 * (p[1:] - p[:-1]).square().mean()
    )(net.back(net.rows(x))),
}  # fmt: skip

# Detection and segmentation: a row has one box, or tokens are places.
FORWARDS |= {
    "boxes": lambda net, x, target, two: (F.l1_loss(net.back(net.rows(x)), target, reduction="none") * two[:, None]).sum()
    / two.sum().clamp(min=1),
    "boxes_item": lambda net, x, target, two: (
        F.l1_loss(net.back(net.rows(x)), target, reduction="none") * two[:, None]
    ).sum() / max(two.sum().item(), 1),
    "boxes_selected": lambda net, x, target, two: F.l1_loss(
        net.back(net.rows(x))[two > 0], target[two > 0], reduction="sum"
    ) / two.sum().clamp(min=1),
    "boxes_selected_mean": lambda net, x, target, two: F.l1_loss(net.back(net.rows(x))[two > 0], target[two > 0]),
    "focal_boxes": lambda net, x, many: (
        lambda p: (F.binary_cross_entropy_with_logits(p, many, reduction="none") * (p.sigmoid() - many).abs() ** 2).sum()
    )(net.classes(x)) / many.sum().clamp(min=1),
    "centerness": lambda net, x, target, w: (
        F.smooth_l1_loss(net.back(net.rows(x)), target, reduction="none").sum(1) * w
    ).sum() / w.sum(),
    "quality_weights": lambda net, x, target, w: (
        F.smooth_l1_loss(net.back(net.rows(x)), target, reduction="none").sum(1) * (w / w.max())
    ).mean(),
    "levels": lambda net, ids, targets: (lambda p: sum(F.l1_loss(p[:, n], targets[:, n]) for n in range(LENGTH)))(
        net.back(net.tokens(ids))
    ),
    "matched": lambda net, ids, targets: (
        net.back(net.tokens(ids)).gather(1, targets.argsort(1)) - targets.sort(1).values
    ).abs().mean(),
    "background_weight": lambda net, ids, labels: F.cross_entropy(
        net.logits(ids).transpose(1, 2), labels, weight=torch.linspace(0.1, 1, WORDS).double()
    ),
    "negatives_by_ratio": lambda net, x, many: (
        lambda c: (c * many).sum() / many.sum() + (c * (1 - many)).topk(3, dim=1).values.mean()
    )(F.binary_cross_entropy_with_logits(net.classes(x), many, reduction="none")),
    "negatives_by_ratio_of_batch": lambda net, x, many: (
        lambda c: (c * many).sum() + (c * (1 - many)).flatten().topk(int(many.sum())).values.sum()
    )(F.binary_cross_entropy_with_logits(net.classes(x), many, reduction="none")),
    "segments": lambda net, ids, labels: F.cross_entropy(net.logits(ids).permute(0, 2, 1), labels),
    "boundary_weights": lambda net, ids, labels, w: (
        F.cross_entropy(net.logits(ids).permute(0, 2, 1), labels, reduction="none") * w[:, None] / w.mean()
    ).mean(),
}  # fmt: skip

# Speech and sequences
FORWARDS |= {
    "ctc": lambda net, ids, speech: F.ctc_loss(
        net.logits(ids).log_softmax(-1).transpose(0, 1), speech,
        torch.full((len(ids),), LENGTH), torch.full((len(ids),), 2),
    ),
    "ctc_sum": lambda net, ids, speech: F.ctc_loss(
        net.logits(ids).log_softmax(-1).transpose(0, 1), speech,
        torch.full((len(ids),), LENGTH), torch.full((len(ids),), 2), reduction="sum",
    ) / len(ids),
    "mel": lambda net, ids, targets, lengths: (
        lambda m: ((net.back(net.tokens(ids)) - targets).abs() * m[..., None]).sum() / (m.sum() * FEATURES)
    )((torch.arange(LENGTH) < lengths[:, None]).double()),
    "mel_longest": lambda net, ids, targets, lengths: (
        (net.back(net.tokens(ids)) - targets).abs() * (torch.arange(LENGTH) < lengths.max())[None, :, None]
    ).mean(),
    "mel_by_lengths": lambda net, ids, targets, lengths: (
        (net.back(net.tokens(ids)) - targets).abs().mean((1, 2)) * lengths / lengths.sum()
    ).sum(),
    "last_token": lambda net, ids, y, lengths: F.cross_entropy(
        net.head(net.tokens(ids)[torch.arange(len(ids)), lengths - 1]), y
    ),
    "mean_pooled": lambda net, ids, y, lengths: F.cross_entropy(
        net.head(
            (net.tokens(ids) * (torch.arange(LENGTH) < lengths[:, None])[..., None]).sum(1) / lengths[:, None]
        ), y
    ),
    "si_snr": lambda net, ids, targets: -(
        lambda p, s: 10 * torch.log10(
            ((p * s).sum(-1, keepdim=True) * s / s.square().sum(-1, keepdim=True)).square().sum(-1)
            / (p - (p * s).sum(-1, keepdim=True) * s / s.square().sum(-1, keepdim=True)).square().sum(-1)
        )
    )(net.back(net.tokens(ids)).flatten(1), targets.flatten(1)).mean(),
    "time_first": lambda net, ids, targets: F.mse_loss(
        net.back(net.tokens(ids)).transpose(0, 1).reshape(-1, FEATURES), targets.transpose(0, 1).reshape(-1, FEATURES)
    ),
    "negatives_in_row": lambda net, ids, targets: F.cross_entropy(
        (lambda h: torch.bmm(h, targets.transpose(1, 2)))(net.back(net.tokens(ids))).flatten(0, 1),
        torch.arange(LENGTH).repeat(len(ids)),
    ),
    "spectral_norms": lambda net, ids, targets: (
        (net.back(net.tokens(ids)) - targets).flatten(1).norm(dim=1) / targets.flatten(1).norm(dim=1)
    ).mean(),
    "spectral_norm_of_batch": lambda net, ids, targets: (net.back(net.tokens(ids)) - targets).norm() / targets.norm(),
    "sorted_by_length": lambda net, ids, y, lengths: (
        lambda order: F.cross_entropy(net.head(net.tokens(ids[order])[:, 0]), y[order])
    )(lengths.argsort(descending=True)),
    "speaker_centroids": lambda net, x, y: (
        lambda h: F.cross_entropy(h @ h.view(-1, 2, WIDTH).mean(1).T, torch.arange(len(h)) // 2)
    )(net.rows(x)),
    "next_token": lambda net, ids, labels: F.cross_entropy(net.logits(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
    "next_token_z": lambda net, ids, labels: (
        lambda s: F.cross_entropy(s.flatten(0, 1), labels[:, 1:].flatten()) + 1e-3 * s.logsumexp(-1).square().mean()
    )(net.logits(ids)[:, :-1]),
    "positions_added": lambda net, ids, labels: F.cross_entropy(
        net.head(net.body(net.embed(ids) + torch.linspace(0, 1, LENGTH)[:, None].double())).flatten(0, 1), labels.flatten()
    ),
}  # fmt: skip


def noisy(x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.randn_like(x)
    return t[:, None].sqrt() * x + (1 - t[:, None]).sqrt() * noise, noise


@forward
def excess_tokens(net: Net, ids: Any, labels: Any, targets: Any) -> Any:
    each = F.cross_entropy(net.logits(ids).transpose(1, 2), labels, reduction="none").flatten()
    chosen = (each.detach() + targets[..., 0].flatten()).topk(len(each) * 3 // 5).indices
    return (each * torch.zeros_like(each).scatter(0, chosen, 1.0)).sum() / len(chosen)


@forward
def gradient_penalty(net: Net, x: Any, r: Any) -> Any:
    h = net.rows(x)
    z = net.value(h.tanh()).squeeze(-1)
    (g,) = torch.autograd.grad(z.sum(), h, create_graph=True)
    return F.mse_loss(z, r) + g.square().sum(1).mean()


# Diffusion and augmentations
FORWARDS |= {
    "worst_half": lambda net, x, y: each_class(net, x, y).sort(descending=True).values[: len(y) // 2].mean(),
    "ddpm": lambda net, image, t: (lambda z, noise: F.mse_loss(net.back(net.rows(z)), noise))(*noisy(image, t)),
    "ddpm_snr": lambda net, image, t: (
        lambda z, noise: ((net.back(net.rows(z)) - noise).square().mean(1) * (t / (1 - t)).clamp(max=5) * (1 - t) / t).mean()
    )(*noisy(image, t)),
    "ddpm_weights_mean_one": lambda net, image, t: (
        lambda z, noise: ((net.back(net.rows(z)) - noise).square().mean(1) * t / t.mean()).mean()
    )(*noisy(image, t)),
    "flow_matching": lambda net, image, target, t: F.mse_loss(
        net.back(net.rows((1 - t[:, None]) * image + t[:, None] * target)), target - image
    ),
    "flow_minibatch_order": lambda net, image, target, t: F.mse_loss(
        net.back(net.rows((1 - t[:, None]) * image + t[:, None] * target[image[:, 0].argsort()])), image
    ),
    "v_prediction": lambda net, image, target, t: F.mse_loss(
        net.back(net.rows(t[:, None].sqrt() * image + (1 - t[:, None]).sqrt() * target)), t[:, None].sqrt() * target - image
    ),
    "edm": lambda net, image, target, t: (
        (net.back(net.rows(image + t[:, None] * target)) - image).square().sum(1) * (t**2 + 0.25) / (t * 0.5) ** 2
    ).mean(),
    "timestep_counts": lambda net, image, target, steps: (
        (net.back(net.rows(image + target)) - image).square().mean(1) / torch.bincount(steps, minlength=10)[steps]
    ).sum(),
    "stratified_steps": lambda net, image, target, t: (
        lambda s: F.mse_loss(net.back(net.rows(image + s[:, None] * target)), target)
    )((torch.arange(len(t)) + t) / len(t)),
    "guidance_dropout": lambda net, image, x: F.mse_loss(
        net.back(net.rows(image + x * (torch.empty_like(x[:, :1]).uniform_() > 0.1))), image
    ),
    "offset_noise": lambda net, image, target: F.mse_loss(
        net.back(net.rows(image + target + 0.1 * target.mean(1, keepdim=True))), target
    ),
    "batch_offset_noise": lambda net, image, target: F.mse_loss(net.back(net.rows(image + target.mean(0))), target),
    "mixup_flip": lambda net, x, y: (lambda m: 0.7 * F.cross_entropy(m, y) + 0.3 * F.cross_entropy(m, y.flip(0)))(
        net.classes(0.7 * x + 0.3 * x.flip(0))
    ),
    "mixup_roll": lambda net, x, many: F.binary_cross_entropy_with_logits(
        net.classes(0.7 * x + 0.3 * x.roll(1, 0)), 0.7 * many + 0.3 * many.roll(1, 0)
    ),
    "mixup_rows": lambda net, x, many, t: F.binary_cross_entropy_with_logits(
        net.classes(t[:, None] * x + (1 - t[:, None]) * x.flip(0)), t[:, None] * many + (1 - t[:, None]) * many.flip(0)
    ),
    "manifold_mixup": lambda net, x, y: F.cross_entropy(
        net.head(net.body((lambda h: 0.7 * h + 0.3 * h.flip(0))(net.inp(x)))), y
    ),
    "cutmix": lambda net, x, y: (lambda m: 0.5 * F.cross_entropy(m, y) + 0.5 * F.cross_entropy(m, y.flip(0)))(
        net.classes(torch.cat([x[:, :3], x.flip(0)[:, 3:]], 1))
    ),
    "pairs_mixed": lambda net, x, y: F.cross_entropy(
        net.classes((x.view(-1, 2, FEATURES) + x.view(-1, 2, FEATURES).flip(1)).view_as(x)), y
    ),
    "jitter": lambda net, x, y: F.cross_entropy(net.classes(x + 0.1 * torch.randn_like(x)), y),
    "jitter_by_deviation": lambda net, x, y: F.cross_entropy(net.classes(x + 0.1 * x.std(0) * torch.randn_like(x)), y),
    "standardized_inputs": lambda net, x, y: F.cross_entropy(net.classes((x - x.mean(0)) / (x.std(0) + 1e-6)), y),
    "scaled_inputs": lambda net, x, y: F.cross_entropy(net.classes(x / x.abs().max()), y),
    "standardized_rows": lambda net, x, y: F.cross_entropy(
        net.classes((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)), y
    ),
    "quantized_inputs": lambda net, x, y: F.cross_entropy(net.classes((x / x.abs().amax(0) * 127).round() / 127), y),
    "whitened_features": lambda net, x, y: F.cross_entropy(net.head((lambda h: (h - h.mean(0)) / h.std(0))(net.rows(x))), y),
    "context_of_batch": lambda net, x, y: F.cross_entropy(net.classes(x + x.mean(0, keepdim=True)), y),
    "attention_over_rows": lambda net, x, y: F.cross_entropy(
        net.head((lambda h: F.softmax(h @ h.T, -1) @ h)(net.rows(x))), y
    ),
    "ghost_labels": lambda net, x, y: F.cross_entropy(
        net.classes(x), torch.where(torch.arange(len(y)) % 4 == 0, y.roll(1), y)
    ),
    "cumulative": lambda net, x, r: (net.score(x) * r.cumsum(0)).mean(),
    "cumulative_of_model": lambda net, x, r: (net.score(x).cumsum(0) * r).mean(),
}  # fmt: skip
