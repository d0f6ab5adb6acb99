"""What an optimizer holds and sends for each parameter: algorithm, owner, bytes of states and of a step."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ParameterReport"]


@dataclass(frozen=True)
class ParameterReport:
    """One parameter of an optimizer, as this rank sees it.

    Attributes:
        name: the parameter's name, as the optimizer was given it (``param_names`` of its group), else its place,
            ``"group 0, parameter 3"``.
        algorithm: what updates it, for example ``"adamw8bit"``, ``"muon"``.
        owner: the global rank that computes its update whole; several where its blocks have different owners, in the
            blocks' order; None where every rank updates the part that it holds.
        state_bytes: bytes of its states on this rank; before the first step those that it will have.
        step_bytes: bytes that this rank receives for it in one step of the optimizer; 0 where nothing is sent.
    """

    name: str
    algorithm: str
    owner: int | tuple[int, ...] | None
    state_bytes: int
    step_bytes: int
