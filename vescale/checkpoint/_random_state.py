"""The state of all random number generators of a process that a script uses without naming them, as a tensor of bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import numpy as np
import torch

from vescale.checkpoint._json_values import decode, encode

__all__ = ["different_seeds", "get_random_state", "set_random_state"]

_SEEDS = {
    "torch": "torch.manual_seed",
    "cuda": "torch.cuda.manual_seed",
    "numpy": "numpy.random.seed",
    "python": "random.seed",
}


def get_random_state() -> torch.Tensor:
    """Those of torch (CPU and current GPU), numpy and Python."""
    found = {
        "torch": torch.get_rng_state().numpy(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state().numpy()
    text = json.dumps(encode(found, "rng", {}), separators=(",", ":"))
    return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())


def set_random_state(state: torch.Tensor) -> None:
    found = decode(json.loads(state.numpy().tobytes()))
    torch.set_rng_state(torch.from_numpy(found["torch"]))
    np.random.set_state(found["numpy"])
    random.setstate(found["python"])
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(found["cuda"]))


def different_seeds(states: Sequence[torch.Tensor]) -> list[str]:
    """The functions that seed those generators whose states are not all equal."""
    found = [json.loads(state.numpy().tobytes()) for state in states]
    return [call for key, call in _SEEDS.items() if len({json.dumps(each.get(key)) for each in found}) > 1]
