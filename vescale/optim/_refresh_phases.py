"""In which steps the costly part of each matrix's preconditioner is due, so that no step has much more than another."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["refresh_phases"]


def refresh_phases(costs: Sequence[int], frequencies: Sequence[int]) -> list[int]:
    """For each matrix a phase below its frequency: what is due every ``f`` steps is due in the steps ``phase + k f``.

    Costly matrices first, each to the phase with the least cost so far; the first of equal ones to the first phase.
    Depends on the matrices alone, and not on meshes and owners, because it decides the numbers. A single matrix has
    phase 0.
    """
    heaps: dict[int, list[tuple[int, int]]] = {}
    phases = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        frequency = frequencies[index]
        heap = heaps.setdefault(frequency, [(0, phase) for phase in range(frequency)])
        load, phases[index] = heap[0]
        heapq.heapreplace(heap, (load + costs[index], phases[index]))
    return phases
