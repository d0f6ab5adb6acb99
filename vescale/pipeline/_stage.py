"""``ModelStage``: a stage of ``torch.distributed.pipelining`` whose messages are local tensors of DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import expect_message, record
from vescale.compat import local_of, make_dtensor, make_spec
from vescale.pipeline._headers import Header

# ``SplitBackward``: the two halves of a stage's backward: gradients of what it received, and those of its parameters.


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


Backward = Callable[[Sequence[torch.Tensor], Any, Sequence[torch.Tensor]], None]
"""Gets roots, their gradients, and what the stage has received, whose ``.grad`` there is then."""


def backward_of(roots: Sequence[torch.Tensor], gradients: Any, received: Sequence[torch.Tensor]) -> None:
    torch.autograd.backward(roots, gradients)


class StageWork(Protocol):
    """What the stages of a rank have in common: the model, and the batch of the step."""

    def forward(self, stage: int, microbatch: int, received: Sequence[DTensor]) -> tuple[list[DTensor], Any]:
        """What the stage sends, and where the last stage's backward begins: tensors, and their gradients or None."""

    def around_backward(self, stage: int, microbatch: int, kind: str) -> Any:
        """A context for a backward, or a half of one; ``kind`` is that of its action. Gives a :data:`Backward`."""

    def splits_backward(self) -> Callable[[Node], bool] | None:
        """None: gradients of parameters are computed in the first half, too. Else, which nodes compute all in it."""

    def header(self, stage: int) -> Sequence[Header] | None:
        """Of what enters a stage; waits for the rank of the stage before."""

    def header_of_arrived(self, stage: int, arrived: list[torch.Tensor]) -> Sequence[Header]:
        """The same of a message that was waited for: what requires gradients may be other than in earlier steps."""

    def tell_header(self, stage: int, headers: Sequence[Header], *, follows: bool) -> None:
        """Called with what enters a stage, by the stage before, for each micro-batch; ``follows``: a backward does."""

    def flags_of(self, stage: int) -> list[torch.Tensor]:
        """What the next message to a stage ends with, where a backward follows."""

    def returned(self, stage: int) -> Sequence[bool]:
        """For each tensor that was sent to a stage, whether a gradient comes."""


