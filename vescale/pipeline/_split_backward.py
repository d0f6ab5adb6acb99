"""``SplitBackward``: the two halves of a stage's backward: gradients of what it received, and those of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

__all__ = ["SplitBackward"]


@dataclass
class _Junction:
    """A node on the way to the stage's inputs that also leads to parameters: most often a matrix product.

    Attributes:
        leaves: the parameters that are reached from it without another node on the way to the inputs.
        gradients: those of its outputs, once the first half has run.
    """

    node: Node
    leaves: list[torch.Tensor]
    gradients: tuple[torch.Tensor | None, ...] = ()


@dataclass
class _Apart:
    """A root that does not depend on the inputs, with its gradient and the parameters that it depends on."""

    root: torch.Tensor
    gradient: torch.Tensor | None
    leaves: list[torch.Tensor]


class SplitBackward:
    """The backward of ``roots`` in two halves, each of which computes nothing that the other does.

    =========  ========================================================================================================
    half       what runs
    =========  ========================================================================================================
    `inputs`   the nodes on the way to the inputs, and only their parts for it; their gradients are kept where the way to
               a parameter branches off
    `weights`  from there, and from roots that do not depend on the inputs, the rest, as one backward: gradients arrive at
               parameters, and hooks of parameters run, as without the split
    =========  ========================================================================================================

    Parameters whose way cannot be left out of the first half get their gradients there: those of nodes for which
    ``is_whole`` holds, of autograd functions in Python, which compute all their gradients at once, and those that are used
    again on the way from their first use to the inputs. Between the halves all saved tensors stay.

    Args:
        roots: tensors with a graph.
        gradients: of the roots; None for a scalar.
        inputs: leaves; without any, the first half does nothing.
        is_whole: gets a node of the graph.
    """

    def __init__(
        self,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor] | None,
        inputs: Sequence[torch.Tensor],
        is_whole: Callable[[Node], bool],
    ) -> None:
        self._roots, self._gradients, self._inputs = list(roots), gradients, list(inputs)
        self._junctions: list[_Junction] = []
        self._apart: list[_Apart] = []
        self._early: list[torch.Tensor] = []
        if self._inputs:
            self._find(is_whole)

    def inputs(self) -> None:
        """The first half: ``.grad`` of the inputs."""
        if not self._inputs:
            return
        handles = [one.node.register_prehook(_keeping(one)) for one in self._junctions]
        retain = bool(self._junctions or self._apart)
        try:
            torch.autograd.backward(
                self._roots, self._gradients, retain_graph=retain, inputs=[*self._inputs, *self._early]
            )
        finally:
            for handle in handles:
                handle.remove()
        self._roots, self._gradients, self._inputs = [], None, []

    def weights(self) -> None:
        """The second half: ``.grad`` of the parameters. The graph is gone afterwards."""
        if self._roots:  # there was no first half
            torch.autograd.backward(self._roots, self._gradients)
            self._roots, self._gradients = [], None
            return
        reached = [one for one in self._junctions if any(g is not None for g in one.gradients)]
        apart = self._apart
        self._junctions, self._apart = [], []
        if reached or apart:
            leaves = apart[0].leaves if apart else reached[0].leaves
            anchor = torch.empty((), device=leaves[0].device, requires_grad=True)
            with torch.enable_grad():
                start = _Together.apply(anchor, lambda: _run(reached, apart))
            torch.autograd.backward([start], inputs=[anchor])

    def _find(self, is_whole: Callable[[Node], bool]) -> None:
        order, into = _nodes([root.grad_fn for root in self._roots if root.grad_fn is not None])
        wanted = {id(one) for one in self._inputs}
        way = {node for node in order if id(getattr(node, "variable", None)) in wanted}
        pending = list(way)
        while pending:
            for before in into[pending.pop()]:
                if before not in way:
                    way.add(before)
                    pending.append(before)
        found: dict[Node, dict[int, torch.Tensor]] = {}
        early: dict[int, torch.Tensor] = {}
        below: dict[Node, dict[int, torch.Tensor]] = {}  # of nodes off the way: the leaves that are reached
        # From the inputs on: ``later`` are the leaves that are reached on the way behind a node.
        later: dict[Node, frozenset[int]] = {}
        for node in _from_the_inputs(order, into):
            following = [n for n, _ in node.next_functions if n is not None]
            if node not in way:
                leaf = getattr(node, "variable", None)
                below[node] = {id(leaf): leaf} if leaf is not None else {}
                for n in following:
                    below[node].update(below[n])
                continue
            leaves = {key: leaf for n in following if n not in way for key, leaf in below[n].items()}
            behind = frozenset().union(*(later[n] for n in following if n in way))
            later[node] = behind | leaves.keys() if leaves else behind
            if not leaves:
                continue
            if is_whole(node) or isinstance(node, torch.autograd.function.BackwardCFunction):
                early.update(leaves)
            else:
                early.update((key, leaf) for key, leaf in leaves.items() if key in behind)
                found[node] = leaves
        self._early = list(early.values())
        for node, leaves in found.items():
            rest = [leaf for key, leaf in leaves.items() if key not in early]
            if rest:
                self._junctions.append(_Junction(node, rest))
        given: Sequence[torch.Tensor | None] = self._gradients or [None] * len(self._roots)
        for root, gradient in zip(self._roots, given):
            if root.grad_fn is None:
                leaves = {id(root): root} if id(root) not in wanted and root.requires_grad else {}
            else:
                leaves = below.get(root.grad_fn, {})
            rest = [leaf for key, leaf in leaves.items() if key not in early]
            if rest:
                self._apart.append(_Apart(root, gradient, rest))


class _Together(torch.autograd.Function):
    """Runs backwards inside of one, so that what follows the end of a backward follows once."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, run: Callable[[], None]) -> torch.Tensor:
        ctx.run = run
        return anchor.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.run()
        return gradient, None


def _run(junctions: list[_Junction], apart: list[_Apart]) -> None:
    for one in junctions:
        given = [(GradientEdge(one.node, n), g) for n, g in enumerate(one.gradients) if g is not None]
        # Hooks on the node have seen these gradients in the first half; what they make of them now is put aside.
        handle = one.node.register_prehook(lambda _, gradients=one.gradients: gradients)
        try:
            torch.autograd.backward(
                [edge for edge, _ in given], [g for _, g in given], retain_graph=True, inputs=one.leaves
            )
        finally:
            handle.remove()
    for root in apart:
        torch.autograd.backward([root.root], [root.gradient], retain_graph=True, inputs=root.leaves)
    junctions.clear()
    apart.clear()


def _keeping(junction: _Junction) -> Callable[..., None]:
    def keep(gradients: tuple[torch.Tensor | None, ...]) -> None:
        junction.gradients = gradients

    return keep


def _nodes(roots: Sequence[Node]) -> tuple[list[Node], dict[Node, list[Node]]]:
    """The graph's nodes, and for each those that lead to it."""
    into: dict[Node, list[Node]] = {root: [] for root in roots}
    order = list(into)
    for node in order:
        for n, _ in node.next_functions:
            if n is not None:
                if n not in into:
                    into[n] = []
                    order.append(n)
                into[n].append(node)
    return order, into


def _from_the_inputs(order: Sequence[Node], into: dict[Node, list[Node]]) -> Iterator[Node]:
    """The nodes, each after all that it leads to."""
    missing = {node: sum(n is not None for n, _ in node.next_functions) for node in order}
    ready = [node for node, number in missing.items() if number == 0]
    while ready:
        node = ready.pop()
        yield node
        for before in into[node]:
            missing[before] -= 1
            if missing[before] == 0:
                ready.append(before)
