"""Searches: figures against vescale.estimate, what is rejected and why, the command, bad input."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.tensor import Shard

import vescale
from tests.plan_search.models import MODELS, changed, staged_llama
from vescale.cli import main
from vescale.errors import EstimateOptionError
from vescale.estimation import Device, device_of, estimate
from vescale.ir import check
from vescale.plan_search import Search, search
from vescale.plan_search._choice import Choice, plan_of
from vescale.plan_search._figures import communication
from vescale.plan_search._search import Looked
from vescale.plans import Plan

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
MEMORY, SECONDS = 0.12, 0.10  # how far a closed form may be off


def config(folder: Path, **changes: Any) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps({**CONFIG, **changes}))
    return f"hf:{file}"


def decoder(kind: str, **sizes: Any) -> torch.nn.Module:
    import transformers

    given = {name: value for name, value in CONFIG.items() if name not in ("model_type", "architectures")}
    made = getattr(transformers, f"{kind}Config")(**{**given, **sizes})
    with torch.device("meta"):
        return getattr(transformers, f"{kind}ForCausalLM")(made)


def small(memory: float) -> Device:
    table = device_of("h100-80g")
    return replace(table, name="small", memory_bytes=int(memory), outside_bytes={})


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["Llama", "Mixtral"])
def test_closed_form_is_the_estimate(kind: str, seed: int) -> None:
    """Of drawn choices, with drawn policies, on a mesh of 16 ranks."""
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 2} if kind == "Mixtral" else {}
    model, batch = decoder(kind, **sizes), {"input_ids": (32, 128)}
    found = search(model, devices=16, batch=batch, exact=0)
    generator = random.Random(f"{kind} {seed}")
    one_stage = [one for one in found.proposals if one.choice.pp == 1]
    looked = Looked(model, 16, batch, found.device)
    for proposal in generator.sample(one_stage, 2):
        policy = generator.choice(("none", "selective", "full"))
        choice, plan = changed(proposal, checkpoint=policy)
        known = estimate(model, plan, batch=batch, device=found.device, steps=2)
        own = looked.figures(choice)
        assert own.peak_bytes == pytest.approx(known.peak_bytes, rel=MEMORY), choice
        assert own.step_seconds == pytest.approx(known.step_seconds, rel=SECONDS), choice
        assert own.terms["compute"] == pytest.approx(known.time.compute, rel=0.01), choice


@pytest.mark.parametrize("seed", range(3))
def test_closed_form_of_stages_is_the_estimate(seed: int) -> None:
    model, batch = decoder("Llama", num_hidden_layers=8), {"input_ids": (32, 128)}
    found = search(model, devices=8, batch=batch, exact=0)
    generator = random.Random(seed)
    staged = [one for one in found.proposals if one.choice.pp > 1 and one.choice.microbatches <= 8]
    proposal = generator.choice(staged)
    choice, plan = changed(proposal, checkpoint=("none", "selective", "full")[seed])
    known = estimate(model, plan, batch=batch, device=found.device, steps=2)
    own = Looked(model, 8, batch, found.device).figures(choice)
    assert own.peak_bytes == pytest.approx(known.peak_bytes, rel=MEMORY / 2), choice
    assert own.step_seconds == pytest.approx(known.step_seconds, rel=SECONDS), choice
    assert own.terms["compute"] == pytest.approx(known.time.compute, rel=0.01), choice
    device = sum(own.terms[name] for name in ("compute", "memory", "exposed", "bubble"))
    assert device == pytest.approx(known.time.device_seconds, rel=SECONDS), choice


def test_closed_form_of_interleaved_stages_is_the_estimate() -> None:
    """The last rank has the head in one of its stages alone; a bubble in proportion to its work was a quarter too long."""
    model, batch = decoder("Llama", num_hidden_layers=8), {"input_ids": (16, 128)}
    looked = Looked(model, 4, batch, small(1e12))
    choice = Choice(looked.sources[0], pp=4, schedule="Interleaved1F1B", microbatches=4)
    known = estimate(model, plan_of(choice, looked.facts), batch=batch, device=looked.table, steps=2).time
    own = looked.figures(choice)
    assert sum(own.terms[name] for name in ("compute", "memory", "exposed", "bubble")) == pytest.approx(
        known.device_seconds, rel=0.05
    )


@pytest.mark.parametrize("trained", ["q_proj", "lm_head"])
def test_closed_form_with_frozen_parts(trained: str) -> None:
    """The optimizer has the tensors that are trained, and buckets their gradients alone."""
    model, batch = decoder("Llama", num_hidden_layers=8), {"input_ids": (16, 128)}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    looked = Looked(model, 4, batch, small(1e12))
    choice = Choice(looked.sources[0], dp=4)
    known = estimate(model, plan_of(choice, looked.facts), batch=batch, device=looked.table, steps=2)
    own = looked.figures(choice)
    assert own.step_seconds == pytest.approx(known.step_seconds, rel=0.05)
    assert own.peak_bytes == pytest.approx(known.peak_bytes, rel=MEMORY)
    profile = looked._profile(choice)
    moved = sum(communication(profile, choice, 4, profile.arrays(profile.num_blocks), looked.setting))
    assert moved == pytest.approx(sum(known.time.collectives.values()), rel=1e-3)


@pytest.mark.parametrize(("layers", "zero", "precision"), [(6, 3, None), (2, 1, None), (4, 3, "bfloat16")])
def test_closed_form_of_much_more_parameters_than_activations(layers: int, zero: int, precision: str | None) -> None:
    """Gradients that wait for their bucket, and copies in another dtype, are not there with ZeRO; few blocks are units as
    many are."""
    model, batch = decoder("Llama", num_hidden_layers=layers, hidden_size=512), {"input_ids": (8, 16)}
    looked = Looked(model, 8, batch, small(1e12), precision=precision)
    choice = Choice(looked.sources[0], dp=8, zero=zero, checkpoint="full" if layers == 6 else "none")
    plan = plan_of(choice, looked.facts, precision)
    known = estimate(model, plan, batch=batch, device=looked.table, steps=2)
    assert looked.figures(choice).peak_bytes == pytest.approx(known.peak_bytes, rel=0.06)


@pytest.mark.parametrize("trained", ["self_attn", "lm_head", ""])
@pytest.mark.parametrize(("zero", "replicas"), [(3, 2), (3, 1), (1, 1)])
def test_closed_form_of_collectives_with_zero(trained: str, zero: int, replicas: int) -> None:
    """Units gather trained and frozen parameters apart, blocks that no gradient reaches once, and each reduces its own
    gradients among replicas."""
    model, batch = decoder("Llama", num_hidden_layers=4), {"input_ids": (8, 16)}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    looked = Looked(model, 4, batch, small(1e12))
    choice = Choice(looked.sources[0], dp=4 // replicas, replicas=replicas, zero=zero)
    known = estimate(model, plan_of(choice, looked.facts), batch=batch, device=looked.table, steps=1)
    profile = looked._profile(choice)
    moved = sum(communication(profile, choice, 2, profile.arrays(profile.num_blocks), looked.setting))
    assert moved == pytest.approx(sum(known.time.collectives.values()), rel=0.01)


def test_stages_are_checked_on_fewer_blocks() -> None:
    """A check of stages traces every block; two for each stage find what all of them do."""
    looked = Looked(decoder("Llama", num_hidden_layers=6), 4, {"input_ids": (8, 64), "labels": (8, 64)}, small(1e12))
    given = {"pp": 2, "dp": 2, "schedule": "1F1B", "microbatches": 2}
    short = looked._shortened(Choice(looked.sources[0], **given))
    assert [name for name, _ in short.get_submodule("model.layers").named_children()] == ["0", "1", "2", "3"]
    assert len(looked.skeleton.get_submodule("model.layers")) == 6, "the model stays"
    plan = plan_of(Choice(looked.sources[0], **given), looked.facts)
    assert check(plan, short) == check(plan, looked.skeleton) == ()
    plan.shard(r"model.layers.\d+.mlp.up_projection.weight", Shard(0), mesh="dp")
    assert [one.rule for one in check(plan, short)] == [one.rule for one in check(plan, looked.skeleton)] != []


def test_every_choice_has_an_answer() -> None:
    """What fits is ranked, what does not has a reason, and nothing is both. Every mesh has all devices."""
    found = search(decoder("Llama"), devices=4, batch={"input_ids": (8, 64)}, device=small(20e6), exact=2)
    fits = 20e6 / 1.08  # with the margin
    seconds = [one.figures.step_seconds for one in found.proposals]
    assert seconds == sorted(seconds)
    known = next(one for one in found.proposals if one.figures.is_exact)
    first = found.proposals[: found.proposals.index(known)]
    assert all(one.choice.pp > 1 for one in first), (
        "what is faster than the first estimate is estimated, too, but for stages"
    )
    assert all(math.prod(one.choice.axes.values()) == 4 for one in found.proposals)
    assert all(one.figures.needed_bytes <= fits for one in found.proposals)
    rejected = [json.dumps(one.what, sort_keys=True) for one in found.rejected]
    assert not set(rejected) & {json.dumps(one.choice.describe(), sort_keys=True) for one in found.proposals}
    assert all(one.reason for one in found.rejected)
    assert {"memory", "slower", "mesh"} <= {one.rule for one in found.rejected}
    memory = [one for one in found.rejected if one.rule == "memory"]
    assert all(one.needed_bytes is not None and one.needed_bytes > fits for one in memory)
    again = estimate(decoder("Llama"), known.plan(), batch={"input_ids": (8, 64)}, device=small(20e6), steps=2)
    assert again.needed_bytes == known.figures.needed_bytes and again.step_seconds == known.figures.step_seconds


def test_of_equally_fast_plans_the_one_with_less_memory_is_first() -> None:
    """And the fastest of each kind is estimated, after which nothing of its kind has another scale."""
    found = search(decoder("Llama"), devices=8, batch={"input_ids": (16, 64)}, device="h100-80g", exact=1)
    pairs = list(zip(found.proposals, found.proposals[1:]))
    assert all(
        one.figures.needed_bytes <= two.figures.needed_bytes
        for one, two in pairs
        if round(one.figures.step_seconds, 6) == round(two.figures.step_seconds, 6)
    )
    kinds = {(one.choice.tp, one.choice.ep) for one in found.proposals if one.choice.pp == 1}
    estimated = {(one.choice.tp, one.choice.ep) for one in found.proposals if one.figures.is_exact}
    assert kinds == estimated and len(kinds) > 1
    assert all(seconds >= 0 for one in found.proposals for seconds in one.figures.terms.values())


def test_output_fits_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    call = ["search", "--model", config(tmp_path), "--devices", "4", "--batch", "8", "--seq", "32", "--exact", "0"]
    assert main([*call, "--rejected"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_more_memory_is_never_worse() -> None:
    """What fits a small device fits a larger one, and the best is at least as fast."""
    given = {"devices": 4, "batch": {"input_ids": (8, 64)}, "exact": 0}
    sizes = [search(decoder("Llama"), device=small(memory), **given) for memory in (20e6, 30e6, 200e6)]
    best = [one.best.figures.step_seconds for one in sizes if one.best is not None]
    assert best == sorted(best, reverse=True) and len(best) >= 2
    policies = [{one.choice.checkpoint for one in found.proposals} for found in sizes]
    assert policies[-1] == {"none"} and policies[0] != {"none"}


def test_stages_have_as_much_as_their_blocks() -> None:
    """A pipeline's memory: more micro-batches never need more, and two stages need less than the whole model."""
    found = search(staged_llama().float(), devices=4, batch={"input_ids": (16, 32)}, exact=0)
    staged = [one for one in found.proposals if one.choice.pp > 1]
    assert {one.choice.pp for one in staged} == {2, 4}
    whole = next(one for one in found.proposals if one.choice.axes == {"dp": 4} and one.choice.zero == 0)
    two = [one for one in staged if one.choice.axes == {"pp": 2, "dp": 2} and one.choice.schedule == "1F1B"]
    two = [one for one in two if one.choice.zero == 0]
    peaks = [one.figures.peak_bytes for one in sorted(two, key=lambda one: one.choice.microbatches)]
    assert peaks == sorted(peaks, reverse=True) and len(peaks) > 1
    assert min(peaks) < whole.figures.peak_bytes
    assert all(one.figures.terms["bubble"] > 0 for one in staged)


