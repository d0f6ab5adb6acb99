"""What a training step does with gradients and parameters, on any mesh: clipping, and optimizers that know the layout."""

from vescale.optim._clip import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from vescale.optim._muon import Muon
from vescale.optim._muon_groups import muon_groups, muon_layout
from vescale.optim._report import ParameterReport
from vescale.optim._shampoo import Shampoo
from vescale.optim._soap import SOAP

__all__ = [
    "SOAP",
    "Muon",
    "ParameterReport",
    "Shampoo",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "get_total_norm",
    "muon_groups",
    "muon_layout",
]
