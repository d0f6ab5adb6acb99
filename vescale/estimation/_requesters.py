"""What the requesters of collectives tell about them."""

from __future__ import annotations

from vescale.ir import Repeats


def names_block(requester: str, repeats: Repeats) -> bool:
    """Whether a collective's requester is the block that stands for others, or inside of it."""
    return (
        repeats.stand_in in requester and f"{repeats.stand_in}." in f"{requester.replace(' ', '.').replace(':', '.')}."
    )


def is_of_parameters(requester: str) -> bool:
    """Whether a collective moves parameters or their gradients, which compute hides."""
    return requester.startswith("bucket") or ("<" not in requester and ": " not in requester)