class ModelStage(PipelineStage):
    """One stage. The schedule calls the public methods of ``PipelineStage``; all that move or compute are replaced, because
    PyTorch's allocate buffers before the placements of activations are known, reduce gradients of FSDP2 only, and run the
    model once more to learn shapes."""

    def __init__(
        self, work: StageWork, model: Any, index: int, num_stages: int, device: torch.device, group: Any, mesh: Any
    ) -> None:
        nothing = torch.empty(1, device=device)
        super().__init__(model, index, num_stages, device, input_args=nothing, output_args=nothing, group=group)
        self.work, self.mesh = work, mesh
        self._peers: dict[int, int] = {}
        self.clear_runtime_states()

    def clear_runtime_states(self) -> None:
        self.arrived: dict[int, list[torch.Tensor]] = {}
        self.leaves: dict[int, list[DTensor]] = {}
        self.made: dict[int, list[DTensor]] = {}
        self.losses: dict[int, Any] = {}
        self.gradients: dict[int, list[tuple[DTensor, torch.Tensor]]] = {}
        self.returned: dict[int, list[torch.Tensor]] = {}
        self.halves: dict[int, SplitBackward] = {}

    def _peer(self, stage: int) -> int:
        found = self._peers.get(stage)
        if found is None:
            rank = self.stage_index_to_group_rank[stage]
            found = self._peers[stage] = dist.get_global_rank(self.group or dist.group.WORLD, rank)  # type: ignore[arg-type]
        return found

    def _messages(
        self, op: Any, tensors: Sequence[torch.Tensor], stage: int, microbatch: int, flags: Sequence[torch.Tensor] = ()
    ) -> list[dist.P2POp]:
        """What the schedule starts right afterwards. For an empty tensor, of a rank without rows, one element travels: a
        message means on all ranks that the sender has come here. ``flags``, of a few bytes, are not in the ledger."""
        peer = self._peer(stage) if tensors else 0
        moved = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in (*tensors, *flags)]
        name, way = ("send", "to") if op is dist.isend else ("recv", "from")
        who = f"stage {self.stage_index}, micro-batch {microbatch}: {way} stage {stage}"
        for tensor in tensors:
            record(name, 2, tensor.nbytes, requester=who, group=self.group)
        for message in moved:
            expect_message(message, who, peer)
        return [dist.P2POp(op, tensor, peer, self.group) for tensor in moved]

    # Forward

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        buffers = [header.empty(self.device) for header in self.work.header(self.stage_index) or ()]
        flags = self.work.flags_of(self.stage_index) if buffers and self.has_backward else []
        self.arrived[fwd_chunk_id] = [*buffers, *flags]
        return self._messages(dist.irecv, buffers, self.stage_index - 1, fwd_chunk_id, flags)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self.arrived[mb_index] = [local_of(made).detach() for made in prev_stage_outputs]

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> list[DTensor]:
        received: list[DTensor] = []
        if not self.is_first:
            arrived = self.arrived.pop(fwd_chunk_id)
            headers = self.work.header_of_arrived(self.stage_index, arrived)
            for local, header in zip(arrived, headers, strict=True):
                received.append(
                    header.dtensor(local, self.mesh, requires_grad=header.requires_grad and self.has_backward)
                )
        made, loss = self.work.forward(self.stage_index, fwd_chunk_id, received)
        if not self.is_last:
            headers = [Header.of(one) for one in made]
            self.work.tell_header(self.stage_index + 1, headers, follows=self.has_backward)
        self.leaves[fwd_chunk_id] = received
        self.made[fwd_chunk_id] = made
        if self.is_last:
            self.losses[fwd_chunk_id] = loss
        return made

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        made = [local_of(one).detach().contiguous() for one in self.made[fwd_chunk_id]]
        flags = self.work.flags_of(self.stage_index + 1) if made and self.has_backward else []
        if not self.has_backward:
            del self.made[fwd_chunk_id]
        return self._messages(dist.isend, made, self.stage_index + 1, fwd_chunk_id, flags)

    # Backward

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or not self.has_backward:
            return []
        self.gradients[bwd_chunk_id] = [
            (one, torch.empty(local_of(one).shape, dtype=one.dtype, device=self.device))
            for one, comes in zip(self.made[bwd_chunk_id], self.work.returned(self.stage_index + 1))
            if comes
        ]
        buffers = [buffer for _, buffer in self.gradients[bwd_chunk_id]]
        return self._messages(dist.irecv, buffers, self.stage_index + 1, bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        made = [one for one in self.made[mb_index] if one.requires_grad]
        self.gradients[mb_index] = list(zip(made, next_stage_bwd_outputs, strict=True))

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor, ...]:
        return tuple(self.returned.pop(mb_index))

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward, or with ``full_backward=False`` its first half."""
        if not self.has_backward:
            return
        del self.made[bwd_chunk_id]
        if self.is_last:
            roots, gradients = self.losses.pop(bwd_chunk_id)
        else:  # what has stopped to require gradients may still get some
            pairs = [(one, local) for one, local in self.gradients.pop(bwd_chunk_id) if one.requires_grad]
            roots, gradients = [one for one, _ in pairs], [_as_gradient(local, one) for one, local in pairs]
            del pairs
        leaves = [leaf for leaf in self.leaves.pop(bwd_chunk_id) if leaf.requires_grad]
        if not roots or not roots[0].requires_grad:
            roots = []
        is_whole = None if full_backward or not roots else self.work.splits_backward()
        with self.work.around_backward(self.stage_index, bwd_chunk_id, "B" if full_backward else "I") as backward:
            if is_whole is not None:
                halves = self.halves[bwd_chunk_id] = SplitBackward(roots, gradients, leaves, is_whole)
                del roots
                halves.inputs()
            elif roots:
                backward(roots, gradients, leaves)
        self.returned[bwd_chunk_id] = [_sent(leaf) for leaf in leaves]

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.has_backward:
            return
        halves = self.halves.pop(bwd_chunk_id, None)
        with self.work.around_backward(self.stage_index, bwd_chunk_id, "W"):
            if halves is not None:
                halves.weights()

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or not self.has_backward:
            return []
        return self._messages(dist.isend, self.returned.pop(bwd_chunk_id), self.stage_index - 1, bwd_chunk_id)

    def scale_grads(self, grad_scale_factor: int) -> None:
        return

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        return


def _gradient_placements(of: DTensor) -> tuple[Placement, ...]:
    """A gradient travels with the placements of its tensor, whole where that is a sum."""
    return tuple(Replicate() if p.is_partial() else p for p in of.placements)


def _as_gradient(local: torch.Tensor, of: DTensor) -> DTensor:
    spec = make_spec(of.device_mesh, _gradient_placements(of), of.shape, of.stride(), of.dtype)
    return make_dtensor(local, spec)


def _sent(leaf: DTensor) -> torch.Tensor:
    """The local tensor of a leaf's gradient. Communication: where the gradient arrived with other placements."""
    gradient = leaf.grad
    if gradient is None:
        return torch.zeros_like(local_of(leaf))
    assert isinstance(gradient, DTensor)
    wanted = _gradient_placements(leaf)
    if tuple(gradient.placements) != wanted:
        gradient = gradient.redistribute(leaf.device_mesh, wanted)
    leaf.grad = None
    return local_of(gradient).detach().contiguous()
