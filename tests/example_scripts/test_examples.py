"""Each example on ranks: its losses fall, and are those of a loop on one device that knows nothing of vescale."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader

from tests.example_scripts.conftest import Host
from tests.example_scripts.loading import FOLDER, arguments, load, losses_on_ranks, train_plainly
from tests.ranks import RankPools

pytest.importorskip("transformers")


def assert_same(ranks: list[list[float]], expected: list[float], tolerance: float = 2e-5) -> None:
    assert len(expected) > 1
    for found in ranks:  # the same on every rank
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=tolerance)
    assert min(expected[-3:]) < expected[0], "losses fall"


def pretrained_plainly(argv: list[str]) -> list[float]:
    args, module = arguments("pretrain", argv), load("pretrain")
    torch.manual_seed(17)
    model = module.make_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    warmup = LinearLR(optimizer, 0.1, total_iters=5)
    scheduler = SequentialLR(optimizer, [warmup, CosineAnnealingLR(optimizer, 200)], [5])
    loader = iter(DataLoader(module.Manual(args.length), args.batch, shuffle=True, drop_last=True))
    losses = []
    for _ in range(args.steps):
        total = 0.0
        for _ in range(args.accumulate):
            ids = next(loader)
            loss = model(input_ids=ids, labels=ids).loss / args.accumulate
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(total)
    return losses


def test_pretraining_and_resuming_on_another_mesh(ranks: RankPools, tmp_path: Path) -> None:
    small = ["--hidden", "32", "--length", "32", "--batch", "4", "--evaluate-every", "100", "--out", str(tmp_path)]
    first = ranks.run(
        losses_on_ranks, "pretrain", [*small, "--mesh", "dp=2,tp=1", "--steps", "4", "--save-every", "2"], world_size=2
    )
    more = [*small, "--mesh", "dp=1,tp=2", "--steps", "6", "--plan", "llama"]
    rest = ranks.run(losses_on_ranks, "pretrain", more, world_size=2)
    expected = pretrained_plainly(more)
    assert_same([a + b for a, b in zip(first, rest, strict=True)], expected)
    records = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(6))
    assert all(record["tokens_per_second"] > 0 and record["mfu"] > 0 for record in records)
    torch.testing.assert_close([record["loss"] for record in records], expected, rtol=2e-5, atol=0)
    assert set(records[0]["comm"]) >= {"dp"} and set(records[4]["comm"]) >= {"tp"}


@pytest.mark.slow
def test_pretraining_on_two_axes_with_everything(ranks: RankPools, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    argv = ["--mesh", "dp=2,tp=2", "--steps", "8", "--evaluate-every", "4", "--tensorboard", str(tmp_path)]
    assert_same(ranks.run(losses_on_ranks, "pretrain", argv, world_size=4), pretrained_plainly(argv))
    assert list(tmp_path.glob("events.*"))
    found = ranks.run(losses_on_ranks, "pretrain", [*argv[:4], "--bfloat16"], world_size=4)
    assert_same(found, pretrained_plainly(argv), tolerance=3e-2)


def of_tokens(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def on_one_device(name: str, argv: list[str], lr: float = 3e-3, clip: float | None = 1.0) -> list[float]:
    args, module = arguments(name, argv), load(name)
    torch.manual_seed(17)
    return train_plainly(module.make_model(args), module.batches(args), of_tokens, lr=lr, clip=clip)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=1,tp=4"])
def test_lora(ranks: RankPools, tmp_path: Path, mesh: str) -> None:
    peft = pytest.importorskip("peft")
    from transformers import LlamaForCausalLM

    argv = ["--mesh", mesh, "--steps", "5", "--out", str(tmp_path)]
    found = ranks.run(losses_on_ranks, "finetune_lora", argv, world_size=4)
    args, module = arguments("finetune_lora", argv), load("finetune_lora")
    torch.manual_seed(17)
    with torch.random.fork_rng():
        base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    built = module.make_model(tmp_path / "base", args.rank)  # as the example draws
    built.get_base_model().load_state_dict(
        {name.replace("_proj.", "_proj.base_layer."): value for name, value in base.state_dict().items()}, strict=False
    )
    assert_same(found, train_plainly(built, module.batches(args), of_tokens, lr=1e-2))
    ids = next(iter(module.batches(args)))
    expected = built.eval()(input_ids=ids).logits
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-3, atol=1e-3)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    torch.testing.assert_close(again(input_ids=ids).logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=2,ep=2", "fsdp=1,ep=4"])
def test_mixture_of_experts(ranks: RankPools, mesh: str) -> None:
    argv = ["--mesh", mesh, "--steps", "5"]
    assert_same(ranks.run(losses_on_ranks, "moe", argv, world_size=4), on_one_device("moe", argv))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=1,cp=4,tp=1", "dp=1,cp=2,tp=2"])
def test_long_context(ranks: RankPools, mesh: str) -> None:
    argv = ["--mesh", mesh, "--steps", "4", "--length", "128"]
    assert_same(ranks.run(losses_on_ranks, "long_context", argv, world_size=4), on_one_device("long_context", argv))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pp=2,dp=1,cp=1,tp=2", "pp=2,dp=2,cp=1,tp=1", "pp=2,dp=1,cp=2,tp=1"])
def test_pipeline(ranks: RankPools, mesh: str) -> None:
    argv = ["--mesh", mesh, "--steps", "4", "--length", "32"]
    expected = on_one_device("pipeline_4d", argv, clip=None)
    assert_same(ranks.run(losses_on_ranks, "pipeline_4d", argv, world_size=4), expected, tolerance=1e-4)


@pytest.mark.slow
def test_diffusion(ranks: RankPools) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("diffusers")
    argv = ["--mesh", "dp=2,tp=2", "--steps", "6", "--samples", "2"]
    args, module = arguments("diffusion_dit", argv), load("diffusion_dit")
    torch.manual_seed(17)
    model, noising = module.make_model(), module.DDIMScheduler()

    def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return module.loss_of(model, noising, *batch)

    expected = train_plainly(model, module.batches(args), loss_of, lr=2e-3)
    assert_same(ranks.run(losses_on_ranks, "diffusion_dit", argv, world_size=4), expected)


@pytest.mark.slow
def test_vision(ranks: RankPools) -> None:
    pytest.importorskip("sklearn")
    argv = ["--mesh", "dp=2,tp=2", "--epochs", "2", "--images", "358"]  # the last batch has 38 rows
    args, module = arguments("vision_vit", argv), load("vision_vit")
    torch.manual_seed(17)
    model = module.make_model()
    pictures, classes = module.images()
    data = torch.utils.data.TensorDataset(pictures[: args.images], classes[: args.images])
    loader = DataLoader(data, args.batch, shuffle=True)
    batches = (batch for _ in range(args.epochs) for batch in loader)
    expected = train_plainly(model, batches, lambda m, b: m(pixel_values=b[0], labels=b[1]).loss, lr=3e-3, clip=None)
    accuracy = module.accuracy(model, pictures[args.images :], classes[args.images :])
    found = ranks.run(losses_on_ranks, "vision_vit", argv, world_size=4)
    assert_same([losses[:-1] for losses in found], expected, tolerance=1e-4)
    assert all(abs(losses[-1] - accuracy) < 2e-3 for losses in found)


def trained_with_trainer(argv: list[str], port: int) -> list[float]:
    rank, size = str(dist.get_rank()), str(dist.get_world_size())  # the example takes them out of the environment
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
    return load("hf_trainer").main(argv)


@pytest.mark.slow
def test_transformers_trainer(ranks: RankPools, tmp_path: Path) -> None:
    """Against stock Trainer on one device; stopped at half of the steps, and resumed on another mesh."""
    pytest.importorskip("accelerate")
    from transformers import LlamaForCausalLM

    script = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]); import hf_trainer as e\n"
        "import transformers; e.MeshTrainer = transformers.Trainer\n"
        "e.vescale.parallelize = lambda model, plan, strict: model\n"
        "print('losses', e.main(sys.argv[2:]))"
    )
    stock = tmp_path / "stock"
    argv = ["--steps", "6", "--save-steps", "100", "--accumulate", "2", "--out"]
    done = subprocess.run(
        [sys.executable, "-c", script, str(FOLDER), *argv, str(stock)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = json.loads(done.stdout.rpartition("losses ")[2].splitlines()[0])
    argv = ["--steps", "6", "--save-steps", "3", "--accumulate", "2", "--out", str(tmp_path / "run"), "--mesh"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    whole = ranks.run(trained_with_trainer, [*argv, "dp=2,tp=2"], port, world_size=4)
    assert_same(whole, expected, tolerance=1e-4)
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    resumed = ranks.run(trained_with_trainer, [*argv, "dp=1,tp=4"], port, world_size=4)
    assert_same(resumed, expected, tolerance=1e-4)
    LlamaForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-6")


OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing_factor": 0.1},
    {"label_smoothing_factor": 0.2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    {"train_sampling_strategy": "group_by_length", "eval_accumulation_steps": 1},
    {"optim": "adafactor", "lr_scheduler_type": "cosine", "weight_decay": 0.1},
    {"batch_eval_metrics": True, "include_for_metrics": ["inputs", "loss"]},
    {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "prediction_loss_only": True},
    {"torch_empty_cache_steps": 1, "average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
    {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "best", "metric_for_best_model": "loss"}
    | {"eval_steps": 1, "save_steps": 1, "save_total_limit": 1},
]


def found_by_trainer(trainer: Any, data: list[Any]) -> list[Any]:
    trainer.train()
    found: list[Any] = [
        {k: v for k, v in e.items() if "second" not in k and "runtime" not in k} for e in trainer.state.log_history
    ]
    found.append({k: v for k, v in trainer.evaluate().items() if "second" not in k and "runtime" not in k})
    predicted = trainer.predict(data[:10])
    values = predicted.predictions if predicted.predictions is not None else torch.zeros(1).numpy()
    return [*found, {"shape": values.shape, "sum": float(values.sum())}]


def trainer_options(mesh_text: str, folder: str) -> None:
    """Trainer in its options on a mesh, beside stock Trainer on this rank alone."""
    import transformers

    e = load("hf_trainer")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            patch.setenv(name, "0")
        mesh = e.vescale.init_mesh(mesh_text)
        e.hide_ranks()
        rank = torch.distributed.get_rank()
        for number, options in enumerate(OPTIONS):
            results = []
            for kind in (transformers.Trainer, e.MeshTrainer):
                torch.manual_seed(17)
                lengths = torch.randint(5, 16, (32,))
                data = [{"input_ids": torch.randint(0, 256, (int(length),))} for length in lengths]
                model = e.make_model(argparse.Namespace(length=16)).double()
                whole = f"{folder}/{number}-{kind.__name__}"
                if kind is e.MeshTrainer:
                    plan = e.vescale.plan_zoo.load("llama_zero3", mesh)
                    for axis in mesh.mesh_dim_names:
                        plan.shard("<out>", torch.distributed.tensor.Replicate(), mesh=axis)
                    model = e.vescale.parallelize(model, plan)
                else:
                    whole = f"{whole}-{rank}"
                common = {"output_dir": whole, "max_steps": 4, "per_device_train_batch_size": 8, "learning_rate": 1e-2}
                common |= {"logging_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True}
                arguments = transformers.TrainingArguments(**({**common, "save_strategy": "no"} | options))
                sets = {"train_dataset": data, "eval_dataset": data[:12], "data_collator": padded}
                if not options.get("prediction_loss_only"):
                    sets["compute_metrics"] = Accuracy()
                results.append(found_by_trainer(kind(model, arguments, **sets), data))
            for expected, found in zip(*results, strict=True):
                assert expected.keys() == found.keys()
                for key, value in expected.items():
                    assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-6), (options, key, value, found[key])


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    def filled(value: int) -> torch.Tensor:
        return torch.stack(
            [torch.nn.functional.pad(row["input_ids"], (0, 16 - len(row["input_ids"])), value=value) for row in rows]
        )

    return {"input_ids": filled(0), "labels": filled(-100), "attention_mask": (filled(-100) != -100).long()}


class Accuracy:
    """Also batch by batch."""

    def __init__(self) -> None:
        self.counts = [0, 0]

    def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, float]:
        hits = (
            torch.as_tensor(prediction.predictions).argmax(-1)[:, :-1] == torch.as_tensor(prediction.label_ids)[:, 1:]
        )
        self.counts = [self.counts[0] + int(hits.sum()), self.counts[1] + hits.numel()]
        found = self.counts[0] / self.counts[1]
        if compute_result:
            self.counts = [0, 0]
        return {"accuracy": found}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2,tp=1", "dp=1,tp=2"])
def test_options_of_trainer(ranks: RankPools, tmp_path: Path, mesh: str) -> None:
    pytest.importorskip("accelerate")
    ranks.run(trainer_options, mesh, str(tmp_path), world_size=2)


def launched(command: list[str], **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), *sys.path]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env={**environment, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(process: subprocess.Popen[str]) -> str:
    try:
        output, _ = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 0, output[-4000:]
    return output


def torchrun(script: Path, *argv: str, ranks: int) -> str:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return ended(launched([*run, str(script), *argv]))


@pytest.mark.slow
def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")

    def loss_of(text: str) -> list[str]:
        return text.rpartition("loss ")[2].split()[:3:2]

    script = FOLDER / "lightning_fit.py"
    found = [
        loss_of(torchrun(script, "--mesh", mesh, "--save", str(tmp_path / mesh), ranks=ranks))
        for mesh, ranks in (("dp=1,tp=1", 1), ("dp=1,tp=2", 2), ("dp=2,tp=1", 2))
    ]
    assert found[0] == found[1] == found[2] and float(found[0][1]) < float(found[0][0])
    assert list((tmp_path / "dp=2,tp=1").iterdir())


def test_the_migration_is_one_line() -> None:
    before, after = ((FOLDER / "migrate_fsdp2" / f"{name}.py").read_text().splitlines() for name in ("before", "after"))
    assert len(before) == len(after)
    (pair,) = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert pair[1] == pair[0].replace("torch.distributed.fsdp", "vescale.fsdp")


def migrated(name: str) -> list[float]:
    return load(name, FOLDER / "migrate_fsdp2").main(6)


@pytest.mark.slow
def test_migration_gives_the_same_losses(ranks: RankPools) -> None:
    before = ranks.run(migrated, "before", world_size=4)
    assert_same(ranks.run(migrated, "after", world_size=4), before[0], tolerance=1e-6)


@pytest.mark.slow
def test_two_hosts(hosts: list[Host]) -> None:
    """The launcher, once on each of two hosts with two ranks; the first one is named as the others know it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        first = f"{hosts[0].name}:{free.getsockname()[1]}"
    command = ["bash", str(FOLDER / "multinode" / "launch.sh"), str(FOLDER / "migrate_fsdp2" / "after.py")]
    settings = {"HOSTS": "2", "RANKS": "2", "FIRST": first, "PYTHON": sys.executable}
    jobs = [launched([*host.enter, *command], **settings, **host.variables) for host in hosts]
    outputs = [ended(process) for process in jobs]
    assert sum(output.count("loss ") for output in outputs) == 10  # by the one rank 0 of the job


