"""Estimates without ranks: bytes at rest of every rank, equal modules run once, JSON, page, command, comparison."""

from __future__ import annotations

import gc
import json
import math
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

import vescale
from tests.estimation.measure import CASES, estimated
from vescale import Plan, parallelize, plan_zoo
from vescale.cli import main
from vescale.compat import local_of
from vescale.compat.simulated_ranks import fake_world
from vescale.estimation import (
    EstimateWarning,
    device_names,
    device_of,
    estimate,
    page,
    what_if,
    zero_plan,
)
from vescale.estimation._memory_log import Block, Instant, MemoryLog
from vescale.estimation._memory_timeline import timeline_of
from vescale.estimation._rehearsal import Rehearsal
from vescale.estimation._unfilled import Routing, UnfilledTensors
from vescale.ir import lower
from vescale.pipeline import StagedProgram
from vescale.plans import PlanError
from vescale.runtime import TokenExchange

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama(layers: int = 5) -> nn.Module:
    import transformers

    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**CONFIG, "num_hidden_layers": layers}))


class Odd(nn.Module):
    """Sizes that ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 12)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x).relu()
        return x


def odd_plan(axes: Any) -> Plan:
    plan = Plan(axes).shard("<in:ids>", vescale_shard(0), mesh="dp").shard("table.weight", vescale_shard(0), mesh="tp")
    plan.shard(r"layers.*", vescale.RaggedShard(), mesh="dp", phase="init")
    return plan.shard(r"layers.*", torch.distributed.tensor.Replicate(), mesh="dp", phase="run")


def vescale_shard(dim: int) -> Any:
    return torch.distributed.tensor.Shard(dim)


@pytest.mark.parametrize("which", ["llama", "llama_zero3", "odd"])
def test_bytes_at_rest_of_every_rank(which: str) -> None:
    """Those of the engine's own buffers, rank by rank, on a fake group."""
    axes = {"dp": 3, "tp": 2} if which == "odd" else {"dp": 2, "tp": 2}

    def make() -> tuple[nn.Module, Plan]:
        with torch.device("meta"):
            return (Odd(), odd_plan(axes)) if which == "odd" else (llama(2), plan_zoo.load(which, axes))

    model, plan = make()
    batch = {"ids": (6, 4)} if which == "odd" else {"input_ids": (4, 8)}
    found = estimate(model, plan, batch=batch, steps=2)
    for rank in range(math.prod(axes.values())):
        (own,) = (one for one in found.ranks if rank in one.ranks)
        with fake_world(math.prod(axes.values()), rank):
            model, plan = make()
            parallelize(model, plan)
            model.to_empty(device="cpu")
            for tensor in (*model.parameters(), *model.buffers()):
                nn.init.zeros_(tensor)
            elements = sum(local_of(p).numel() for p in model.parameters())
            others = sum(
                local_of(x).untyped_storage().nbytes() if hasattr(x, "placements") else x.untyped_storage().nbytes()
                for name, x in [*model.named_parameters(), *model.named_buffers()]
                if not any(isinstance(p, vescale.RaggedShard) for p in getattr(x, "placements", ()))
            )
            model(**{name: torch.zeros(shape, dtype=torch.int64) for name, shape in batch.items()})
            buffers = {
                group.at_rest.buckets[n].shards.local.untyped_storage()._cdata: bucket.shards.num_bytes
                for state in states_of(model)
                for group in state.groups
                for n, bucket in enumerate(group.at_rest.buckets)
            }
        scalars = 4 * len(list(model.parameters()))
        assert own.categories["parameters"] == sum(buffers.values()) + others
        assert own.categories["optimizer"] == 2 * 4 * elements + scalars


@pytest.mark.parametrize("layers", [1, 5])
def test_gradients_of_ranks_that_were_not_run(layers: int) -> None:
    """Units leave what is pending on tp, of norms beside cut sequences, to buckets of other sizes on other ranks. Whichever
    rank is run, its own buckets and what is said of the others agree."""
    plan = zero_plan(plan_zoo.load("llama", {"dp": 3, "tp": 2}), ("dp",), 2, (r"model.layers.\d+",))
    seen = set()
    for rank in (0, 3, 4):
        found = estimate(llama(layers), plan, batch={"input_ids": (6, 8)}, steps=1, rank=rank)
        of_ranks = {number: one.maximum["gradients"] for one in found.ranks for number in one.ranks}
        seen.add(tuple(of_ranks[number] for number in range(6)))
    (sizes,) = seen
    assert sizes[::2] == sizes[1::2] and len(set(sizes)) > 1


