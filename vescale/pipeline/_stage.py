"""``ModelStage``: a stage of ``torch.distributed.pipelining`` whose messages are local tensors of DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd.graph import Node
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import expect_message, record
from vescale.compat import local_of, make_dtensor, make_spec
from vescale.pipeline._headers import Header
from vescale.pipeline._split_backward import SplitBackward

__all__ = ["ModelStage", "StageWork"]


class StageWork(Protocol):
    """What the stages of a rank have in common: the model, and the batch of the step."""

    def forward(self, stage: int, microbatch: int, received: Sequence[DTensor]) -> tuple[list[DTensor], Any]:
        """What the stage sends, and the loss of the last stage."""

    def around_backward(self, stage: int, microbatch: int, kind: str) -> Any:
        """A context for a backward, or a half of one; ``kind`` is that of its action."""

    def splits_backward(self) -> Callable[[Node], bool] | None:
        """None: gradients of parameters are computed in the first half, too. Else, which nodes compute all in it."""

    def header(self, stage: int) -> Sequence[Header]:
        """Of what enters a stage; waits for the rank of the stage before."""

    def header_of_arrived(self, stage: int) -> Sequence[Header]:
        """The same of a message that has arrived: what requires gradients may be other than in earlier steps."""

    def tell_header(self, stage: int, headers: Sequence[Header]) -> None:
        """Called with what enters a stage, by the stage before, for each micro-batch."""


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
        self.losses: dict[int, torch.Tensor] = {}
        self.gradients: dict[int, list[torch.Tensor]] = {}
        self.returned: dict[int, list[torch.Tensor]] = {}
        self.halves: dict[int, SplitBackward] = {}

    def _peer(self, stage: int) -> int:
        found = self._peers.get(stage)
        if found is None:
            rank = self.stage_index_to_group_rank[stage]
            found = self._peers[stage] = dist.get_global_rank(self.group or dist.group.WORLD, rank)  # type: ignore[arg-type]
        return found

    def _messages(self, op: Any, tensors: Sequence[torch.Tensor], stage: int, microbatch: int) -> list[dist.P2POp]:
        """What the schedule starts right afterwards. For an empty tensor, of a rank without rows, one element travels: a
        message means on all ranks that the sender has come here."""
        peer = self._peer(stage) if tensors else 0
        moved = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
        for tensor, message in zip(tensors, moved):
            name, way = ("send", "to") if op is dist.isend else ("recv", "from")
            who = f"stage {self.stage_index}, micro-batch {microbatch}: {way} stage {stage}"
            record(name, 2, tensor.nbytes, requester=who, group=self.group)
            expect_message(message, who, peer)
        return [dist.P2POp(op, tensor, peer, self.group) for tensor in moved]

    # Forward

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        buffers = [header.empty(self.device) for header in self.work.header(self.stage_index)]
        self.arrived[fwd_chunk_id] = buffers
        return self._messages(dist.irecv, buffers, self.stage_index - 1, fwd_chunk_id)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self.arrived[mb_index] = [local_of(made).detach() for made in prev_stage_outputs]

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> list[DTensor]:
        received: list[DTensor] = []
        if not self.is_first:
            headers = self.work.header_of_arrived(self.stage_index)
            for local, header in zip(self.arrived.pop(fwd_chunk_id), headers, strict=True):
                received.append(
                    header.dtensor(local, self.mesh, requires_grad=header.requires_grad and self.has_backward)
                )
        made, loss = self.work.forward(self.stage_index, fwd_chunk_id, received)
        if not self.is_last:
            self.work.tell_header(self.stage_index + 1, [Header.of(one) for one in made])
        self.leaves[fwd_chunk_id] = received
        self.made[fwd_chunk_id] = made
        if self.is_last:
            self.losses[fwd_chunk_id] = loss
        return made

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        made = [local_of(one).detach().contiguous() for one in self.made[fwd_chunk_id]]
        if not self.has_backward:
            del self.made[fwd_chunk_id]
        return self._messages(dist.isend, made, self.stage_index + 1, fwd_chunk_id)

    # Backward

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or not self.has_backward:
            return []
        made = self.made[bwd_chunk_id]
        buffers = [
            torch.empty(local_of(one).shape, dtype=one.dtype, device=self.device) for one in made if one.requires_grad
        ]
        self.gradients[bwd_chunk_id] = buffers
        return self._messages(dist.irecv, buffers, self.stage_index + 1, bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        self.gradients[mb_index] = list(next_stage_bwd_outputs)

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor, ...]:
        return tuple(self.returned.pop(mb_index))

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward, or with ``full_backward=False`` its first half."""
        if not self.has_backward:
            return
        made = [one for one in self.made.pop(bwd_chunk_id) if one.requires_grad]
        if self.is_last:
            roots, gradients = [self.losses.pop(bwd_chunk_id)], None
        else:
            roots = made  # type: ignore[assignment]
            gradients = [
                _as_gradient(local, one) for local, one in zip(self.gradients.pop(bwd_chunk_id), made, strict=True)
            ]
        leaves = [leaf for leaf in self.leaves.pop(bwd_chunk_id) if leaf.requires_grad]
        if not roots or not roots[0].requires_grad:
            roots = []
        is_whole = None if full_backward or not roots else self.work.splits_backward()
        with self.work.around_backward(self.stage_index, bwd_chunk_id, "B" if full_backward else "I"):
            if is_whole is not None:
                halves = self.halves[bwd_chunk_id] = SplitBackward(roots, gradients, leaves, is_whole)
                del roots, made
                halves.inputs()
            elif roots:
                torch.autograd.backward(roots, gradients)
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
