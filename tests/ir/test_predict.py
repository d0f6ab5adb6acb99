"""Predicted collectives: known counts and bytes, and "unknown" where they are not known."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.ir.models import build, llama
from tests.ir.test_lower import tensor_parallel, zero_3
from vescale import lower, plan_zoo
from vescale.ir import Collective, Prediction, predict
from vescale.ir._placement_flow import Flow, rule_for
from vescale.plans import Plan


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def predict_llama(plan: Plan, num_layers: int = 2, batch: int = 4, seq: int = 16) -> Prediction:
    model, tokens = llama(num_layers), meta(batch, seq, dtype=torch.int64)
    return predict(lower(plan, model), model, {"input_ids": tokens, "labels": tokens, "use_cache": False})


def boundaries(prediction: Prediction) -> Counter[tuple[str, str | None, str]]:
    return Counter((c.axis, c.op, c.when) for c in prediction.collectives if c.target.startswith("<"))


def test_tensor_parallel_llama_has_megatrons_eight_all_reduces() -> None:
    prediction = predict_llama(tensor_parallel())
    assert prediction.stopped is None
    assert boundaries(prediction) == {("tp", "all_reduce", "forward"): 4, ("tp", "all_reduce", "backward"): 4}
    assert not any(c.target.endswith(".grad") for c in prediction.collectives)
    whole = 4 * 16 * 64 * 4  # batch x sequence x hidden x 4 bytes; a ring moves 2 (n-1)/n of it
    assert {c.num_bytes for c in prediction.collectives} == {whole}


def test_sequence_parallel_llama_has_ten_gathers_and_ten_scatters() -> None:
    prediction = predict_llama(plan_zoo.load("llama", {"dp": 1, "tp": 2}))
    expected = {("tp", op, when): 5 for op in ("all_gather", "reduce_scatter") for when in ("forward", "backward")}
    loss = {
        ("tp", "all_to_all", when): 1 for when in ("forward", "backward")
    }  # whole tokens instead of vocabulary parts
    assert boundaries(prediction) == {**expected, **loss}
    norms = [c for c in prediction.collectives if c.target.endswith(".grad")]
    assert len(norms) == 5 and all("norm" in c.path and c.op == "all_reduce" for c in norms)


# (op, phase) of two layers on two ranks, of a causal sequence cut in contiguous parts.
ATTENTION = {
    None: {},
    "all_gather": {("all_gather", "forward"): 2, ("reduce_scatter", "backward"): 2},
    # The first rank's keys go to the second; again in backward, and their gradients after them, and home.
    "ring": {("all_to_all", "forward"): 2, ("all_to_all", "backward"): 2 * 3},
    "ulysses": {("all_to_all", "forward"): 8, ("all_to_all", "backward"): 8},
}


@pytest.mark.parametrize("method", ATTENTION)
def test_context_parallel_llama_reduces_all_gradients_over_both_axes(method: Any) -> None:
    """Batch and sequence are cut, labels are not; both are the same tensor, which is two inputs for all that."""
    plan = Plan({"dp": 2, "cp": 2}).shard("<in:input_ids>", {"dp": Shard(0), "cp": Shard(1)})
    if method is not None:
        plan.attention(r"model.layers.\d+.self_attn", method, mesh="cp")
    prediction = predict_llama(plan)
    assert prediction.stopped is None
    assert boundaries(prediction) == {("cp", op, when): n for (op, when), n in ATTENTION[method].items()}
    assert {c.path for c in prediction.collectives if c.target == "<attention>"} == (
        {f"model.layers.{layer}.self_attn" for layer in (0, 1)} if method else set()
    )
    gradients = Counter((c.axis, c.op) for c in prediction.collectives if c.target.endswith(".grad"))
    num_parameters = len(list(llama().parameters()))
    assert gradients == {("dp", "all_reduce"): num_parameters, ("cp", "all_reduce"): num_parameters}
    assert {bucket.axes for bucket in prediction.buckets} == {("dp", "cp")}
    assert all(c.target == "<attention>" for c in prediction.unbucketed)


def test_bytes_count_what_the_other_axes_leave() -> None:
    prediction = predict_llama(plan_zoo.load("llama", {"dp": 2, "tp": 4 // 2}), num_layers=1)
    activation = 4 * 16 * 64 * 4 // 2  # half the batch on each rank of dp
    gathers = {c.num_bytes for c in prediction.collectives if c.op == "all_gather"}
    assert gathers == {activation // 2}  # each rank of tp lacks the other's half
    lm_head = [c for c in prediction.collectives if c.path == "lm_head"]
    half_weight = 128 * 64 * 4 // 2
    quarter = 4 * 16 * 128 * 4 // 2 // 2 // 2  # half the batch, half the vocabulary, half of it for the other rank
    assert lm_head == [
        Collective("lm_head", "weight.grad", "backward", "dp", "all_reduce", half_weight),
        Collective("lm_head", "<out>", "forward", "tp", "all_to_all", quarter),
        Collective("lm_head", "<out>", "backward", "tp", "all_to_all", quarter),
    ]


def test_data_parallel_gradients_are_reduced_once_each() -> None:
    plan = Plan({"dp": 2}).shard("<in>", Shard(0))
    prediction = predict_llama(plan)
    num_parameters = len(list(llama(2).parameters()))
    assert prediction.count("all_reduce", "dp") == len(prediction.collectives) == num_parameters


def test_parameters_gathered_by_layer() -> None:
    prediction = predict_llama(zero_3())
    layers = [c for c in prediction.collectives if ".layers." in c.path]
    assert Counter((c.target, c.when, c.op) for c in layers) == {
        ("<unit>", "forward", "all_gather"): 2,
        ("<unit>", "backward", "all_gather"): 2,
        ("<unit>.grad", "backward", "reduce_scatter"): 2,
    }
    total = sum(p.numel() * 4 for name, p in llama(2).named_parameters() if ".layers." in name)
    gathered = sum(c.num_bytes or 0 for c in layers if c.when == "forward")
    assert total * 3 // 4 <= gathered <= 1.01 * total * 3 // 4  # no row is cut, which costs some padding


def mlp(plan: Plan, **inputs: Any) -> list[Collective]:
    model = build("mlp")
    return list(predict(lower(plan, model), model, inputs or {"x": meta(8, 8)}).collectives)


def test_a_column_and_a_row_linear() -> None:
    plan = Plan({"tp": 2}).shard("fc1.(weight|bias)", Shard(0)).shard("fc2.weight", Shard(1))
    plan.shard("fc1.<in>", Replicate()).shard("fc2.<out>", Replicate())
    # The input of the model needs no gradient: nothing comes back through fc1.<in>.
    assert mlp(plan) == [Collective("fc2", "<out>", "forward", "tp", "all_reduce", 8 * 8 * 4)]
    wants = meta(8, 8).requires_grad_()
    found = mlp(plan, x=wants)
    assert found[0] == Collective("fc1", "<in>", "backward", "tp", "all_reduce", 8 * 8 * 4)


def test_what_depends_on_a_choice_is_unknown() -> None:
    """A column-cut product of a batch cut over the same axis: DTensor decides who gathers what."""
    plan = Plan({"tp": 2}).shard("<in:x>", Shard(0)).shard("fc1.weight", Shard(0)).shard("fc2.<in>", Replicate())
    found = [c for c in mlp(plan) if c.path == "fc2" and c.target == "<in>"]
    assert [(c.op, c.num_bytes, c.when) for c in found] == [(None, None, "forward"), (None, None, "backward")]


def test_a_declared_source_makes_it_known() -> None:
    plan = Plan({"tp": 2}).shard("<in:x>", Shard(0)).shard("fc1.weight", Shard(0))
    plan.redistribute("fc2.<in>", Shard(-1), Replicate())
    found = [c for c in mlp(plan) if c.path == "fc2" and c.when == "forward"]
    assert [c.op for c in found] == ["all_gather"]


def test_axes_of_one_rank_communicate_nothing() -> None:
    assert predict_llama(plan_zoo.load("llama", {"dp": 1, "tp": 1})).collectives == ()


class Branches(nn.Module):
    """Reads values of tensors it made itself, then of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(8, device=x.device) < 5
        if not mask.all() and int(mask.sum()) == 5:
            x = self.fc(x)
        return x if x.sum() > 0 else self.fc(x)