def states_of(model: nn.Module) -> list[Any]:
    from vescale.fsdp import state_of

    found = (state_of(module) for module in model.modules())
    return list(dict.fromkeys(state for state in found if state is not None))


@pytest.mark.parametrize("plan", ["llama", "llama_zero3"])
def test_equal_modules_run_once(plan: str) -> None:
    """The first and the last of five layers give the numbers of all five."""
    given = {"batch": {"input_ids": (4, 16)}, "steps": 3}
    reduced = estimate(llama(), plan_zoo.load(plan, {"dp": 2, "tp": 1}), **given)
    whole = estimate(llama(), plan_zoo.load(plan, {"dp": 2, "tp": 1}), reduce_depth=False, **given)
    assert "first and the last of 5" in " ".join(reduced.notes)
    for name in ("parameters", "gradients", "optimizer"):
        assert reduced.peak.maximum[name] == whole.peak.maximum[name]
    assert reduced.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.005)
    assert reduced.peak.saved_bytes == whole.peak.saved_bytes
    assert reduced.time.flops == whole.time.flops
    assert reduced.time.collective_bytes == whole.time.collective_bytes


def test_numbers_that_nobody_computed_are_unknown() -> None:
    """What is in memory by chance decides nothing: not for parameters, nor for what comes from ranks that do not exist."""
    with torch.device("meta"):
        layer = nn.Linear(4, 4)
    mode = UnfilledTensors(MemoryLog(lambda: Instant(0, "forward", None)), Routing())
    with fake_world(2, 0), mode:
        layer.to_empty(device="cpu")
        assert not mode.is_known(layer.weight) and mode.is_known(torch.ones(4))
        received = torch.empty(4, dtype=torch.float32)
        dist.all_to_all_single(received, torch.ones(0), [0, 4], [0, 0])
        assert not mode.is_known(received)
        assert layer(torch.ones(2, 4)).topk(2).indices.unique().numel() > 1, "experts are chosen as the load says"


def test_nothing_changes_around() -> None:
    hook, model = sys.excepthook, llama(1)
    before, state = dict(model.named_parameters()), torch.get_rng_state()
    estimate(model, plan_zoo.load("llama", {"dp": 2, "tp": 1}), batch={"input_ids": (2, 8)}, steps=1)
    assert dict(model.named_parameters()) == before and all(p.is_meta for p in before.values())
    assert torch.equal(torch.get_rng_state(), state) and not dist.is_initialized()
    assert sys.excepthook is hook


