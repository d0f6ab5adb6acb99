"""Mixed precision and offload of units: PyTorch's objects, and their form in a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from vescale.errors import UnitPolicyError

__all__ = ["dtype_name", "float_dtype_of", "mp_options", "mp_policy_of", "pins_memory"]

_DEFAULT = MixedPrecisionPolicy()
_OPTIONS = tuple(field.name for field in fields(MixedPrecisionPolicy))


def mp_policy_of(given: MixedPrecisionPolicy | Mapping[str, Any] | None) -> MixedPrecisionPolicy | None:
    """The policy of ``{param_dtype: bfloat16, ...}``; None for a policy that changes nothing.

    Raises ValueError with the correct form.
    """
    if isinstance(given, Mapping):
        unknown = sorted(set(given) - set(_OPTIONS))
        if unknown:
            raise UnitPolicyError(f"mp_policy has no {unknown[0]!r}; use {', '.join(_OPTIONS)}")
        given = MixedPrecisionPolicy(**{name: _value(name, value) for name, value in given.items()})
    if given is not None and not isinstance(given, MixedPrecisionPolicy):
        raise UnitPolicyError(f"mp_policy={given!r}; use a MixedPrecisionPolicy, or a dict of its arguments")
    return None if given == _DEFAULT else given


def _value(name: str, value: Any) -> Any:
    if name == "cast_forward_inputs":
        if not isinstance(value, bool):
            raise UnitPolicyError(f"mp_policy: cast_forward_inputs={value!r}; use True or False")
        return value
    return float_dtype_of(f"mp_policy: {name}", value)


def float_dtype_of(name: str, value: torch.dtype | str | None) -> torch.dtype | None:
    """A floating dtype of torch, or its name, or None. Raises ValueError with the correct form for anything else."""
    found = getattr(torch, value, None) if isinstance(value, str) else value
    if value is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise UnitPolicyError(f"{name}={value!r}; use a floating dtype such as bfloat16 or float32")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """As :func:`float_dtype_of` reads it."""
    return str(dtype).removeprefix("torch.")


def mp_options(policy: MixedPrecisionPolicy | None) -> dict[str, str | bool]:
    """The options that differ from the default policy, dtypes by name, as :func:`mp_policy_of` reads them."""
    found: dict[str, str | bool] = {}
    for name in _OPTIONS if policy is not None else ():
        value = getattr(policy, name)
        if value != getattr(_DEFAULT, name):
            found[name] = dtype_name(value) if isinstance(value, torch.dtype) else value
    return found


def pins_memory(given: OffloadPolicy | Mapping[str, Any] | None) -> bool | None:
    """Whether the host memory that holds parameters at rest is pinned; None: they are on the device.

    Raises ValueError with the correct form.
    """
    if isinstance(given, Mapping):
        if set(given) - {"pin_memory"} or not isinstance(given.get("pin_memory", True), bool):
            raise UnitPolicyError(f"offload_policy={dict(given)!r}; use {{pin_memory: true}}, or false")
        return bool(given.get("pin_memory", True))
    if isinstance(given, CPUOffloadPolicy):
        return bool(given.pin_memory)
    if given is not None and not isinstance(given, OffloadPolicy):
        raise UnitPolicyError(f"offload_policy={given!r}; use CPUOffloadPolicy(), or leave it out")
    return None