def test_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "tiny.yaml"
    data = yaml.safe_load((Path(vescale.__file__).parent / "estimation/devices/h100-80g.yaml").read_text())
    table.write_text(yaml.safe_dump({**data, "memory_bytes": 1_000_000}))
    call = [
        "search",
        "--model",
        config(tmp_path),
        "--devices",
        "1",
        "--batch",
        "4",
        "--seq",
        "32",
        "--device",
        str(table),
    ]
    output = tmp_path / "plan.yaml"
    assert main([*call, "--output", str(output), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["proposals"] == [] and not output.exists()
    nearest, other = data["advice"][:2]
    assert re.search(r"GiB more than \S+ has: .*ZeRO-\d, checkpointing \w+", nearest) and "more devices" in other


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Search] = []

    def searched_once(*args: Any, **given: Any) -> Search:
        found[:] = found or [search(*args, **given)]
        return found[0]

    monkeypatch.setattr("vescale.plan_search.search", searched_once)
    output = tmp_path / "plan.yaml"
    call = ["search", "--model", config(tmp_path), "--devices", "4", "--batch", "8", "--seq", "32", "--exact", "1"]
    assert main([*call, "--output", str(output), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {"devices", "device", "memory_bytes", "rows", "seconds", "fits", "proposals", "rejected", "advice"} == set(
        data
    )
    best = data["proposals"][0]
    assert (
        (best["exact"] or best["pipeline"]) and best["tokens_per_second"] > 0 and math.prod(best["mesh"].values()) == 4
    )
    assert {"mesh", "source", "sequence_parallel", "zero", "checkpoint", "pipeline", "step_seconds", "terms"} <= set(
        best
    )
    assert all(one["rule"] and one["reason"] for one in data["rejected"])
    plan = Plan.from_yaml(output)
    assert plan.axes.sizes == tuple(best["mesh"].values()) and not check(plan, decoder("Llama"))
    assert main([*call, "--rejected", "--top", "2"]) == 0
    assert "plans fit on 4 x h100-80g" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"devices": 0}, "devices is 0"),
        ({"devices": -2}, "devices is -2"),
        ({"devices": True}, "devices is True"),
        ({"devices": 2, "exact": -1}, "exact is -1"),
        ({"devices": 2, "margin": 8}, "margin is 8"),
        ({"devices": 2, "device": "h10"}, "h10"),
        ({"devices": 2, "optimizer": "adamv"}, "adamw"),
        ({"devices": 2, "precision": "bf17"}, "bf17"),
        ({"devices": 2, "batch": {"tokens": (4, 8)}}, "takes .tokens. by"),
        ({"devices": 2, "batch": {}}, "no tensor"),
        ({"devices": 2, "batch": {"inputs_embeds": (4, 8, 3)}}, "does not run"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_bad_input(given: dict[str, Any], problem: str) -> None:
    with pytest.raises((ValueError, TypeError), match=problem):
        search(decoder("Llama"), **{"batch": {"input_ids": (4, 8)}, **given})


def test_bad_input_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = config(tmp_path)
    for arguments in (["--devices", "0"], ["--devices", "2", "--device", "h10"], ["--devices", "2", "--dtype", "x"]):
        assert main(["search", "--model", model, "--batch", "4", "--seq", "8", *arguments]) == 2
    assert main(["search", "--model", "hf:none.json", "--devices", "2", "--batch", "4", "--seq", "8"]) == 2
    assert main(["search", "--model", model, "--devices", "2", "--input", "input_ids"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_numbers_that_divide_nothing() -> None:
    """A prime number of devices, and a batch that they do not divide: what is left, or why nothing is."""
    found = search(decoder("Llama"), devices=7, batch={"input_ids": (8, 16)}, exact=0)
    reasons = " ".join(one.reason for one in found.rejected)
    assert "a batch of 8 rows is not a multiple of 7 ranks of data" in reasons
    assert all(one.choice.dp == 1 for one in found.proposals)
    assert "not a multiple of 7" in reasons and (found.fits or found.advice())


def test_a_model_that_fails_says_so() -> None:
    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no such thing")

    with pytest.raises(EstimateOptionError, match="no such thing"):
        search(Broken(), devices=2, batch={"x": (4, 4)})


def test_nothing_changes_around() -> None:
    model = MODELS["net"].build()
    before, state = dict(model.named_parameters()), torch.get_rng_state()
    shapes = {"x": torch.empty(4, 6, 12), "wanted": torch.zeros(4, 6, dtype=torch.int64)}
    found = search(model, devices=2, batch=shapes, exact=1)
    assert isinstance(found, Search) and found.fits
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), state) and not torch.distributed.is_initialized()