def test_a_choice_that_the_optimizer_does_not_take_is_a_row() -> None:
    """The other choices of the table are there; a name that nobody knows is wrong usage."""
    import transformers

    plan = plan_zoo.load("llama_zero3", {"dp": 4, "tp": 2})
    with torch.device("meta"):
        sizes = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 4}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**CONFIG, **sizes}))
    found = estimate(model, plan, batch={"input_ids": (8, 16)}, steps=1, optimizer="sgd")
    assert "must not be divided" in what_if(found, "optimizer=adamw8bit")["error"]
    assert what_if(found, "optimizer=adamw")["peak_bytes"] > found.peak_bytes
    for wrong in ("optimizer=adamv", "load=x", "checkpoint=most", "stage=9"):
        with pytest.raises(ValueError, match=re.escape(wrong.partition("=")[2])):
            what_if(found, wrong)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    call = ["estimate", "llama_zero3", "--model", f"hf:{config}", "--mesh", "dp=4,tp=1", "--batch", "4", "--seq", "16"]
    page = tmp_path / "page.html"
    asked = ["--json", "--steps", "1", "--zero-table", "--what-if", "batch=8", "--html", str(page)]
    assert main([*call, "--device", "h100-80g", *asked]) == 0
    data = json.loads(capsys.readouterr().out)
    rank = max(data["ranks"], key=lambda one: one["peak_bytes"])
    assert sorted(r for one in data["ranks"] for r in one["ranks"]) == [0, 1, 2, 3]
    assert rank["rank"] == data["peak_rank"] and rank["peak_bytes"] == data["peak_bytes"]
    sizes = [sum(x.values()) if isinstance(x, dict) else x for x in rank["categories"].values()]
    assert sum(sizes) == rank["peak_bytes"] == max(moment["bytes"] for moment in rank["timeline"])
    assert [row["stage"] for row in data["zero_table"]] == ["0", "1", "2", "3", "HSDP 2x2"]
    stages = [row["peak_bytes"] for row in data["zero_table"]]
    assert stages[0] > stages[1] >= stages[2] > stages[3] == rank["peak_bytes"]
    assert data["what_if"][0]["activations"] > sum(rank["categories"]["activations"].values())
    text = page.read_text()
    assert "src=" not in text and not re.search(r"https?://", text)

    small = tmp_path / "small.yaml"
    table = (Path(vescale.__file__).parent / "estimation" / "devices" / "cpu.yaml").read_text()
    small.write_text(table.replace("memory_bytes: null", "memory_bytes: 1000"))
    assert main([*call, "--device", str(small), "--steps", "1"]) == 1
    out = capsys.readouterr().out
    assert "does not fit" in out and re.search(r"^parameters +[\d.]+ KiB ", out, re.MULTILINE)
    assert main([*call, "--device", "h1000"]) == 2 and main(call[:4]) == 2
    wrong = (["--optimizer", "adamv"], ["--rank", "4"], ["--calibrate", "/no/such/folder/x.yaml"])
    wrong += (["--what-if", "x"],)
    assert [main([*call, "--steps", "1", *more]) for more in wrong] == [2] * len(wrong)
    with pytest.raises(SystemExit):
        main([*call, "--load", "many"])


@pytest.mark.parametrize("name", device_names())
def test_tables_of_devices(name: str) -> None:
    table = device_of(name)
    schema = json.loads((Path(vescale.__file__).parent / "estimation" / "devices" / "schema.json").read_text())
    figures = set(schema["required"]) - {"sources"}
    assert set(table.sources) == figures and all(table.sources.values())
    assert set(schema["properties"]) == set(type(table).__annotations__)
    assert all(0 < share <= 1 for _, share in table.efficiency.points)
    assert table.efficiency.at(1) <= table.efficiency.at(1e9) <= table.efficiency.at(1e15)


def test_faster_devices_take_no_longer() -> None:
    slow = device_of("cpu")
    found = estimated(CASES["dp"], steps=1, device=slow)
    seconds = [found.time.compute + found.time.memory + found.time.exposed]
    for change in ({"bandwidth": 1e12}, {"node_bandwidth": 1e11}, {"flops": {"float32": 1e14}}):
        import dataclasses

        other = found.again(device=dataclasses.replace(slow, **change))
        seconds.append(other.time.compute + other.time.memory + other.time.exposed)
    assert all(other <= seconds[0] for other in seconds[1:]) and min(seconds) < seconds[0]


def test_nothing_stays_changed_after_an_error() -> None:
    """Of the state of torch.distributed, the garbage collector, random numbers and what the engine runs."""

    def broken(output: Any, batch: Any) -> torch.Tensor:
        raise RuntimeError("no loss")

    def state() -> tuple[Any, ...]:
        return c10d._world, TokenExchange.dispatch, gc.isenabled(), dist.is_initialized(), torch.is_grad_enabled()

    model, before, numbers = Odd(), state(), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="no loss"):
        estimate(model, Plan({"dp": 2}), batch={"ids": (6, 4)}, loss=broken)
    assert state() == before and torch.equal(torch.get_rng_state(), numbers)


def test_threads_take_turns() -> None:
    def run(ranks: int) -> int:
        return estimate(Odd(), odd_plan({"dp": ranks, "tp": 1}), batch={"ids": (12, 4)}, steps=2).peak_bytes

    alone = [run(ranks) for ranks in (1, 2, 3)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, (1, 2, 3))) == alone and len(set(alone)) == 3
    assert not dist.is_initialized()


