"""Hugging Face classes that carry no plan of their own, in tiny configurations, for ``new_plan``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.plans.tiny_hf import tiny_config

__all__ = ["CLASSES", "DAILY", "Built", "example"]


@dataclass(frozen=True)
class Built:
    """Builds a class with the values of seed 0; picklable, so that other processes can call it.

    ``settings``: of the configuration, where the rules on names of sizes do not fit; ``inputs``: beside those that
    ``vescale plan new`` guesses.
    """

    name: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> nn.Module:
        import transformers

        torch.manual_seed(0)
        config = tiny_config(getattr(transformers, self.config), **self.settings)
        return getattr(transformers, self.name)(config)


def _classes(*names: str, **settings: Any) -> dict[str, Built]:
    """``family:end of the class's name``."""
    found = {}
    for name in names:
        family, end = name.split(":")
        found[family + end] = Built(family + end, f"{family}Config", settings)
    return found


_VISION: dict[str, Any] = {"image_size": 16, "patch_size": 4, "num_labels": 3}
_LAYERS: dict[str, Any] = {"encoder_layers": 2, "decoder_layers": 2}
CLASSES: dict[str, Built] = {
    **_classes(
        *("Bert:ForMaskedLM", "Roberta:ForMaskedLM", "XLMRoberta:ForSequenceClassification", "Camembert:ForMaskedLM"),
        *("Electra:ForMaskedLM", "DistilBert:ForMaskedLM", "MPNet:ForMaskedLM", "ModernBert:ForMaskedLM"),
        *("Albert:ForMaskedLM", "RoFormer:ForMaskedLM", "MegatronBert:ForMaskedLM", "RemBert:ForMaskedLM"),
        *("XLMRobertaXL:ForMaskedLM", "RobertaPreLayerNorm:ForMaskedLM", "LayoutLM:ForMaskedLM", "Ernie:ForMaskedLM"),
        *("Data2VecText:ForMaskedLM", "DebertaV2:ForMaskedLM", "ConvBert:ForMaskedLM"),
        *("GPT2:LMHeadModel", "GPTNeo:ForCausalLM", "OPT:ForCausalLM"),
        *("Bloom:ForCausalLM", "Mpt:ForCausalLM", "Falcon:ForCausalLM", "XGLM:ForCausalLM", "BioGpt:ForCausalLM"),
        *("GPTBigCode:ForCausalLM", "Persimmon:ForCausalLM", "StableLm:ForCausalLM", "GPTNeoXJapanese:ForCausalLM"),
        *("T5:ForConditionalGeneration", "FNet:ForMaskedLM", "CTRL:LMHeadModel", "OpenAIGPT:LMHeadModel"),
    ),
    **_classes("Esm:ForMaskedLM", vocab_size=64, pad_token_id=0, mask_token_id=1),
    **_classes("GPTJ:ForCausalLM", "CodeGen:ForCausalLM", rotary_dim=4),
    **_classes(
        *("Bart:ForConditionalGeneration", "Pegasus:ForConditionalGeneration", "M2M100:ForConditionalGeneration"),
        **_LAYERS,
    ),
    **_classes("Whisper:ForConditionalGeneration", max_source_positions=16, max_target_positions=16, **_LAYERS),
    **_classes("Swin:ForImageClassification", embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=2, **_VISION),
    **_classes(
        *("ViT:ForImageClassification", "DeiT:ForImageClassification", "Dinov2:ForImageClassification"),
        *("Beit:ForImageClassification", "ViTMSN:ForImageClassification"),
        **_VISION,
    ),
}
# The others are nightly.
DAILY = ("RobertaForMaskedLM", "BloomForCausalLM", "T5ForConditionalGeneration", "ViTForImageClassification")


def example(model: nn.Module) -> dict[str, Any]:
    """The inputs that are guessed for the model, with values."""
    from vescale.ir import example_inputs, random_inputs

    return random_inputs(example_inputs(model, 4, 8), model, 1)
