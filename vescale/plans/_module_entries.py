"""``ModuleEntries``: the entries of a plan that say how modules compute, and not where tensors are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch

from vescale.errors import EntryError, Source, calling_line
from vescale.plans._entries import (
    CheckpointEntry,
    CheckpointPolicy,
    PrecisionEntry,
    checkpoint_budget,
    checkpoint_policy,
    float_dtype_of,
)
from vescale.plans._plan_entries import PlanEntries


class ModuleEntries(PlanEntries):
    """Adds them, as :class:`PlanEntries` adds those of tensors."""

    def precision(
        self,
        path: str,
        *,
        param: torch.dtype | str | None = None,
        reduce: torch.dtype | str | None = None,
        output: torch.dtype | str | None = None,
        source: Source | None = None,
    ) -> Self:
        """Compute in other dtypes in the modules that ``path`` matches, and in all modules inside them (an inner entry
        takes precedence); ``""`` is the model itself. See :class:`PrecisionEntry`; dtypes may be names such as
        ``"bfloat16"``.

        Args:
            param: parameters are cast to it while their module runs.
            reduce: gradients are reduced in it. None: in ``param``.
            output: floating outputs are cast to it.
        """
        source = source or calling_line()
        given = {"param": param, "reduce": reduce, "output": output}
        try:
            dtypes = {name: float_dtype_of(name, value) for name, value in given.items()}
        except ValueError as error:
            raise EntryError(f"precision {path!r}: {error}", source) from None
        if not any(dtypes.values()):
            raise EntryError(f"precision {path!r} has no dtype; pass param=, reduce= or output=", source)
        return self._add(PrecisionEntry(self._module(path, "precision", source), **dtypes, source=source))

    def checkpoint(
        self,
        path: str,
        policy: str | Mapping[str, Any] | CheckpointPolicy = "full",
        budget_gib: float | None = None,
        *,
        source: Source | None = None,
    ) -> Self:
        """Compute the forward of the modules that ``path`` matches again in backward, instead of saving what it computes.

        ``policy``: ``"full"``, ``"selective"``, ``"offload"``, or ``{"save": [ops], "every": n, "recompute_communication":
        bool}``; see :class:`CheckpointPolicy`. ``budget_gib``: see :class:`CheckpointEntry`.
        """
        source = source or calling_line()
        try:
            chosen = checkpoint_policy(policy)
            budget = checkpoint_budget(budget_gib, chosen)
        except ValueError as error:
            raise EntryError(f"checkpoint {path!r}: {error}", source) from error
        parsed = self._module(path, "checkpoint", source)
        return self._add(CheckpointEntry(parsed, chosen, budget, source))
