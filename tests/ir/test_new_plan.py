"""``new_plan``: what it finds in hand-written modules, by the entries that it writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vescale
from vescale.ir import check, new_plan
from vescale.plans import Plan, PlanError

TP = {"tp": 2}


def heads(x: torch.Tensor, number: int) -> torch.Tensor:
    return x.unflatten(-1, (number, -1)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(
        self, num_heads: int = 4, num_keys: int = 4, fused: str = "", norm: bool = False, rope: bool = False
    ) -> None:
        super().__init__()
        self.num_heads, self.num_keys, self.fused = num_heads, num_keys, fused
        size = 32 // num_heads
        angles = torch.ones(6, 1, size // 2)
        self.rope = torch.polar(angles, angles) if rope else None
        if fused:
            self.qkv = nn.Linear(32, 32 + 2 * num_keys * size)
        else:
            self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, num_keys * size), nn.Linear(32, num_keys * size)
        self.o = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(size if norm else 32)
        self.normed = norm

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.rope.to(x.device)).flatten(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused == "parts":
            q, k, v = (heads(part, self.num_heads) for part in self.qkv(x).chunk(3, -1))
        elif self.fused == "heads":
            q, k, v = self.qkv(x).view(*x.shape[:2], self.num_heads, 3, -1).permute(3, 0, 2, 1, 4).unbind(0)
        elif self.fused == "select":
            packed = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1)
            q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
        elif self.fused == "unequal":
            sizes = [32, 8 * self.num_keys, 8 * self.num_keys]
            parts = self.qkv(x).split(sizes, -1)
            q, k, v = (heads(part, n) for part, n in zip(parts, (self.num_heads, self.num_keys, self.num_keys)))
        else:
            q, k, v = heads(self.q(x), self.num_heads), heads(self.k(x), self.num_keys), heads(self.v(x), self.num_keys)
        if self.rope is not None:  # of complex numbers, as in Meta's Llama
            q, k = (self.rotated(t.transpose(1, 2)).transpose(1, 2) for t in (q, k))
        if self.normed:
            q, k = self.norm(q), self.norm(k)
        k, v = (t[:, :, None].expand(-1, -1, q.shape[1] // t.shape[1], -1, -1).flatten(1, 2) for t in (k, v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def lines(model: nn.Module, x: torch.Tensor | None = None, mesh: dict[str, int] = TP, **options: object) -> str:
    x = torch.empty(4, 6, 32) if x is None else x
    plan = new_plan(model, mesh, x, **options)
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert not [f for f in check(plan, model, {"x": x.to("meta")}) if f.rule != "unused-axis"]
    return plan.to_yaml()


PLAIN = ("(q|k|v).(weight|bias): {tp: S(0)}", "(q|k|v).<in>: {tp: R}", "o.weight: {tp: S(1)}", "o.<out>: {tp: R}")


@pytest.mark.parametrize(
    ("build", "entries"),
    [
        (lambda: Attention(), PLAIN),
        (lambda: Attention(norm=True), PLAIN),
        (lambda: Attention(rope=True), PLAIN),
        (lambda: Attention(num_keys=2), PLAIN),
        (
            lambda: Attention(num_keys=1),
            ("q.(weight|bias): {tp: S(0)}", "(q|k|v).<in>: {tp: R}", "o.weight: {tp: S(1)}"),
        ),
        (lambda: Attention(fused="parts"), ('qkv.(weight|bias): {tp: "Interleaved(0, 3)"}', "o.weight: {tp: S(1)}")),
        (lambda: Attention(fused="select"), ('qkv.(weight|bias): {tp: "Interleaved(0, 3)"}', "o.weight: {tp: S(1)}")),
        (lambda: Attention(fused="heads"), ("qkv.(weight|bias): {tp: S(0)}", "o.weight: {tp: S(1)}")),
    ],
)
def test_attention(build: Callable[[], nn.Module], entries: tuple[str, ...]) -> None:
    text = lines(build())
    for entry in entries:
        assert f"  {entry}\n" in text, text
    assert "Attention: sharded by heads" in text


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: Attention(num_heads=1, num_keys=1), "attention has one head"),
        (lambda: Attention(num_keys=2, fused="unequal"), "unequal parts"),
    ],
)
def test_attention_that_stays_whole(build: Callable[[], nn.Module], why: str) -> None:
    text = lines(build())
    assert not any("shard" in line for line in text.splitlines() if not line.startswith("#"))
    assert why in text.replace("\n# ", " ")


class Feed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(32, 64), nn.Linear(32, 64)
        self.down, self.norm = nn.Linear(32 if kind == "packed" else 64, 32), nn.LayerNorm(64)
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "gated":
            return x + self.down(F.silu(self.a(x)) * self.b(x))
        if self.kind == "packed":
            gate, up = self.a(x).chunk(2, -1)
            return x + self.down(F.gelu(gate) * up)
        if self.kind == "scaled":
            return x + self.down(F.dropout(self.a(x).relu() * self.scale))
        if self.kind == "normed":
            return x + self.down(self.norm(self.a(x)))
        if self.kind == "sliced":
            return x + self.down(torch.cat([self.a(x)[..., 3:], self.b(x)[..., :3]], -1))
        return x + F.linear(self.a(x).relu(), self.down.weight)


@pytest.mark.parametrize(
    ("kind", "entries"),
    [
        ("gated", ("(a|b).(weight|bias): {tp: S(0)}", "(a|b).<in>: {tp: R}", "down.weight: {tp: S(1)}")),
        ("packed", ('a.(weight|bias): {tp: "Interleaved(0, 2)"}', "down.weight: {tp: S(1)}", "down.<out>: {tp: R}")),
        ("scaled", ("a.(weight|bias): {tp: S(0)}", "scale: {tp: S(0)}", "down.weight: {tp: S(1)}")),
        ("normed", ()),
        ("sliced", ()),
        ("in the code of another module", ()),
    ],
)
def test_feed_forward(kind: str, entries: tuple[str, ...]) -> None:
    text = lines(Feed(kind))
    for entry in entries:
        assert f"  {entry}\n" in text, text
    assert ("shard:" in text) == bool(entries)


class Residual(nn.Module):
    """Without norms: what is added to the residual is a candidate, too, with more weights than one layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16)) for _ in range(2))
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def test_layers_that_together_have_more_weights_than_what_is_between_them() -> None:
    text = lines(Residual(), torch.empty(4, 16))
    for entry in ("${layer}.0.(weight|bias): {tp: S(0)}", "${layer}.1.weight: {tp: S(1)}"):
        assert f"  {entry}\n" in text, text


