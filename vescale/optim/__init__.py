"""What a training step does with gradients and parameters, on any mesh: clipping, optimizers, averages of parameters."""

from vescale.optim._adamw8bit import AdamW8bit, adamw8bit_layout
from vescale.optim._adamw8bit_states import blocks_of
from vescale.optim._blocks import Blocks
from vescale.optim._clip import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from vescale.optim._ema import EMA
from vescale.optim._report import OptimizerReport, ParameterReport, report

__all__ = [
    "EMA",
    "AdamW8bit",
    "Blocks",
    "OptimizerReport",
    "ParameterReport",
    "adamw8bit_layout",
    "blocks_of",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "get_total_norm",
    "report",
]
