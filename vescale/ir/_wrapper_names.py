"""Names without wrappers: a plan for a model also reaches it inside of PEFT's classes.

PEFT puts a model at ``base_model.model`` and replaces the modules that it adapts: ``q_proj`` becomes a module that holds the
old one as ``q_proj.base_layer`` beside ``q_proj.lora_A.default``, or as ``lm_head.original_module`` beside
``lm_head.modules_to_save.default``. For a plan, ``q_proj.weight`` is then the weight of the base layer, ``q_proj.<out>`` the
output of the whole module, and ``lm_head.weight`` both weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

__all__ = ["unwrapped"]

_ROOT = "base_model.model"


def unwrapped(
    modules: Mapping[str, nn.Module], module_names: Mapping[str, str], names: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Names without wrappers -> first names (``names``: every name -> its first one), where they are not names already.

    ``modules``: by first name; ``module_names``: every name of a module -> its first one.
    """
    has_root = _ROOT in module_names and hasattr(modules[""], "peft_config")
    found: dict[str, list[str]] = {}
    for name, first in names.items():
        short = name
        if has_root and (name == _ROOT or name.startswith(f"{_ROOT}.")):
            short = name[len(_ROOT) + 1 :]
        short = ".".join(_plain_parts(short, name, modules, module_names))
        if short not in names and short:
            found.setdefault(short, []).append(first)
    return {short: tuple(dict.fromkeys(firsts)) for short, firsts in found.items()}


def _plain_parts(
    short: str, name: str, modules: Mapping[str, nn.Module], module_names: Mapping[str, str]
) -> Iterable[str]:
    """The parts of a dotted name, without those that a wrapper has put in: the last module keeps its own."""
    offset = name.count(".") + 1 - (short.count(".") + 1 if short else 0)
    parts = name.split(".")
    position = offset
    while position < len(parts):
        around = module_names.get(".".join(parts[:position]))
        adapted = modules.get(around) if around is not None else None
        if adapted is not None and position < len(parts) - 1:
            if parts[position] in ("base_layer", "original_module") and _is_adapted(adapted):
                position += 1
                continue
            if parts[position] == "modules_to_save" and _is_adapted(adapted) and position < len(parts) - 2:
                position += 2
                continue
        yield parts[position]
        position += 1


def _is_adapted(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "peft"