def test_refusals() -> None:
    plan = plan_zoo.load("llama", {"dp": 2, "tp": 1})
    with pytest.raises(TypeError, match="takes no 'tokens'"):
        estimate(Odd(), Plan({"dp": 2}), batch={"tokens": (2, 8)})
    with pytest.raises(ValueError, match="optimizer 'adamv' is not one of"):
        estimate(llama(1), plan, batch={"input_ids": (2, 8)}, optimizer="adamv")
    with pytest.raises(PlanError):
        estimate(llama(1), plan.shard("nothing.weight", vescale_shard(0), mesh="dp"), batch={"input_ids": (2, 8)})
    with pytest.raises(ValueError, match="offload=maybe: write true or false"):
        what_if(estimated(CASES["dp"], steps=1), "offload=maybe")


class Rest(nn.Module):
    """Takes anything; reads some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Odd()

    def forward(self, **batch: Any) -> torch.Tensor:
        out: torch.Tensor = self.inner(batch["tokens"])
        return out if batch.get("scale") is None else out * batch["scale"].mean()


def test_inputs_that_nothing_reads() -> None:
    plan = plan_zoo.load("llama", {"dp": 1, "tp": 1})
    with pytest.raises(TypeError, match=r"'position_idz' by \*\*kwargs.*did you mean 'position_ids'"):
        estimate(llama(1), plan, batch={"input_ids": (2, 8), "position_idz": (2, 8)}, steps=1)
    batch = {"input_ids": (2, 8), "position_ids": (2, 8), "num_items_in_batch": 16}
    assert estimate(llama(1), plan, batch=batch, steps=1).peak_bytes > 0
    read = {"tokens": torch.zeros(2, 4, dtype=torch.int64), "scale": (3,), "ids": (2, 4)}  # the last one a module's
    assert estimate(Rest(), Plan({"dp": 1}), batch=read, steps=1).peak_bytes > 0
    with pytest.warns(EstimateWarning, match=r"'scales' by \*\*batch, but no module reads it"):
        estimate(Rest(), Plan({"dp": 1}), batch={"tokens": read["tokens"], "scales": (3,)}, steps=1)


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    plan = Plan({"dp": 1})
    with torch.device("meta"):
        found = vescale.estimate(Odd(), plan, batch={"ids": (6, 4)}, steps=2)
    with fake_world(1, 0):
        model = parallelize(Odd(), Plan({"dp": 1}))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.zeros(6, 4, dtype=torch.int64)).to_local().mean().backward()
            optimizer.step()
        compared = found.compare(model, optimizer)
    assert set(compared.errors().values()) == {0.0} and "optimizer" in capsys.readouterr().out


def test_lowering_is_that_of_the_plan() -> None:
    plan = plan_zoo.load("llama_zero3", {"dp": 2, "tp": 1})
    found = estimate(llama(1), plan, batch={"input_ids": (2, 8)}, steps=1)
    assert found.program.digest() == lower(plan, llama(1)).digest()


def test_page_in_a_browser(tmp_path: Path) -> None:
    """Nothing is wider than the window, narrow and wide."""
    import shutil

    browser = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if browser is None:
        pytest.skip("there is no Chromium")
    found = estimated(CASES["zero3"], steps=1)
    file = tmp_path / "page.html"
    probe = (
        "<script>document.title = document.documentElement.scrollWidth <= window.innerWidth ? 'fits' : 'wide';</script>"
    )
    file.write_text(page(found, "a plan").replace("</body>", f"{probe}</body>"))
    for width in (400, 1400):
        done = subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                f"--window-size={width},900",
                "--dump-dom",
                f"file://{file}",
            ],
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert "<title>fits</title>" in done.stdout


@pytest.mark.parametrize(
    ("schedule", "layers", "splits", "in_flight"),
    [("1F1B", 8, (4,), (2, 1)), ("GPipe", 8, (4,), (4, 4)), ("Interleaved1F1B", 4, (1, 2, 3), (5, 3))],
    ids=["1F1B", "GPipe", "Interleaved"],
)
def test_stages_of_a_pipeline(schedule: str, layers: int, splits: tuple[int, ...], in_flight: tuple[int, ...]) -> None:
    """Every rank's own parameters, and activations of as many micro-batches as are in flight."""
    plan = plan_zoo.load("llama", {"pp": 2, "dp": 2, "tp": 1})
    plan.pipeline(split_before=[f"model.layers.{n}" for n in splits], schedule=schedule, microbatches=4, mesh="pp")
    found = estimate(llama(layers), plan, batch={"input_ids": (16, 16)}, steps=2)
    assert [one.coordinates["pp"] for one in found.ranks] == [0, 1]
    assert sorted(rank for one in found.ranks for rank in one.ranks) == [0, 1, 2, 3]
    assert StagedProgram.of(plan, llama(layers)).schedule.peak == in_flight
    owners = StagedProgram.of(plan, llama(layers)).cut.owners
    rank_of = StagedProgram.of(plan, llama(layers)).schedule.rank_of
    for one in found.ranks:
        own = [n for n, stages in owners.items() if any(rank_of[s] == one.coordinates["pp"] for s in stages)]
        total = sum(llama(layers).get_parameter(name).numel() * 4 for name in own)
        assert total <= one.maximum["parameters"] <= total + 1024  # and the buffer of rotary frequencies
    whole = estimate(llama(layers), plan, batch={"input_ids": (16, 16)}, steps=2, reduce_depth=False)
    for one, other in zip(
        found.ranks, whole.ranks
    ):  # some hundred bytes a layer tell whether its parameters are replaced
        assert one.peak_bytes == pytest.approx(other.peak_bytes, rel=0.005)
        assert one.maximum["activations"] == other.maximum["activations"]
        assert one.maximum["optimizer"] == other.maximum["optimizer"]
    assert found.time.terms()["bubble"]["seconds"] > 0
    assert any(name.endswith(("send", "recv")) for name in found.time.collectives)