def test_values_made_of_constants_are_known_and_others_stop_the_walk() -> None:
    with torch.device("meta"):
        model = Branches()
    plan = Plan({"dp": 2}).shard("<in:x>", Shard(0)).shard("fc.<out>", Replicate())
    prediction = predict(lower(plan, model), model, {"x": meta(4, 8)})
    assert prediction.count("all_gather") == 1  # the first branch was taken, once
    assert prediction.stopped is not None and "meta" in prediction.stopped
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["attention"])
def test_models_beyond_the_rules_are_walked_too(name: str) -> None:
    model = build(name)
    plan = Plan({"dp": 2}).shard("<in>", Shard(0)).shard("<out>", Replicate())
    prediction = predict(lower(plan, model), model, {"x": meta(4, 6, 12)})
    assert prediction.stopped is None
    assert [c.op for c in prediction.collectives if c.target == "<out>"] == [None, None]


class Reuse(nn.Module):
    """One tensor read by two modules, a parameter along a cut dim, and one in an op without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gain, self.odd = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x) * self.gain
        return self.two(x) + self.two(x) + torch.cdist(x, self.odd.expand(1, 8))


def test_other_readers_of_a_tensor_see_it_as_it_was() -> None:
    with torch.device("meta"):
        model = Reuse()
    plan = Plan({"tp": 2}).shard("one.(weight|bias)", Shard(0)).shard("two.<in>", Replicate())
    found = predict(lower(plan, model), model, {"x": meta(4, 8)}).collectives
    gathers = [c for c in found if c.path == "two" and c.when == "forward"]
    assert [c.op for c in gathers] == ["all_gather"]  # of the cut tensor, for both calls, as when it runs


def test_modules_share_the_conversion_of_an_input() -> None:
    """What one module passes on, until it is written to."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            both = self.q(x) + self.k(x)
            return both + self.v(x.add_(1))

    plan = Plan({"tp": 2}).shard("<in:x>", Shard(1), mesh="tp")
    plan.shard("(q|k|v).weight", Shard(0), mesh="tp").shard("(q|k|v).<in>", Replicate(), mesh="tp")
    with torch.device("meta"):
        model = Heads()
    prediction = predict(lower(plan, model), model, {"x": meta(2, 4, 8).requires_grad_()})
    found = [(c.path, c.when, c.op) for c in prediction.collectives if c.target == "<in>"]
    assert found == [
        (path, when, op)
        for path in ("q", "v")
        for when, op in (("forward", "all_gather"), ("backward", "reduce_scatter"))
    ]


