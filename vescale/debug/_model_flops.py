"""Floating-point operations of a model for each token, and of a device for each second."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from vescale.errors import EstimateOptionError
from vescale.pipeline import PipelineModule
from vescale.plans import config_value

# Dense bfloat16 products by the vendors' data sheets, in operations a second. The first name that the device's contains.
_PEAKS = (
    ("B200", 2250e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("H800", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("A10", 125e12),
    ("V100", 125e12),
    ("MI300X", 1307e12),
)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def flops_per_token(model: nn.Module, sequence_length: int | None = None) -> float:
    """Floating-point operations that training takes for a token, forward and backward, without recomputation.

    6 for each parameter that multiplies (2 forward, 2 for the gradient of the input, 2 for its own; 4 for a frozen one),
    as in PaLM's appendix B (https://arxiv.org/abs/2204.02311): all with two dims or more, but tables of embeddings (a tied
    head counts) and what has one row (positions, class tokens). Experts count by the share that a token uses. With
    ``sequence_length``, attention adds 12 x layers x heads x head size x length, of a model with a configuration of
    transformers; causal masks do not halve it.

    Args:
        model: before or after ``parallelize`` or ``fully_shard``; not one that has been split into pipeline stages.
        sequence_length: tokens of a sequence; None: the products of attention are left out.

    Raises:
        ValueError: what a token costs does not follow from the parameters: convolutions whose windows overlap, experts
            without ``num_experts_per_tok`` in ``model.config``, pipeline stages.
    """
    if isinstance(model, PipelineModule):
        raise EstimateOptionError(
            "this model has been split into pipeline stages, and a rank has only its own; call "
            "flops_per_token(model) before parallelize, and pass the number as flops_per_token="
        )
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    total = 0.0
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2 or parameter.shape[0] == 1 or isinstance(module, nn.Embedding):
                continue
            path = ".".join(part for part in (module_name, name) if part)
            share = _share_of_experts(config, path, parameter)
            if isinstance(module, _CONVOLUTIONS):
                _check_windows(path, module)
            total += (6.0 if parameter.requires_grad else 4.0) * parameter.numel() * share
    return total + (_attention(config, sequence_length) if sequence_length else 0.0)


def _share_of_experts(config: Any, path: str, parameter: torch.Tensor) -> float:
    """Of a stack of experts' matrices, the part that a token meets; 1 for other parameters."""
    if "expert" not in path or "shared_expert" in path:
        return 1.0
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next(filter(None, (config_value(config, name) for name in names)), None)
    chosen = config_value(config, "num_experts_per_tok")
    if not experts or not chosen:
        raise EstimateOptionError(
            f"{path} has experts, but model.config does not contain the number that a token uses "
            f"(num_experts_per_tok, and one of {', '.join(names)}); pass flops_per_token="
        )
    return float(chosen) / float(experts)


def _check_windows(path: str, module: Any) -> None:
    if tuple(module.kernel_size) != tuple(module.stride):
        raise EstimateOptionError(
            f"{path} is a convolution with windows of {tuple(module.kernel_size)} and steps of "
            f"{tuple(module.stride)}: its FLOPs per token cannot be derived from its parameters; pass flops_per_token="
        )


def _attention(config: Any, sequence_length: int) -> float:
    features = 0  # of the queries of all layers
    for layer in range(getattr(config, "num_hidden_layers", None) or 0):
        heads = config_value(config, "num_attention_heads", layer)
        hidden = config_value(config, "hidden_size", layer)
        if heads and hidden:
            features += heads * (config_value(config, "head_dim", layer) or hidden // heads)
    return 12.0 * features * sequence_length


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 operations a second of a GPU, by its data sheet; None for devices that are not listed."""
    name_of = None if device.type == "cpu" else getattr(torch.get_device_module(device.type), "get_device_name", None)
    name = "" if name_of is None else name_of(device)
    return next((peak for part, peak in _PEAKS if part in name), None)


def measured_flops(device: torch.device, dtype: torch.dtype = torch.float32, size: int = 512) -> float:
    """Operations a second that products of two ``size`` x ``size`` matrices reach here: the best of ten."""
    a, b = (torch.randn(size, size, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    a, b = a.to(device, dtype), b.to(device, dtype)
    best = float("inf")
    for _ in range(10):
        begin = time.perf_counter()
        a @ b
        if device.type != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - begin)
    return 2.0 * size**3 / best
