"""Meshes and plans for a model on a number of devices: what fits, ranked by the seconds of a step."""

from vescale.plan_search._choice import Choice
from vescale.plan_search._figures import Figures
from vescale.plan_search._search import Proposal, Rejected, Search, search

__all__ = ["Choice", "Figures", "Proposal", "Rejected", "Search", "search"]