def test_gradients_that_are_not_followed_are_unknown() -> None:
    with torch.device("meta"):
        model = Reuse()
    plan = Plan({"tp": 2}).shard("one.(weight|bias)", Shard(0)).shard("two.<in>", Replicate())
    found = predict(lower(plan, model), model, {"x": meta(4, 8)}).collectives
    gradients = {f"{c.path}.{c.target}": c.op for c in found if c.target.endswith(".grad")}
    # What is added to an unknown sum may get any gradient, too.
    assert gradients == dict.fromkeys((".gain.grad", ".odd.grad", "two.weight.grad", "two.bias.grad"))


R, S0 = Replicate(), Shard(0)


@pytest.mark.parametrize(
    ("name", "lies", "shapes", "result", "arguments", "expected"),
    [
        ("mul", [S0, R], [(4, 8), (8,)], (4, 8), (), S0),
        ("mul", [S0, S0], [(4, 8), (8,)], (4, 8), (), None),  # the second is cut along the last dim
        ("mul", [Shard(1), S0], [(4, 8), (8,)], (4, 8), (), Shard(1)),
        ("mul", [S0, R], [(1, 8), (4, 8)], (4, 8), (), None),  # cut along a dim that is broadcast
        ("__add__", [Partial(), Partial()], [(4,), (4,)], (4,), (), Partial()),
        ("__add__", [Partial(), R], [(4,), (4,)], (4,), (), None),
        ("mul", [Partial(), Partial()], [(4,), (4,)], (4,), (), None),
        ("logaddexp", [S0, S0], [(4, 8), (4, 8)], (4, 8), (), S0),
        ("__rmul__", [Shard(1), R], [(4, 8), (8,)], (4, 8), (), Shard(1)),
        ("max", [S0], [(4, 8)], (4,), (None, 1), None),
        ("softmax", [S0], [(4, 8)], (4, 8), (None, -1), S0),
        ("logaddexp", [S0, S0], [(4, 8), (4, 8)], (4, 8), (), S0),
        ("__rmul__", [Shard(1), R], [(4, 8), (8,)], (4, 8), (), Shard(1)),
        ("max", [S0], [(4, 8)], (4,), (None, 1), None),
        ("softmax", [S0], [(4, 8)], (4, 8), (None, 0), None),
        ("layer_norm", [Shard(1), R], [(4, 8, 6), (6,)], (4, 8, 6), (None, (6,)), Shard(1)),
        ("layer_norm", [Shard(2), R], [(4, 8, 6), (6,)], (4, 8, 6), (None, (6,)), None),
        ("view", [Shard(2)], [(4, 8, 6)], (4, 8, 2, 3), (), Shard(2)),
        ("view", [Shard(2)], [(4, 8, 6)], (4, 8, 3, 2), (), None),  # three heads on two ranks
        ("view", [Shard(1)], [(4, 8, 6)], (32, 6), (), None),
        ("view", [Shard(1)], [(1, 8, 6)], (8, 6), (), S0),
        ("reshape", [S0], [(4, 8, 6)], (32, 6), (), S0),
        ("transpose", [Shard(1)], [(4, 8, 6)], (4, 6, 8), (None, 1, -1), Shard(2)),
        ("unsqueeze", [Shard(1)], [(4, 8)], (4, 1, 8), (None, 1), Shard(2)),
        ("cat", [S0, S0], [(4, 8), (4, 8)], (4, 16), (), S0),
        ("cat", [S0, S0], [(4, 8), (4, 8)], (8, 8), (), None),
        ("cat", [S0, R], [(4, 8), (4, 8)], (4, 16), (), None),
        ("cat", [R, S0], [(0,), (4, 8)], (4, 8), (), S0),
        ("cat", [R, S0], [(0, 8), (4, 8)], (4, 8), (), None),
        ("matmul", [Shard(1), Shard(1)], [(4, 2, 8, 6), (4, 2, 6, 8)], (4, 2, 8, 8), (), Shard(1)),
        ("matmul", [Shard(1), R], [(4, 2, 8, 6), (4, 2, 6, 8)], (4, 2, 8, 8), (), None),
        ("matmul", [Shard(2), Shard(2)], [(4, 2, 8, 6), (4, 2, 6, 8)], (4, 2, 8, 8), (), None),
        ("matmul", [S0, S0], [(2, 8, 6), (4, 2, 6, 8)], (4, 2, 8, 8), (), None),
        ("addmm", [R, S0, R], [(8,), (4, 6), (6, 8)], (4, 8), (), S0),
        ("addmm", [R, R, S0], [(8,), (4, 6), (6, 8)], (4, 8), (), None),
        ("addmm", [S0, R, Shard(1)], [(8,), (4, 6), (6, 8)], (4, 8), (), Shard(1)),
        ("addmm", [R, R, Shard(1)], [(8,), (4, 6), (6, 8)], (4, 8), (), None),
        ("addmm", [S0, R, Shard(1)], [(4, 8), (4, 6), (6, 8)], (4, 8), (), None),
        ("addmm", [R, Shard(1), S0], [(8,), (4, 6), (6, 8)], (4, 8), (), None),
        ("permute", [Shard(2)], [(4, 8, 6)], (6, 4, 8), (None, 2, 0, 1), S0),
        ("permute", [S0], [(4, 8, 6)], (6, 8, 4), (None, (-1, 1, 0)), Shard(2)),
        ("expand", [S0], [(4, 1, 8)], (3, 4, 2, 8), (None, 3, 4, 2, 8), Shard(1)),
        ("expand", [Shard(1)], [(4, 1, 8)], (4, 2, 8), (None, 4, 2, 8), None),
        ("linear", [S0, R], [(4, 8), (6, 8)], (4, 6), (), S0),
        ("linear", [Shard(1), R], [(4, 8), (6, 8)], (4, 6), (), None),
        ("linear", [R, S0], [(4, 8), (6, 8)], (4, 6), (), Shard(1)),
        ("linear", [S0, S0], [(4, 8), (6, 8)], (4, 6), (), None),
        ("linear", [Shard(1), Shard(1)], [(4, 8), (6, 8)], (4, 6), (), Partial()),
        ("linear", [S0, Shard(1)], [(4, 8), (6, 8)], (4, 6), (), None),
        ("embedding", [R, Shard(1)], [(4,), (6, 8)], (4, 8), (), Shard(1)),
        ("embedding", [S0, R], [(4,), (6, 8)], (4, 8), (), S0),
        ("embedding", [S0, S0], [(4,), (6, 8)], (4, 8), (), None),
        ("scaled_dot_product_attention", [Shard(1), R, R], [(2, 4, 8, 3)] * 3, (2, 4, 8, 3), (), Shard(1)),
        ("scaled_dot_product_attention", [Shard(2), R, R], [(2, 4, 8, 3)] * 3, (2, 4, 8, 3), (), Shard(2)),
        ("conv2d", [S0, R, R], [(4, 3, 8, 8), (5, 3, 2, 2), (5,)], (4, 5, 4, 4), (), S0),
        ("conv2d", [Shard(2), R, R], [(4, 3, 8, 8), (5, 3, 2, 2), (5,)], (4, 5, 4, 4), (), None),
        ("conv2d", [S0, S0, R], [(4, 3, 8, 8), (6, 3, 2, 2), (6,)], (4, 6, 4, 4), (), None),
        ("conv2d", [R, S0, S0], [(4, 3, 8, 8), (6, 3, 2, 2), (6,)], (4, 6, 4, 4), (), Shard(1)),
        ("conv2d", [Shard(1), S0, S0], [(4, 4, 8, 8), (6, 4, 2, 2), (6,)], (4, 6, 4, 4), (), None),
        ("conv2d", [Shard(1), Shard(1), R], [(4, 4, 8, 8), (6, 4, 2, 2), (6,)], (4, 6, 4, 4), (), Partial()),
        ("conv2d", [Shard(1), R], [(4, 4, 8, 8), (4, 1, 2, 2)], (4, 4, 4, 4), (0, 0, None, 1, 0, 1, 4), Shard(1)),
        ("conv2d", [Shard(1), S0], [(4, 3, 8, 8), (3, 1, 2, 2)], (4, 3, 4, 4), (0, 0, None, 1, 0, 1, 3), None),
        ("conv_transpose2d", [R, Shard(1), R], [(4, 3, 8, 8), (3, 6, 2, 2), (6,)], (4, 6, 9, 9), (), Shard(1)),
        ("conv_transpose2d", [Shard(1), S0], [(4, 4, 8, 8), (4, 6, 2, 2)], (4, 6, 9, 9), (), Partial()),
        ("batch_norm", [S0, R, R, R, R], [(4, 6, 8), *[(6,)] * 4], (4, 6, 8), (), S0),
        ("batch_norm", [Shard(1), S0, S0, R, R], [(4, 6, 8), *[(6,)] * 4], (4, 6, 8), (), Shard(1)),
        ("batch_norm", [Shard(2), R, R, R, R], [(4, 6, 8), *[(6,)] * 4], (4, 6, 8), (), Shard(2)),
        ("batch_norm", [S0, S0, S0, R, R], [(4, 6, 8), *[(6,)] * 4], (4, 6, 8), (), None),
        ("chunk", [S0], [(4, 8)], (4, 4), (None, 2, 1), S0),
        ("chunk", [Shard(1)], [(4, 8)], (4, 4), (None, 2, 1), None),
        ("__getitem__", [S0], [(4, 8)], (4, 1, 8), (None, (slice(None), None)), S0),
        ("__getitem__", [Shard(1)], [(4, 8)], (4, 1, 8), (None, (slice(None), None)), Shard(2)),
        ("__getitem__", [Shard(2)], [(4, 8, 6)], (8, 6), (None, 1), Shard(1)),
        ("__getitem__", [Shard(2)], [(4, 8, 6)], (4, 6), (None, (..., 0, slice(None))), Shard(1)),
        ("__getitem__", [Shard(1)], [(4, 8)], (4, 7), (None, (..., slice(1, None))), None),
        ("__getitem__", [S0], [(4, 8)], (8,), (None, 1), None),
        ("squeeze", [Shard(2)], [(4, 1, 8)], (4, 8), (None, 1), Shard(1)),
        ("movedim", [S0], [(4, 6, 8)], (6, 8, 4), (None, 0, -1), Shard(2)),
        ("select", [Shard(2)], [(4, 6, 8)], (4, 8), (None, 1, 0), Shard(1)),
        ("select", [Shard(1)], [(4, 6, 8)], (4, 8), (None, 1, 0), None),
        ("narrow", [Shard(1)], [(4, 6, 8)], (4, 3, 8), (None, 1, 0, 3), None),
        ("unbind", [Shard(1)], [(4, 6, 8)], (6, 8), (None, 0), S0),
        ("T", [S0], [(4, 6)], (6, 4), (None,), Shard(1)),
        ("diagonal", [S0], [(4, 4)], (4,), (None,), None),
        ("view", [S0], [(5, 4, 6)], (5, 4, 2, 3), (), S0),
        ("reshape", [S0], [(5, 4, 6)], (20, 6), (), None),
        ("view", [S0], [(5, 4)], (1, 5, 4), (), Shard(1)),
        ("whatever", [R, R], [(4,), (4,)], (4,), (), R),
        ("whatever", [S0], [(4,)], (4,), (), None),
    ],
)
def test_rules(name: str, lies: Any, shapes: Any, result: Any, arguments: Any, expected: Any) -> None:
    flow = Flow(lies, [meta(*shape) for shape in shapes], meta(*result), arguments, {}, 2)
    assert rule_for(name, flow) == expected


@pytest.mark.parametrize("path", ["", "0", "1"])
def test_precision_outside_of_units(path: str) -> None:
    """Casts of parameters move nothing."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = Plan({"dp": 2}).shard("<in>", {"dp": Shard(0)})
    before = predict(lower(plan, model), model, (meta(4, 4),))
    plan.precision(path, param="bfloat16", reduce="float32")
    found = predict(lower(plan, model), model, (meta(4, 4),))
    assert [(c.axis, c.op, c.path) for c in found.collectives] == [(c.axis, c.op, c.path) for c in before.collectives]
