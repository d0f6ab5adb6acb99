"""LoRA by PEFT, added before and after ``parallelize``: training, saving, loading and generating as on one device."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from tests.ranks import RankPools
from tests.runtime.hf import quiet
from tests.runtime.llama import make_mesh
from tests.runtime.test_generate import build
from tests.whole import whole, whole_tensors
from vescale import parallelize, plan_zoo
from vescale.runtime import implicit_communication

peft = pytest.importorskip("peft")

_TARGETS = {"llama": ["q_proj", "o_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}


def adapted(kind: str, plan: Any, when: str, *, strict: bool = True, **options: Any) -> tuple[Any, Any]:
    """The model with adapters, and what was given to parallelize; without a plan, on one device."""
    model = build(kind).train()
    if options:  # PiSSA has no float64
        model = model.float()
    config = peft.LoraConfig(**{"r": 4, "target_modules": _TARGETS[kind], "init_lora_weights": False, **options})
    is_later = when.startswith("after")
    if plan is not None and is_later:
        parallelize(model, plan)
        if when == "after, of a copy":  # which has not run
            model = copy.deepcopy(model)
    torch.manual_seed(5)
    found = peft.get_peft_model(model, config)
    if plan is not None and not is_later:
        parallelize(found, plan, strict=strict and kind == "llama")
    return found, model if is_later else found


def trained(kind: str, sizes: dict[str, int], when: str, folder: str) -> None:
    quiet()
    mesh = make_mesh(**sizes)
    plan = plan_zoo.load(kind, mesh)
    if when == "before, with entries":
        plan.shard(r".*\.q_proj\.lora_B\..*\.weight", Shard(0), mesh="tp")
        plan.shard(r".*\.(o_proj|down_proj)\.lora_A\..*\.weight", Shard(1), mesh="tp")
    reference, _ = adapted(kind, None, when)
    model, parallelized = adapted(kind, plan, when)
    if when == "before, with entries":
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"
        assert model.get_parameter(name).placements[1] == Shard(0)
    pairs = list(zip(reference.named_parameters(), model.named_parameters(), strict=True))
    assert all(one == other for (one, _), (other, _) in pairs)
    assert all(torch.equal(a, whole(b.detach())) for (_, a), (_, b) in pairs), "the same adapters to begin with"
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.05) for m in (reference, model)
    ]
    ids = torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    for step in range(2):
        for each, optimizer in zip((reference, model), optimizers):
            torch.manual_seed(step)  # dropout
            each(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    found: Any = whole_tensors(dict(model.named_parameters()))
    for name, expected in reference.named_parameters():
        # The loss is computed in float32.
        torch.testing.assert_close(found[name], expected.detach(), rtol=1e-4, atol=2e-5)
    if kind == "llama" and not when.startswith("after"):
        assert not implicit_communication(parallelized)
    model.save_pretrained(folder)
    again = peft.PeftModel.from_pretrained(build(kind), folder)
    states = [peft.get_peft_model_state_dict(each) for each in (model, again)]
    assert set(states[0]) == set(states[1])
    assert all(torch.equal(whole(value), states[1][name].to(value.dtype)) for name, value in states[0].items())
    doubled = {name: value * 2 for name, value in states[1].items()}
    for each in (reference, model):
        each.eval()
        assert not peft.set_peft_model_state_dict(each, doubled).unexpected_keys
    tokens = [each.generate(input_ids=ids[:2], max_new_tokens=4, do_sample=False) for each in (reference, model)]
    assert torch.equal(*tokens)


CASES = [
    ("llama", {"dp": 1, "tp": 2}, "before, with entries"),
    ("llama", {"dp": 1, "tp": 2}, "after"),
    pytest.param("llama", {"dp": 2, "tp": 2}, "before", marks=pytest.mark.slow),
    pytest.param("llama", {"dp": 2, "tp": 2}, "before, with entries", marks=pytest.mark.slow),
    pytest.param("llama", {"dp": 2, "tp": 2}, "after", marks=pytest.mark.slow),
    pytest.param("llama", {"dp": 1, "tp": 2}, "after, of a copy", marks=pytest.mark.slow),
    pytest.param("gpt2", {"dp": 1, "tp": 2}, "before", marks=pytest.mark.slow),
    pytest.param("gpt2", {"dp": 1, "tp": 2}, "after", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "sizes", "when"), CASES)
def test_training_as_on_one_device(
    ranks: RankPools, tmp_path: Path, kind: str, sizes: dict[str, int], when: str
) -> None:
    ranks.run(trained, kind, sizes, when, str(tmp_path), world_size=sizes["dp"] * sizes["tp"])


def written_bases() -> None:
    """PiSSA reads the base weights, and writes what is left of them: to the shards."""
    quiet()
    options = {"init_lora_weights": "pissa", "target_modules": ["q_proj"]}
    reference, _ = adapted("llama", None, "after", **options)
    model, _ = adapted("llama", plan_zoo.load("llama", make_mesh(dp=1, tp=2)), "after", **options)
    found: Any = whole_tensors(dict(model.named_parameters()))
    for name, expected in reference.named_parameters():
        torch.testing.assert_close(found[name], expected.detach(), msg=name)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert isinstance(layer.base_layer.weight, DTensor) and "weight" not in vars(layer.base_layer)


def merged(when: str, sizes: dict[str, int], folder: str) -> None:
    """A second adapter, from files, a combination of both, and what is left when they are merged into the model. Entries of
    adapted layers are gone then, so that their outputs are placed where they are used."""
    quiet()
    rank, ids = torch.distributed.get_rank(), torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    reference, _ = adapted("llama", None, when)
    model, _ = adapted("llama", plan_zoo.load("llama", make_mesh(**sizes)), when, strict=False)
    models = [each.eval() for each in (reference, model)]
    if rank == 0:
        reference.save_pretrained(folder)
    torch.distributed.barrier()

    def check(what: str) -> None:
        expected, found = (each(input_ids=ids).logits for each in models)
        torch.testing.assert_close(whole(found), expected, msg=what)

    for each in models:
        each.load_adapter(folder, "second")
        each.set_adapter("second")
    check("second")
    for each in models:
        each.add_weighted_adapter(["default", "second"], [0.5, 0.25], "both", combination_type="linear")
        each.set_adapter("both")
    check("both")
    plain = models[1](input_ids=ids).logits.detach()
    for each in models:
        each.merge_adapter()
    check("merged")
    for each in models:
        each.unmerge_adapter()
    check("unmerged")
    torch.testing.assert_close(whole(models[1](input_ids=ids).logits), whole(plain))
    models = [each.merge_and_unload() for each in models]
    check("unloaded")
    names = dict(models[0].named_parameters())
    for name, parameter in models[1].named_parameters():
        torch.testing.assert_close(whole(parameter.detach()), names[name].detach(), msg=name)
    tokens = [each.generate(input_ids=ids[:2], max_new_tokens=4, do_sample=False) for each in models]
    assert torch.equal(*tokens)


MERGED = [
    ("before", {"dp": 1, "tp": 2}),
    pytest.param("after", {"dp": 1, "tp": 2}, marks=pytest.mark.slow),
    pytest.param("before, with entries", {"dp": 1, "tp": 2}, marks=pytest.mark.slow),
    pytest.param("after", {"dp": 2, "tp": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("when", "sizes"), MERGED)
def test_several_adapters_and_merging(ranks: RankPools, tmp_path: Path, when: str, sizes: dict[str, int]) -> None:
    ranks.run(merged, when, sizes, str(tmp_path), world_size=sizes["dp"] * sizes["tp"])


@pytest.mark.slow
def test_adapters_that_write_to_their_base(ranks: RankPools) -> None:
    ranks.run(written_bases, world_size=2)


def shared_matrices() -> None:
    """VeRA makes matrices for all layers, by the shapes of these, before any layer is adapted."""
    quiet()
    config = peft.VeraConfig(r=4, target_modules=["q_proj", "down_proj"])
    model = build("llama").float().train()
    models = [build("llama").float().train(), parallelize(model, plan_zoo.load("llama", make_mesh(dp=1, tp=2)))]
    ids = torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    states = []
    for each in models:
        torch.manual_seed(5)
        found = peft.get_peft_model(each, config)
        found(input_ids=ids, labels=ids).loss.backward()
        states.append({name: p.grad for name, p in found.named_parameters() if p.requires_grad})
    gradients: Any = whole_tensors(states[1])
    assert states[0] and set(states[0]) == set(gradients)
    for name, expected in states[0].items():
        torch.testing.assert_close(gradients[name], expected, rtol=1e-4, atol=1e-6, msg=name)


def test_matrices_that_layers_share(ranks: RankPools) -> None:
    ranks.run(shared_matrices, world_size=2)
