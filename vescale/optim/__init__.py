"""What a training step does with gradients and parameters, on any mesh: clipping, optimizers that know the layout, averages
of parameters, and reports."""

from vescale.optim._adamw8bit import AdamW8bit, adamw8bit_layout, blocks_of
from vescale.optim._blocks import Blocks
from vescale.optim._clip import clip_grad_norm_, clip_grads_with_norm_, extend_torch_for_stages, get_total_norm
from vescale.optim._ema import EMA
from vescale.optim._muon import Muon, muon_groups, muon_layout
from vescale.optim._preconditioned import SOAP, Shampoo
from vescale.optim._report import OptimizerReport, ParameterReport, report

__all__ = [
    "EMA",
    "SOAP",
    "AdamW8bit",
    "Muon",
    "OptimizerReport",
    "ParameterReport",
    "Shampoo",
    "adamw8bit_layout",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "get_total_norm",
    "muon_groups",
    "muon_layout",
    "report",
]