def test_traces_of_a_pipeline_keep_no_masks() -> None:
    """What a step needs of the first one's trace: no memory that grows with layers and the square of the length."""
    plan = plan_zoo.load("llama", {"pp": 2, "dp": 1, "tp": 1})
    plan.pipeline(split_before=["model.layers.2"], schedule="GPipe", microbatches=2, mesh="pp")
    found = estimate(llama(4), plan, batch={"input_ids": (2, 64)}, steps=2, optimizer=None, reduce_depth=False)
    for one in found.ranks:
        kept = min(moment["temporary"] for moment in one.timeline)
        assert kept < 2 * 64 * 64 * 4, "less than a mask for each of four layers"


def test_halves_of_backwards_take_their_time() -> None:
    """A zero-bubble schedule waits less, and computes as much."""
    found = []
    for schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        plan = plan_zoo.load("llama", {"pp": 2, "dp": 1, "tp": 1})
        splits = [f"model.layers.{n}" for n in (1, 2, 3)]
        plan.pipeline(split_before=splits, schedule=schedule, microbatches=4, mesh="pp")
        found.append(estimate(llama(4), plan, batch={"input_ids": (4, 16)}, steps=2, optimizer="sgd").time)
    whole, halves = found
    assert halves.compute == pytest.approx(whole.compute, rel=0.01) and 0 < halves.bubble < whole.bubble


def test_other_choices_keep_the_stages() -> None:
    """What-if of a plan with a pipeline is about the same stages; a mesh without their axis is refused."""
    plan = plan_zoo.load("llama", {"pp": 2, "dp": 2, "tp": 1})
    plan.pipeline(split_before=["model.layers.1"], schedule="GPipe", microbatches=2, mesh="pp")
    found = estimate(llama(2), plan, batch={"input_ids": (8, 16)}, steps=2)
    full, wider = what_if(found, "checkpoint=full"), what_if(found, "mesh=pp:2+dp:4+tp:1")
    assert full["parameters"] == wider["parameters"] == found.peak.categories["parameters"]
    assert full["activations"] < sum(found.peak.categories["activations"].values())
    assert "pp" in what_if(found, "mesh=dp:4+tp:1")["error"]


