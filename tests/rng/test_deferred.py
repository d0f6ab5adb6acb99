"""``deferred_init`` and ``materialize`` against constructing on one device."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.device import device_type
from tests.ranks import RankPools
from tests.rng import cases
from tests.rng.constructors import Unusual, standard
from vescale import rng
from vescale.compat import local_of, spec_of
from vescale.placements import RaggedShard, local_region
from vescale.rng import (
    _deferred_replay,
    _engine,
    deferred_init,
    is_deferred,
    materialize,
    materialize_tensor,
)
from vescale.rng._deferred_replay import next_time, part_values
from vescale.rng._deferred_tensor import view_of


@pytest.fixture(autouse=True)
def _stock_torch_afterwards() -> Any:
    yield
    rng.disable()


def built_twice(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """(constructed, deferred), the second after checking generators: at the end, and of draws that follow."""
    torch.manual_seed(5)
    reference = build()
    state, drawn = torch.get_rng_state(), torch.randn(3)
    torch.manual_seed(5)
    with deferred_init():
        module = build()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.randn(3), drawn)
    return reference, module


def assert_same(reference: nn.Module, module: nn.Module) -> None:
    for kind in ("named_parameters", "named_buffers"):
        expected = list(getattr(reference, kind)(remove_duplicate=False))
        actual = list(getattr(module, kind)(remove_duplicate=False))
        assert [name for name, _ in actual] == [name for name, _ in expected]
        for (name, a), (_, b) in zip(expected, actual, strict=True):
            whole = b.full_tensor() if isinstance(b, DTensor) else b
            assert torch.equal(a, whole), name
            assert (a.dtype, a.stride(), a.requires_grad) == (whole.dtype, b.stride(), b.requires_grad), name
            assert isinstance(a, nn.Parameter) == isinstance(b, nn.Parameter), name
    assert len(list(reference.parameters())) == len(list(module.parameters()))  # ties


@pytest.mark.parametrize("build", [standard, Unusual])
def test_whole_modules(build: Callable[[], nn.Module]) -> None:
    reference, module = built_twice(build)
    state = torch.get_rng_state()
    assert materialize(module) is module
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(reference, module)
    assert not any(is_deferred(value) for part in module.modules() for value in part.__dict__.values())
    if isinstance(module, Unusual):
        assert isinstance(reference, Unusual)
        assert torch.equal(module.plain, reference.plain) and torch.equal(module.listed[1], reference.listed[1])
        assert module.rates == reference.rates
        assert module.tied is module.scaled
        with torch.no_grad():  # shared memory is still shared, copies are not
            module.shifted.fill_(7.0)
        assert module.frozen.eq(7.0).all()
        assert module.copied.weight.data_ptr() != module.padded.weight.data_ptr()
    else:
        module.train()
        out = module[6](torch.randn(3, 2, 4))[0]  # LSTM: its flat list of weights is materialized, too
        assert out.shape == (3, 2, 5)


@pytest.mark.parametrize("build", [standard, Unusual])
def test_every_part_of_every_tensor(build: Callable[[], nn.Module]) -> None:
    """All placements, all coordinates, without processes."""
    rng_ = random.Random(1)
    reference, module = built_twice(build)
    expected = dict(reference.named_parameters())
    count = 0
    for name, parameter in module.named_parameters():
        if not is_deferred(parameter) or parameter.ndim == 0:
            continue
        shape = tuple(parameter.shape)
        lies = [((3,), [Shard(dim)]) for dim in range(len(shape))] + [((4,), [RaggedShard((), None, block=3)])]
        lies += [cases.random_placements(rng_, shape, rng_.choice((2, 4, 8))) for _ in range(12)]
        for mesh, placements in lies:
            for coordinate in cases.coordinates(mesh):
                region = local_region(shape, placements, mesh, coordinate)
                part = part_values(view_of(parameter), next_time(), region)
                assert torch.equal(part, cases.part_of(expected[name].detach(), region)), (name, mesh, placements)
                assert part.shape == region.local_shape
                assert part.untyped_storage().nbytes() == part.numel() * part.itemsize
                count += 1
    assert count > 1000


def test_parts_are_computed_without_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names below are elementwise all the way: their whole tensor is never made."""
    _, module = built_twice(Unusual)
    wholes: list[int] = []
    original = _deferred_replay.whole_values
    monkeypatch.setattr(
        _deferred_replay, "whole_values", lambda view, time: wholes.append(view.numel) or original(view, time)
    )
    for name in (
        "scaled",
        "overwritten",
        "padded.weight",
        "packed",
        "experts",
        "truncated",
        "rare",
        "halves",
        "choice",
    ):
        view = view_of(module.get_parameter(name))
        for placements in ([Shard(0)], [RaggedShard()]):
            part_values(view, next_time(), local_region(view.shape, placements, (3,), (1,)))
            assert not wholes, name
    view = view_of(module.get_parameter("orthogonal"))
    part_values(view, next_time(), local_region(view.shape, [Shard(0)], (3,), (1,)))
    assert wholes