class Small(nn.Module):
    """A language model of two layers, with tied table and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(100, 32), nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.Sequential(Attention(), Feed("gated")) for _ in range(2))
        self.head = nn.Linear(32, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def test_a_language_model() -> None:
    tokens = torch.zeros(4, 6, dtype=torch.int64)
    model = Small()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    text = lines(model, tokens, {"dp": 2, "tp": 2}, zero=3)
    for entry in (
        "<in:x>: {dp: S(0)}",
        "(embed|head).weight: {tp: S(0)}",
        "embed.<out>: {tp: R}",
        "head.<in>: {tp: R}",
        "head.<out>: {tp: S(1)}",
        r"${layer}.\d+.(q|k|v).(weight|bias): {tp: S(0)}",
        r"${layer}.\d+.down.<out>: {tp: R}",
        "- {dp: Ragged, phase: init}",
    ):
        assert f" {entry}\n" in text, text
    assert "positions.weight" not in text.partition("shard:")[2]
    assert model.training
    assert all(id(p) == before[n][0] and torch.equal(p, before[n][1]) for n, p in model.named_parameters())


def test_the_sequence() -> None:
    text = lines(Small(), torch.zeros(4, 6, dtype=torch.int64), sequence=True)
    for entry in (
        r"${layer}.<in:input>: {tp: S(1)}",
        "layers.1.<out:0>: {tp: R}",
        r"${layer}.\d+.down.<out>: {tp: S(1)}",
    ):
        assert f"  {entry}\n" in text, text


def test_a_layer_that_mixes_tokens_keeps_the_sequence() -> None:
    class Mixing(Feed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + x.flip(1))

    class Model(Small):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(Attention(), Mixing("gated")) for _ in range(2))

    text = lines(Model(), torch.zeros(4, 6, dtype=torch.int64), sequence=True)
    assert "The sequence is not sharded in layers: flip" in text
    assert "S(1)}" not in text.replace("weight: {tp: S(1)}", "").replace("head.<out>: {tp: S(1)}", "")


def test_inputs_are_guessed() -> None:
    assert "<in:x>: {dp: S(0)}" in new_plan(Feed("gated"), {"dp": 2}).to_yaml()
    assert "<in:x>: {dp: S(0)}" in new_plan(Small(), {"dp": 2}).to_yaml()
    assert vescale.new_plan is new_plan


class Two(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: new_plan(Two(), TP), r"inputs of Two.forward\(x, y\) cannot be guessed"),
        (lambda: new_plan(Feed("gated"), TP, torch.empty(2, 3)), "does not run on the meta device"),
        (lambda: new_plan(Feed("gated"), {"pp": 2}), "axis 'pp' of the mesh .* is unused"),
        (lambda: new_plan(Feed("gated"), {"dp": 2}, zero=4), "zero=4"),
        (lambda: new_plan(Feed("gated"), TP, zero=3), "zero=3 shards over the batch's axes"),
        (lambda: new_plan(Feed("gated"), TP, batch_axes=["x"]), "batch_axes names 'x'"),
    ],
)
def test_errors(call: Callable[[], object], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        call()