def test_padding_names_the_edit() -> None:
    """Experts that are stacked in one tensor have one row each: the note has smaller blocks, and they leave what it says."""
    import transformers

    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**sizes, num_local_experts=4, num_key_value_heads=4, vocab_size=64)
        )

    def plan(blocks: dict[str, int]) -> Plan:
        names = "|".join(rf"model\.layers\.\d+\.mlp\.experts\.{name}" for name in blocks)
        found = zero_plan(plan_zoo.load("mixtral", {"dp": 64, "tp": 1}), ("dp",), 0)
        found.shard(rf"(?!({names})$).*" if names else ".*", {"dp": vescale.RaggedShard()}, phase="init")
        for name, size in blocks.items():
            path = rf"model.layers.\d+.mlp.experts.{name}"
            found.shard(path, {"dp": vescale.RaggedShard(block=size)}, phase="init")
        found.shard(".*", {"dp": torch.distributed.tensor.Replicate()}, phase="run")
        return found.unit(r"model.layers.\d+").unit("")

    given = {"batch": {"input_ids": (64, 8)}, "steps": 1}
    whole = estimate(model, plan({}), **given)
    (note,) = (text for text in whole.notes if "padding" in text)
    found = dict(re.findall(r"experts\.(\w+): \{dp: Ragged\(block=(\d+)\)\}", note))
    assert found == {"gate_up_proj": "64", "down_proj": "128"}, note
    after, before = (float(re.search(pattern, note)[1]) for pattern in (r"leave ([\d.]+)%", r"which has ([\d.]+)%"))  # type: ignore[index]
    smaller = estimate(model, plan({name: int(size) for name, size in found.items()}), **given)
    assert not [text for text in smaller.notes if "padding" in text]
    assert before > 500 and after < 10 and smaller.padding_bytes < whole.padding_bytes / 50


def test_a_loss_of_the_caller_needs_no_labels() -> None:
    """Labels that nobody gave are for the model's own loss: it is not computed where the caller has another one."""
    given = {"batch": {"input_ids": (4, 16)}, "steps": 1}

    def loss(output: Any, _: Any) -> torch.Tensor:
        assert output.loss is None
        found: torch.Tensor = output.logits.float().mean()
        return found

    found = estimate(llama(1), plan_zoo.load("llama", {"dp": 2, "tp": 1}), **given, loss=loss)
    own = estimate(llama(1), plan_zoo.load("llama", {"dp": 2, "tp": 1}), **given)
    assert found.peak.saved_bytes < own.peak.saved_bytes


def test_what_is_offloaded_is_in_the_memory_of_the_host() -> None:
    """Of a GPU: a host has one memory, as measured in test_measured.py."""
    plan = plan_zoo.load("llama_zero3", {"dp": 2, "tp": 1})
    found = estimate(llama(), plan, batch={"input_ids": (8, 64)}, steps=2, device="h100-80g")
    row = what_if(found, "offload=true")
    buffers = sum(x.numel() * x.element_size() for x in llama().buffers())
    assert row["parameters"] <= buffers and row["optimizer"] <= 4 * len(list(llama().parameters()))
    assert row["unsharded"] == found.peak.categories["unsharded"]
    peak = found.peak.categories
    assert row["peak_bytes"] <= found.peak_bytes - (peak["parameters"] - row["parameters"]) - (
        peak["optimizer"] - row["optimizer"]
    )
    kept = what_if(found, "checkpoint=offload")
    assert kept["peak_bytes"] < found.peak_bytes and kept["activations"] < sum(peak["activations"].values()) / 2
    offloaded = changed_plan(found, "offload")
    assert any("are offloaded to host memory" in note for note in offloaded.notes)
    on_host = offloaded.again(device="cpu")
    assert on_host.peak_bytes > offloaded.peak_bytes and not any("offloaded" in note for note in on_host.notes)


def changed_plan(found: Any, policy: str) -> Any:
    plan = plan_zoo.load("llama_zero3", {"dp": 2, "tp": 1}).checkpoint(r"model.layers.\d+", policy)
    return found.again(plan=plan)


def test_what_waits_for_a_bucket_is_freed_when_it_is_there() -> None:
    """Memory of the engine that was made in the first backward and stays is no gradient that waits."""
    here = Instant(0, "backward", None)
    log = MemoryLog(lambda: here, instants=[here] * 5)
    log.blocks += [Block(64, 0, 0), Block(32, 1, 1, 3), Block(256, 2, 2)]  # kept, waiting, the bucket
    timeline = timeline_of(Rehearsal(log, 1, kinds={2: ("gradients", None)}), ())
    assert timeline.categories["gradients"].tolist() == [0, 32, 288, 256, 256]
    assert timeline.categories["temporary"].tolist() == [64] * 5