@pytest.mark.parametrize("std", [1.0, 0.02])
def test_rejections_of_large_tensors(std: float) -> None:
    """More elements than may be computed for a value that is asked for: no value of the model is, here."""

    def build() -> nn.Module:
        module = nn.Linear(1_100, 1_000, bias=False)
        nn.init.trunc_normal_(module.weight, std=std)
        return module

    reference, module = built_twice(build)
    part = part_values(view_of(module.weight), next_time(), local_region((1_000, 1_100), [Shard(1)], (7,), (3,)))
    assert torch.equal(part, reference.weight.detach().chunk(7, 1)[3])
    assert_same(reference, materialize(module))


def test_overwritten_draws_are_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _, module = built_twice(Unusual)
    filled: list[str] = []
    original = _deferred_replay.fill_region

    def counting(local: Any, fill: Any, *rest: Any) -> None:
        filled.append(fill.op.name)
        original(local, fill, *rest)

    monkeypatch.setattr(_deferred_replay, "fill_region", counting)
    view = view_of(module.get_parameter("overwritten"))  # uniform_, then normal_
    part_values(view, next_time(), local_region(view.shape, [Shard(0)], (3,), (1,)))
    assert filled == ["normal_"]


def test_rejections_are_counted_a_stretch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator ends where the stretch with the most rounds leaves it, wherever that one lies."""
    monkeypatch.setattr(_engine, "_CHUNK_ELEMENTS", 16)

    def build() -> nn.Module:
        shapes = ((40, 5), (3, 7), (0, 4), (16, 16))
        bounds = ((-1.0, 1.0), (1.5, 2.5))
        return nn.ParameterList(nn.init.trunc_normal_(torch.empty(s), 0, 1, *b) for s in shapes for b in bounds)

    reference, deferred = built_twice(build)
    assert_same(reference, materialize(deferred))


HF_MODELS = {
    "llama": ("LlamaForCausalLM", {}),
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "bert": ("BertForMaskedLM", {}),
    "t5": ("T5ForConditionalGeneration", {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8}),
    "vit": ("ViTForImageClassification", {"image_size": 32, "patch_size": 8}),
    "swin": ("SwinForImageClassification", {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "image_size": 32}),
    "mamba": ("MambaForCausalLM", {"state_size": 4}),
    "qwen3 moe": ("Qwen3MoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "pad_token_id": 0,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "decoder_start_token_id": 0,
        },
    ),
    "deepseek": ("DeepseekV3ForCausalLM", {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 8}),
}


def hf_model(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    class_name, options = HF_MODELS[name]
    cls = getattr(transformers, class_name)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    small.update({"num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 16})
    known = cls.config_class().to_dict()
    small = {key: value for key, value in small.items() if key in known}
    if class_name == "SwinForImageClassification":
        small = {}
    model: nn.Module = cls(cls.config_class(**{**small, **options}))
    return model


@pytest.mark.parametrize("name", list(HF_MODELS))
def test_unmodified_hugging_face_models(name: str) -> None:
    reference, module = built_twice(lambda: hf_model(name))
    assert sum(is_deferred(parameter) for parameter in module.parameters()) == len(list(module.parameters()))
    materialize(module)
    assert_same(reference, module)


def on_ranks(build_name: str) -> None:
    rng_ = random.Random(2)
    build = Unusual if build_name == "unusual" else lambda: hf_model("llama tied")
    world = dist.get_world_size()
    mesh = init_device_mesh(device_type(), (2, world // 2), mesh_dim_names=("dp", "tp"))
    reference, module = built_twice(build)
    chosen: dict[str, Any] = {}

    def placements(name: str, tensor: torch.Tensor) -> Any:
        assert "tied" not in name and "lm_head" not in name, "asked once, under the first name"
        if name in ("shifted", "frozen") or tensor.ndim == 0:  # one memory: one placement
            return [Shard(0), Replicate()] if tensor.ndim else None
        lies = [[Shard(0), Shard(tensor.ndim - 1)], [Replicate(), Shard(0)], [Shard(0), Shard(0)], None]
        chosen[name] = rng_.choice(lies if "mask" not in name else [None])
        return chosen[name]

    state = torch.get_rng_state()
    materialize(module, mesh, placements)
    assert torch.equal(torch.get_rng_state(), state)
    assert sum(placed is not None for placed in chosen.values()) > 5
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if chosen.get(name) is not None:
            assert tuple(spec_of(tensor).placements) == tuple(chosen[name])
            region = local_region(tensor.shape, chosen[name], tuple(mesh.shape), mesh.get_coordinate())
            expected = dict([*reference.named_parameters(), *reference.named_buffers()])[name]
            assert torch.equal(local_of(tensor), cases.part_of(expected.detach(), region)), name
    assert_same(reference, module)


@pytest.mark.parametrize("name", ["unusual", "llama"])
def test_dtensors_on_ranks(ranks: RankPools, name: str) -> None:
    ranks.run(on_ranks, name, world_size=4)


def seeds_differ() -> None:
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
    torch.manual_seed(dist.get_rank())
    with deferred_init():
        module = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="same model and seed on every rank"):
        materialize(module, mesh, lambda name, tensor: [Shard(0)])
    rng.disable()


def test_ranks_with_other_seeds_are_refused_on_every_rank(ranks: RankPools) -> None:
    ranks.run(seeds_differ, world_size=2)


def test_nothing_is_allocated() -> None:
    with deferred_init():
        module = nn.Linear(10**7, 10**7)  # 400 TB
        assert module.weight.shape == (10**7, 10**7) and module.weight.device.type == "cpu"
        assert module.weight.untyped_storage().device.type == "meta"
        assert not module.weight.is_meta and isinstance(module.weight, nn.Parameter)
        assert "DeferredTensor" in repr(module.weight) and "Linear" in repr(module)
    part = part_values(view_of(module.weight), next_time(), local_region((10**7, 10**7), [Shard(0)], (10**7,), (9,)))
    assert part.shape == (1, 10**7) and 0 < part.abs().max() < 1


def test_values_that_are_too_large_to_compute_name_the_line() -> None:
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2000, 2000))
            self.scale = self.weight.abs().max().item()  # the line to be named

    with pytest.raises(rng.DeferredValueError, match=r"test_deferred.py:\d+ in __init__") as caught, deferred_init():
        Greedy()
    line = int(str(caught.value).split("test_deferred.py:")[1].split(" ")[0])
    with open(__file__) as source:
        assert "the line to be named" in source.read().splitlines()[line - 1]


QUESTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "bool": lambda w: bool(w.sum() > 0),
    "item": lambda w: w.sum().item(),
    "float": lambda w: float(w.detach().norm()),
    "max": lambda w: w.max().item(),
    "element": lambda w: w[0, 0].item(),
    "tolist": lambda w: w.tolist(),
    "numpy": lambda w: w.detach().numpy().tolist(),
    "nonzero": lambda w: torch.nonzero(w > 0).tolist(),
    "unique": lambda w: torch.unique(w).tolist(),
    "mask": lambda w: w[w > 0].tolist(),
    "equal": lambda w: torch.equal(w, w * 1.5),
    "allclose": lambda w: torch.allclose(w, w + 1e-12),
}


@pytest.mark.parametrize("name", list(QUESTIONS))
def test_every_way_to_ask_for_values(name: str) -> None:
    """Small tensors answer, large ones name the line, whatever the question and however the values were made."""
    question = QUESTIONS[name]
    torch.manual_seed(4)
    expected, after = question(nn.Parameter(torch.randn(5, 4))), torch.get_rng_state()
    torch.manual_seed(4)
    with deferred_init():
        assert question(nn.Parameter(torch.randn(5, 4))) == expected
        assert torch.equal(torch.get_rng_state(), after)
        for weight in (
            torch.randn(1100, 1100),
            torch.empty(1100, 1100).uniform_(),
            torch.rand(1100, 1).expand(1100, 1100) * 2,
        ):
            with pytest.raises(rng.DeferredValueError, match=r"test_deferred.py:\d+ in"):
                question(nn.Parameter(weight))


def test_small_values_are_computed_without_touching_generators() -> None:
    def build() -> nn.Module:
        module = nn.Linear(3, 3)
        module.first = module.weight.max().item()  # type: ignore[assignment]
        module.where = torch.nonzero(torch.rand(6) > 0.5).tolist()
        module.array = torch.rand(3).numpy()
        module.flag = bool(module.weight.sum() > 0)
        return module

    reference, module = built_twice(build)
    for name in ("first", "where", "flag"):
        assert getattr(module, name) == getattr(reference, name)
    assert (module.array == reference.array).all()
    assert_same(reference, materialize(module))


def test_ops_after_the_constructor_are_recorded_too() -> None:
    def finish(module: nn.Module) -> nn.Module:
        with torch.no_grad():
            module.weight.mul_(2.0)  # type: ignore[operator]
            module.bias.data.normal_()  # type: ignore[operator,union-attr]
        return module

    torch.manual_seed(3)
    reference = finish(nn.Linear(4, 6))
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with deferred_init():
        module = nn.Linear(4, 6)
    finish(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(reference, materialize(module))


def test_several_models_and_materialize_inside() -> None:
    """Models made one after the other draw what they draw without deferring, whichever is materialized first."""
    torch.manual_seed(6)
    expected = [nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 2)]
    torch.manual_seed(6)
    with deferred_init():
        first = nn.Linear(4, 5)
    with deferred_init():
        second = nn.Linear(5, 3)
        third = materialize(nn.Linear(3, 2))
        assert not is_deferred(third.weight) and is_deferred(second.weight) and is_deferred(torch.empty(1))
    materialize(second)
    materialize(first)
    for reference, module in zip(expected, (first, second, third), strict=True):
        assert_same(reference, module)


def test_errors() -> None:
    with deferred_init():
        module = nn.Linear(4, 4)
        constant = nn.Linear(4, 4)
    big = torch.ones(100, 100)
    with deferred_init():
        constant.copy = nn.Parameter(big * torch.ones(100, 100))
    big.add_(1)
    with pytest.raises(RuntimeError, match="written to afterwards"):
        materialize(constant)
    with pytest.raises(ValueError, match="without a mesh"):
        materialize(module, placements=lambda name, tensor: [Shard(0)])
    with pytest.raises(TypeError, match="already has its values"):
        materialize_tensor(torch.ones(2))
    with pytest.raises(NotImplementedError, match="replaces the memory"), deferred_init():
        torch.empty(3).resize_(5)
    module.weight.register_hook(lambda grad: grad)
    with pytest.raises(NotImplementedError, match="backward hooks"):
        materialize(module)


def bad_placements() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    torch.manual_seed(0)
    for placements, message in (
        ([Shard(5)], r"weight: .*dim"),
        ([Shard(0), Shard(1)], "weight: 2 placements"),
        ([Partial()], "weight: .*no Partial"),
    ):
        with deferred_init():
            module = nn.Linear(4, 4)
        with pytest.raises(ValueError, match=message):
            materialize(module, mesh, lambda name, tensor, placements=placements: placements)
    with deferred_init():
        module = nn.Linear(4, 4)
        module.view = nn.Parameter(module.weight.data)
    with pytest.raises(RuntimeError, match="shares memory"):
        materialize(module, mesh, lambda name, tensor: [Shard(1)] if name == "view" else [Shard(0)])
    rng.disable()


def test_bad_placements(ranks: RankPools) -> None:
    ranks.run(bad_placements, world_size=2)


_LLAMA = """
import sys, threading, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from transformers import LlamaConfig, LlamaForCausalLM
from vescale.placements import RaggedShard
from vescale.rng import deferred_init, materialize

