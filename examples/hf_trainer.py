"""``transformers.Trainer`` on a mesh, by an adapter of a page: its loop, schedules, callbacks and arguments stay.

    python examples/hf_trainer.py --out out/trainer
    torchrun --nproc-per-node 4 examples/hf_trainer.py --mesh dp=2,tp=2 --out out/trainer

Trainer would wrap the model in DDP, give each rank other rows, and save from one rank. MeshTrainer leaves the model as it
is, gives every rank the same global batches (the plan cuts them), and saves with every rank's help.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import vescale
from vescale.checkpoint import export_hf


class MeshTrainer(Trainer):
    """Trainer for a model of ``vescale.parallelize``. per_device_train_batch_size is the size of the global batch."""

    def __init__(self, model: torch.nn.Module, args: TrainingArguments, **options: Any) -> None:
        args.average_tokens_across_devices = False  # the loss is that of the whole batch already
        super().__init__(model, args, **options)
        self.is_model_parallel = True  # no DataParallel
        prepare_model = self.accelerator.prepare_model
        self.accelerator.prepare_model = lambda model, *_, **options: prepare_model(model, evaluation_mode=True)

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """It is where the mesh is."""

    def get_train_dataloader(self) -> DataLoader:
        order = RandomSampler(self.train_dataset, generator=torch.Generator().manual_seed(self.args.seed))
        return self._loader(self.train_dataset, order, self.args.per_device_train_batch_size)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        return self._loader(data, SequentialSampler(data), self.args.per_device_eval_batch_size)

    def _loader(self, data: Any, order: Any, size: int) -> DataLoader:
        return DataLoader(data, batch_size=size, sampler=order, collate_fn=self.data_collator)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return args.per_device_train_batch_size * args.gradient_accumulation_steps  # on any number of ranks

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
        return vescale.optim.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def compute_loss(self, model: torch.nn.Module, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        loss = loss.to_local() if hasattr(loss, "to_local") else loss
        return (loss, outputs) if return_outputs else loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        export_hf(self.model, output_dir or self.args.output_dir)  # as from_pretrained loads it

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = {"optimizer": self.optimizer, "scheduler": self.lr_scheduler}
        vescale.checkpoint.save(Path(output_dir) / "training", model=self.model, **state)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing yet: the model comes with the optimizer."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            state = {"optimizer": self.optimizer, "scheduler": self.lr_scheduler}
            vescale.checkpoint.load(Path(checkpoint) / "training", model=self.model, **state)


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
    """The first sequences of Python's manual, byte by byte."""
    text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()[: number * length]))
    return [{"input_ids": row, "labels": row} for row in text.view(number, length)]


def main(argv: list[str] | None = None) -> list[float]:
    """Train, going on from the last checkpoint in OUT; returns the losses of all steps."""
    args = parse(argv)
    mesh = vescale.init_mesh(args.mesh)
    torch.manual_seed(17)
    model = vescale.parallelize(make_model(args), vescale.plan_zoo.load("llama_zero3", mesh), strict=True)
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
    trainer = MeshTrainer(model, arguments, train_dataset=manual(args.length, 256))
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.out) if args.out.is_dir() else None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
