"""Predicted collectives: counts and bytes, whatever asks for them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tests.ir.models import build, llama
from tests.ir.test_lower import tensor_parallel, zero_3
from vescale import plan_zoo
from vescale.estimation import Collective, Prediction, predict
from vescale.plans import Plan


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def predict_llama(plan: Plan, num_layers: int = 2, batch: int = 4, seq: int = 16) -> Prediction:
    model, tokens = llama(num_layers), meta(batch, seq, dtype=torch.int64)
    return predict(model, plan, {"input_ids": tokens, "labels": tokens, "use_cache": False})


def boundaries(prediction: Prediction) -> Counter[tuple[str, str | None, str]]:
    """All but what the loss adds up."""
    return Counter((c.axis, c.op, c.when) for c in prediction.collectives if c.path)


def of_loss(prediction: Prediction) -> list[tuple[str, str, str]]:
    return [(c.axis, c.op, c.target) for c in prediction.collectives if not c.path]


def test_tensor_parallel_llama_has_megatrons_eight_all_reduces() -> None:
    prediction = predict_llama(tensor_parallel())
    assert prediction.stopped is None
    assert boundaries(prediction) == {("tp", "all_reduce", "forward"): 4, ("tp", "all_reduce", "backward"): 4}
    assert prediction.gradients == () and of_loss(prediction) == []
    whole = 4 * 16 * 64 * 4  # batch x sequence x hidden x 4 bytes; a ring moves 2 (n-1)/n of it
    assert {c.num_bytes for c in prediction.collectives} == {whole}


def test_sequence_parallel_llama_has_ten_gathers_and_ten_scatters() -> None:
    prediction = predict_llama(plan_zoo.load("llama", {"dp": 1, "tp": 2}))
    expected = {("tp", op, when): 5 for op in ("all_gather", "reduce_scatter") for when in ("forward", "backward")}
    loss = {
        ("tp", "all_to_all", when): 1 for when in ("forward", "backward")
    }  # whole tokens instead of vocabulary parts
    assert boundaries(prediction) == {**expected, **loss}
    assert of_loss(prediction) == [("tp", "all_reduce", "<nll_loss>")]
    norms = [c for c in prediction.one_by_one if c.target.endswith(".grad")]
    assert len(norms) == 5 and all("norm" in c.path and c.op == "all_reduce" for c in norms)


# (op, phase) of two layers on two ranks, of a causal sequence cut in contiguous parts.
ATTENTION = {
    # Without one, keys and values are gathered all the same.
    None: {("all_gather", "forward"): 4, ("reduce_scatter", "backward"): 4},
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
    target = "<implicit: scaled_dot_product_attention>" if method is None else "<attention>"
    inside = {(c.path, c.target) for c in prediction.collectives if c.path}
    assert inside == {(f"model.layers.{layer}.self_attn", target) for layer in (0, 1)}
    gradients = Counter((c.axis, c.op) for c in prediction.one_by_one if c.target.endswith(".grad"))
    assert gradients == {("dp,cp", "all_reduce"): len(list(llama().parameters()))}
    assert {bucket.axes for bucket in prediction.buckets} == {("dp", "cp")}
    assert of_loss(prediction) == [("dp,cp", "all_reduce", "<nll_loss>")]


def test_bytes_count_what_the_other_axes_leave() -> None:
    prediction = predict_llama(plan_zoo.load("llama", {"dp": 2, "tp": 4 // 2}), num_layers=1)
    activation = 4 * 16 * 64 * 4 // 2  # half the batch on each rank of dp
    gathers = {c.num_bytes for c in prediction.collectives if c.op == "all_gather"}
    assert gathers == {activation // 2}  # each rank of tp lacks the other's half
    lm_head = [c for c in prediction.one_by_one if c.path == "lm_head"]
    half_weight = 128 * 64 * 4 // 2
    quarter = 4 * 16 * 128 * 4 // 2 // 2 // 2  # half the batch, half the vocabulary, half of it for the other rank
    assert lm_head == [
        Collective("lm_head", "<out>", "forward", "tp", "all_to_all", quarter),
        Collective("lm_head", "<out>", "backward", "tp", "all_to_all", quarter),
        Collective("lm_head", "weight.grad", "backward", "dp", "all_reduce", half_weight),
    ]


def test_data_parallel_gradients_are_reduced_once_each() -> None:
    plan = Plan({"dp": 2}).shard("<in>", Shard(0))
    prediction = predict_llama(plan)
    num_parameters = len(list(llama(2).parameters()))
    assert len(prediction.one_by_one) == num_parameters + 1 and of_loss(prediction) == [
        ("dp", "all_reduce", "<nll_loss>")
    ]


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
    return list(predict(model, plan, inputs or {"x": meta(8, 8)}).collectives)


def test_a_column_and_a_row_linear() -> None:
    plan = Plan({"tp": 2}).shard("fc1.(weight|bias)", Shard(0)).shard("fc2.weight", Shard(1))
    plan.shard("fc1.<in>", Replicate()).shard("fc2.<out>", Replicate())
    # The input of the model needs no gradient: nothing comes back through fc1.<in>.
    assert mlp(plan) == [Collective("fc2", "<out>", "forward", "tp", "all_reduce", 8 * 8 * 4)]
    wants = meta(8, 8).requires_grad_()
    found = mlp(plan, x=wants)
    assert found[1] == Collective("fc1", "<in>", "backward", "tp", "all_reduce", 8 * 8 * 4)


def test_what_dtensor_chooses() -> None:
    """A column-cut product of a batch cut over the same axis: DTensor decides who gathers what."""
    plan = Plan({"tp": 2}).shard("<in:x>", Shard(0)).shard("fc1.weight", Shard(0)).shard("fc2.<in>", Replicate())
    found = [c for c in mlp(plan) if c.path == "fc2" and c.target == "<in>"]
    assert [(c.op, c.num_bytes, c.when) for c in found] == [("all_gather", 8 * 16 * 4 // 2, "forward")]


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
        raise RuntimeError("not more")


def test_values_made_of_constants_are_known_and_an_error_ends_the_step() -> None:
    with torch.device("meta"):
        model = Branches()
    plan = Plan({"dp": 2}).shard("<in:x>", Shard(0)).shard("fc.<out>", Replicate())
    prediction = predict(model, plan, {"x": meta(4, 8)})
    assert [c.op for c in prediction.collectives].count("all_gather") == 1  # the first branch was taken, once
    assert prediction.stopped == "RuntimeError: not more"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["attention"])
def test_models_of_any_ops(name: str) -> None:
    model = build(name)
    plan = Plan({"dp": 2}).shard("<in>", Shard(0)).shard("<out>", Replicate())
    prediction = predict(model, plan, {"x": meta(4, 6, 12)})
    assert prediction.stopped is None
    assert [(c.op, c.when) for c in prediction.collectives if c.target == "<out>"] == [("all_gather", "forward")]


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
    found = predict(model, plan, {"x": meta(4, 8)}).collectives
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
        model = Heads().requires_grad_(False)  # so that x is not saved
    prediction = predict(model, plan, {"x": meta(2, 4, 8).requires_grad_()})
    found = Counter((c.path, c.when, c.op) for c in prediction.collectives if c.target == "<in>" and c.path)
    assert found == {
        (path, when, op): 1
        for path in ("q", "v")
        for when, op in (("forward", "all_gather"), ("backward", "reduce_scatter"))
    }


@pytest.mark.parametrize("path", ["", "0", "1"])
def test_precision_outside_of_units(path: str) -> None:
    """Casts of parameters move nothing."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = Plan({"dp": 2}).shard("<in>", {"dp": Shard(0)})
    before = predict(model, plan, {"input": meta(4, 4)})
    plan.precision(path, param="bfloat16", reduce="float32")
    found = predict(model, plan, {"input": meta(4, 4)})
    assert [(c.axis, c.op, c.path) for c in found.collectives] == [(c.axis, c.op, c.path) for c in before.collectives]


def test_equal_layers_are_run_twice_and_counted_all() -> None:
    """What is seen of the first and the last layer holds for all."""
    plan = plan_zoo.load("llama", {"dp": 2, "tp": 2})
    few, many = (predict_llama(plan, num_layers) for num_layers in (2, 6))
    of_layers = Counter((c.op, c.axis, c.when) for c in few.collectives if ".layers." in c.path)
    assert Counter((c.op, c.axis, c.when) for c in many.collectives if ".layers." in c.path) == {
        key: 3 * count for key, count in of_layers.items()
    }
    assert {c.path for c in many.collectives if c.path.endswith("mlp")} == {f"model.layers.{n}.mlp" for n in range(6)}
    assert [gradient.name for gradient in many.gradients] == [
        f"{name}.grad" for name, _ in reversed(list(llama(6).named_parameters()))
    ]