def resident():  # without pages of files, which the system takes and gives back as it likes
    fields = open("/proc/self/statm").read().split()
    return (int(fields[1]) - int(fields[2])) * 4096

rank, kind = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("fake", rank=rank, world_size=64, store=FakeStore())
mesh = init_device_mesh("cpu", (64,))
config = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=8, num_attention_heads=32,
                     num_key_value_heads=8, vocab_size=128256)
with deferred_init():
    model = LlamaForCausalLM(config)
with deferred_init():  # everything that is imported or cached on first use
    small = LlamaForCausalLM(LlamaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=64))
place = lambda name, tensor: [Shard(0)] if kind == "shard" else [RaggedShard((), None, block=4096)]
materialize(small, mesh, place)
before = peak = resident()
done = threading.Event()
def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, resident())
watcher = threading.Thread(target=watch)
watcher.start()
materialize(model, mesh, place)
done.set()
watcher.join()
shards = sum(p._local_tensor.numel() * 4 for p in model.parameters())
total = sum(p.numel() for p in model.parameters())
print(total, shards, peak - before)
"""


@pytest.mark.parametrize(("rank", "kind"), [(0, "shard"), (37, "ragged")])
def test_llama_on_one_of_64_ranks_holds_its_shards_only(rank: int, kind: str) -> None:
    """The widths of Llama-3-8B, a quarter of its layers; all of it is in benchmarks/rng.py."""
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _LLAMA, str(rank), kind], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    total, shards, grown = map(int, done.stdout.split()[-3:])
    assert total == 2_795_573_248
    assert shards >= 4 * total // 64 * 0.99
    assert grown <= 1.10 * shards, f"{grown / shards:.3f} of the local shards"
