"""``transformers.Trainer`` on a mesh: its loop, losses, metrics, schedules, callbacks and arguments stay as on one device.

    python examples/hf_trainer.py --out out/trainer
    torchrun --nproc-per-node 4 examples/hf_trainer.py --mesh dp=2,tp=2 --out out/trainer

Every rank runs what one device would run: MeshTrainer hides the other ranks from Trainer, and the entry ``<out>: R``
makes the model's outputs whole. MeshTrainer saves and loads on all ranks together. It can be combined with any subclass
of Trainer: ``class MeshDPOTrainer(MeshTrainer, DPOTrainer)``.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import vescale
from vescale.integrations import MeshTrainer, hide_ranks, stay_on_device


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Llama with transformers.Trainer.")
    parser.add_argument("--mesh", default="dp=-1,tp=1")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8, help="sequences of the whole job in a micro-batch")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--save-steps", type=int, default=6)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(argv)


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=args.length,
    )
    return LlamaForCausalLM(config)


def manual(length: int, number: int) -> list[dict[str, torch.Tensor]]:
    """Return the first sequences of Python's manual, byte by byte."""
    text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()[: number * length]))
    return [{"input_ids": row, "labels": row} for row in text.view(number, length)]


def main(argv: list[str] | None = None) -> list[float]:
    """Train from the last checkpoint in OUT, and return the losses of all steps."""
    args = parse(argv)
    mesh = vescale.init_mesh(args.mesh)
    index = 0 if mesh.device_type == "cpu" else torch.accelerator.current_device_index()
    hide_ranks()
    torch.manual_seed(17)
    plan = vescale.plan_zoo.load("llama_zero3", mesh)
    for axis in mesh.mesh_dim_names or ():
        plan.shard("<out>", Replicate(), mesh=axis)
    model = vescale.parallelize(make_model(args), plan, strict=True)
    arguments = TrainingArguments(
        output_dir=str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=3e-3,
        warmup_steps=2,
        logging_steps=1,
        save_steps=args.save_steps,
        report_to="none",
        disable_tqdm=True,
        use_cpu=mesh.device_type == "cpu",
    )
    stay_on_device(arguments, mesh, index)
    trainer = MeshTrainer(model, arguments, train_dataset=manual(args.length, 256))
    if dist.is_initialized() and dist.get_rank() > 0:
        trainer.remove_callback(PrinterCallback)  # one rank prints
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.out) if args.out.is_dir() else None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
