"""``MeshTrainer``: transformers' Trainer, which saves and loads with the help of every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import Trainer

from vescale.checkpoint import export_hf, load, load_hf, save


class MeshTrainer(Trainer):
    """Trainer for a model of ``vescale.parallelize`` whose outputs are whole (``<out>: R`` on all axes of its plan).

    Batch sizes are those of the whole job. Models are saved in Hugging Face's format, and optimizer and scheduler so that
    training resumes on any mesh. It can be combined with any subclass of Trainer:
    ``class MeshDPOTrainer(MeshTrainer, DPOTrainer)``. Call :func:`vescale.integrations.hide_ranks` before its arguments are
    made.
    """

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model as ``from_pretrained`` loads it; every rank writes its part.

        Args:
            output_dir: a folder; by default that of the arguments.
        """
        model: Any = self.model
        folder = str(output_dir or self.args.output_dir)
        export_hf(model, folder)
        if self.processing_class is not None and (not dist.is_initialized() or dist.get_rank() == 0):
            self.processing_class.save_pretrained(folder)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        limit = self.args.save_total_limit
        try:
            if dist.is_initialized() and dist.get_rank() > 0:  # one rank removes old ones
                self.args.save_total_limit = None
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state: dict[str, Any] = {"optimizer": self.optimizer, "scheduler": self.lr_scheduler}
        save(Path(output_dir) / "training", model=self.model, **state)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing yet: the model comes with the optimizer."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            state: dict[str, Any] = {"optimizer": self.optimizer, "scheduler": self.lr_scheduler}
            load(Path(checkpoint) / "training", model=self.model, **state)

    def _load_best_model(self) -> None:
        model: Any = self.model
        best: Any = self.state.best_model_checkpoint
        load_hf(model, best)
