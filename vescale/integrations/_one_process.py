"""What makes Trainer and accelerate do on every rank what they do on one device."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from transformers import TrainingArguments


def hide_ranks() -> None:
    """Removes the variables of torchrun from the environment, so that Trainer and accelerate find a single process: batch
    sizes are those of the whole job, and nothing is wrapped or gathered. Call it after ``vescale.init_mesh``, and before
    arguments of a trainer or an ``Accelerator`` are made."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


def stay_on_device(arguments: TrainingArguments, mesh: DeviceMesh, index: int) -> None:
    """Sets the device of ``TrainingArguments``, which are those of a single process and have taken the first accelerator,
    to that of this rank.

    Args:
        arguments: of the trainer, made after :func:`hide_ranks`.
        mesh: of the model.
        index: of this rank's accelerator, as ``torch.accelerator.current_device_index()`` was before.
    """
    if mesh.device_type != "cpu":
        torch.accelerator.set_device_index(index)
        vars(arguments).update(_setup_devices=torch.device(mesh.device_type, index), _n_gpu=1)