SRUN = """#!/bin/bash
# Runs the command once on each host, as Slurm would, and fails if one fails.
shift
status=0
{starts}
for job in $(jobs -p); do wait "$job" || status=1; done
exit $status
"""


@pytest.mark.slow
def test_the_slurm_script(hosts: list[Host], tmp_path: Path) -> None:
    """With programs in place of Slurm's, from a copy of the script, as Slurm runs one."""
    starts = [
        " ".join(shlex.quote(word) for word in ["env", *(f"{k}={v}" for k, v in host.variables.items()), *host.enter])
        for host in hosts
    ]
    programs = {
        "srun": SRUN.format(starts="\n".join(f'{start} "$@" &' for start in starts)),
        "scontrol": f"#!/bin/bash\nprintf '%s\\n' {' '.join(host.name for host in hosts)}\n",
        "nvidia-smi": "#!/bin/bash\nprintf 'GPU 0\\nGPU 1\\n'\n",  # two ranks for each host
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script = shutil.copy(FOLDER / "multinode" / "train.sbatch", tmp_path / "slurm_script")
    job = launched(
        ["bash", str(script), str(FOLDER / "migrate_fsdp2" / "after.py")],
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        SLURM_NNODES="2",
        SLURM_JOB_NODELIST="a-and-b",
        SLURM_JOB_ID=str(os.getpid()),
        SLURM_SUBMIT_DIR=str(FOLDER.parent),
        PYTHON=sys.executable,
    )
    assert ended(job).count("loss ") == 10


def test_the_launchers_are_valid_shell() -> None:
    for script in ("launch.sh", "train.sbatch"):
        subprocess.run(["bash", "-n", str(FOLDER / "multinode" / script)], check=True)


def test_every_example_is_described_and_short() -> None:
    text = (FOLDER / "README.md").read_text()
    for path in [*FOLDER.glob("*.py"), *FOLDER.glob("*/*")]:
        if path.suffix in (".py", ".sh", ".sbatch"):
            assert str(path.relative_to(FOLDER)) in text, path
            assert len(path.read_text().splitlines()) < 200, path
