"""``TrainedParameters``: which parameters of a model are trained, for ranks to compare after each change."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch

from vescale.checks._descriptions import hash_of

_MAX_NAMES = 120
_requires_grad = operator.attrgetter("requires_grad")


class TrainedParameters:
    """Of one model, on all ranks that train it."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._parameters: list[torch.Tensor] = []
        self._seen: list[bool] = []

    def see(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
        """The parameters by name, from now on. Returns which of them are frozen, for the caller to compare."""
        found = [*parameters]
        self._names, self._parameters = [name for name, _ in found], [parameter for _, parameter in found]
        self._seen = [*map(_requires_grad, self._parameters)]
        return self._text()

    def changed(self) -> str | None:
        """The same where a parameter has been frozen or thawed since, else None."""
        now = [*map(_requires_grad, self._parameters)]
        if now == self._seen:
            return None
        self._seen = now
        return self._text()

    def _text(self) -> str:
        frozen = [name for name, is_trained in zip(self._names, self._seen, strict=True) if not is_trained]
        text = ", ".join(frozen)
        if len(text) >= _MAX_NAMES:
            text = f"{text[:_MAX_NAMES]}... ({len(frozen)}, {hash_of(text)})"
        return f"False of {text}" if frozen else "True of all"
