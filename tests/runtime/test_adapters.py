"""LoRA by PEFT, added before and after ``parallelize``: training, saving, loading and generating as on one device."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.device import device_type
from tests.examples import daily_sample
from tests.ranks import RankPools, run_cases
from tests.runtime.hf import quiet
from tests.runtime.llama import make_mesh
from tests.runtime.test_generate import build
from tests.whole import whole, whole_tensors
from vescale import Plan, parallelize, plan_zoo
from vescale.errors import NotPicklableError
from vescale.runtime import implicit_communication

peft = pytest.importorskip("peft")

_TARGETS = {"llama": ["q_proj", "o_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}


def with_adapters(model: Any, config: Any) -> Any:
    """Without a default device: some methods of PEFT draw by a generator of the CPU into tensors of that device."""
    with torch.device("cpu"):
        return peft.get_peft_model(model, config)


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
        found = with_adapters(each, config)
        found(input_ids=ids, labels=ids).loss.backward()
        states.append({name: p.grad for name, p in found.named_parameters() if p.requires_grad})
    gradients: Any = whole_tensors(states[1])
    assert states[0] and set(states[0]) == set(gradients)
    for name, expected in states[0].items():
        torch.testing.assert_close(gradients[name], expected, rtol=1e-4, atol=1e-6, msg=name)


def test_matrices_that_layers_share(ranks: RankPools) -> None:
    ranks.run(shared_matrices, world_size=2)


_ALL = ["q_proj", "down_proj"]
METHODS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 4, "target_modules": _ALL, "init_lora_weights": False, "use_dora": True},
    "LoraConfig, saved head": {"r": 4, "target_modules": _ALL, "modules_to_save": ["lm_head"]},
    "LNTuningConfig": {"target_modules": ["input_layernorm"]},
    "VeraConfig": {"r": 4, "target_modules": _ALL},
    "RandLoraConfig": {"r": 4, "target_modules": ["q_proj"]},
    "BOFTConfig": {"boft_block_size": 4, "target_modules": ["q_proj"]},
    "OFTConfig": {"oft_block_size": 4, "r": 0, "target_modules": ["q_proj"]},
    "IA3Config": {"target_modules": ["v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LoHaConfig": {"r": 4, "target_modules": _ALL, "init_weights": False},
    "FourierFTConfig": {"n_frequency": 10, "target_modules": _ALL},
    "VBLoRAConfig": {"num_vectors": 8, "vector_length": 4, "topk": 2, "target_modules": _ALL},
    "PromptTuningConfig": {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3},
    "PromptEncoderConfig": {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3, "encoder_hidden_size": 8},
    "PrefixTuningConfig": {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3},
    "AdaptionPromptConfig": {"task_type": "CAUSAL_LM", "adapter_len": 2, "adapter_layers": 1},
}


def plan_named(name: str) -> Plan:
    if name == "zero":
        return Plan(init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))).zero(3)
    return plan_zoo.load("llama", make_mesh(**{"dp": 1, "tp": 1, name: 2}))


def method_follows(method: str, plan: str, folder: str) -> None:
    """Two steps, the adapter's file, tokens, and the model into which the adapter is merged."""
    quiet()
    rank, ids = torch.distributed.get_rank(), torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    found: list[list[Any]] = []
    for is_parallel in (False, True):
        torch.manual_seed(3)
        base = build("llama").float().train()
        torch.manual_seed(5)
        model = with_adapters(base, getattr(peft, method.split(",")[0])(**METHODS[method]))
        if is_parallel:
            parallelize(model, plan_named(plan))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        losses = []
        for step in range(2):
            torch.manual_seed(step)
            losses.append(model(input_ids=ids, labels=ids).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        file = f"{folder}/{method}, {plan}, {is_parallel}"
        if is_parallel or rank == 0:
            model.save_pretrained(file)
        torch.distributed.barrier()
        kept = peft.load_peft_weights(file, device="cpu")
        mask = torch.ones_like(ids[:2])
        tokens = model.generate(input_ids=ids[:2], attention_mask=mask, max_new_tokens=3, do_sample=False)
        results = [*(whole(loss.detach()) for loss in losses), tokens, *(kept[name] for name in sorted(kept))]
        if hasattr(model.base_model, "merge_and_unload") and "Adaption" not in method:
            model = model.merge_and_unload()
            results.append(whole(model(input_ids=ids).logits.detach()))
            results += [x for _, x in sorted(whole_tensors(dict(model.named_parameters())).items())]
        found.append(results)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4)


def methods(names: tuple[str, ...], folder: str) -> None:
    run_cases(
        method_follows, daily_sample([(name, plan, folder) for name in names for plan in ("tp", "zero", "dp")], 3)
    )


DAILY = "VeraConfig", "BOFTConfig", "LNTuningConfig", "PromptEncoderConfig"


@pytest.mark.parametrize("names", [DAILY, pytest.param(tuple(METHODS), marks=pytest.mark.slow)], ids=["daily", "all"])
def test_methods_of_peft(ranks: RankPools, tmp_path: Path, names: tuple[str, ...]) -> None:
    ranks.run(methods, names, str(tmp_path), world_size=2)


def copies_of_parts() -> None:
    model = parallelize(build("llama"), plan_named("zero"))
    with pytest.raises(NotPicklableError, match=r"cannot be copied separately.*before parallelize"):
        peft.get_peft_model(model, peft.LoraConfig(**METHODS["LoraConfig, saved head"]))


def test_parts_of_units_are_not_copied_alone(ranks: RankPools) -> None:
    ranks.run(copies_of_parts, world_size=2)
