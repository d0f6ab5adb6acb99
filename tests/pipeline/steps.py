"""Steps of a pipeline on real ranks, compared with one device that runs the whole batch."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.device import device_type
from tests.whole import whole
from vescale import optim, parallelize
from vescale.estimation import predict
from vescale.pipeline import StagedProgram
from vescale.plans import Plan

__all__ = ["Block", "Net", "make_gpt2", "mesh_of", "rel", "same_steps", "token_batch"]


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x))))) * mask


class Net(nn.Module):
    """A parent that makes a mask, adds positions, drops out before the blocks, and has its loss itself."""

    def __init__(self, depth: int = 4, dropout: float = 0.1, tied: bool = True, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.position = nn.Embedding(8, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.embed(ids) + self.position(positions))
        mask = (ids != 0).unsqueeze(-1).to(x.dtype)
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), "logits": logits}


def make_gpt2(dropout: float = 0.1, layers: int = 4, attention: float = 0.1) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=16, n_layer=layers, n_head=2, vocab_size=32, n_positions=16, attn_pdrop=attention, embd_pdrop=dropout,
        resid_pdrop=dropout,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def mesh_of(**sizes: int) -> Any:
    return init_device_mesh(device_type(), tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def token_batch(
    step: int, rows: int = 8, length: int = 6, names: tuple[str, str] = ("input_ids", "labels")
) -> dict[str, Any]:
    """Labels are valid for a different number of tokens in each row; the first two rows have none."""
    draws = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 32, (rows, length), generator=draws)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : (length if row < 2 else (row * 3) % length)] = -100
    return {names[0]: ids, names[1]: labels}


def rel(a: torch.Tensor, b: torch.Tensor) -> float:
    found = float((a - b).abs().max() / b.abs().max().clamp_min(1e-300))
    return found if found == found else float("inf")  # max() would leave out a nan


def same_steps(
    make: Callable[[], nn.Module],
    plan: Callable[[], Plan],
    batches: list[dict[str, Any]],
    *,
    loss: Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor]] | None = None,
    accumulate: bool = False,
    strict: bool = False,
    draws: bool = True,
    given: Callable[[dict[str, Any]], dict[str, Any]] = lambda batch: batch,
) -> dict[str, float]:
    """Largest relative differences of losses, gradients and parameters over steps of SGD with momentum; of the rank's own
    parameters, whose names must be those of the whole model. Also: the generators are in the same state afterwards (not
    with ``draws=False``: simulated ranks share one). ``given``: what of the batch this rank gives."""
    reference = make()
    model = parallelize(copy.deepcopy(reference), plan(), strict=strict)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (reference, model)]
    found = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0, "norm": 0.0}
    names = dict(reference.named_parameters())
    for step, batch in enumerate(batches):
        if draws:
            torch.manual_seed(100 + step)
        if loss is None:
            out = reference(**batch)
            expected = out["loss"]
        else:
            total, count = loss(reference(**_taken(reference, batch)), batch)
            expected = total / count
        expected.backward()
        state = torch.get_rng_state()
        if draws:
            torch.manual_seed(100 + step)
        actual = model.step(**given(batch))
        assert not actual.requires_grad and type(actual) is torch.Tensor
        assert loss is not None or actual.dtype == expected.dtype
        assert not draws or torch.equal(torch.get_rng_state(), state), "the generator is elsewhere than on one device"
        found["loss"] = max(found["loss"], rel(actual, expected.detach()))
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            wanted = names[name].grad
            if wanted is None or parameter.grad is None:
                assert wanted is None and parameter.grad is None, name
                continue
            found["gradient"] = max(found["gradient"], rel(whole(parameter.grad), wanted))
        if accumulate and step % 2 == 0:
            continue
        clip = optim.clip_grad_norm_ if step % 2 else nn.utils.clip_grad_norm_
        norms = [c(m.parameters(), 0.5) for c, m in zip((nn.utils.clip_grad_norm_, clip), (reference, model))]
        found["norm"] = max(found["norm"], rel(norms[1], norms[0]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            found["parameter"] = max(found["parameter"], rel(whole(parameter.detach()), names[name].detach()))
    batch = batches[0]
    reference.eval()
    with torch.no_grad():
        out = reference(**(batch if loss is None else _taken(reference, batch)))
        expected = out["loss"] if loss is None else (lambda pair: pair[0] / pair[1])(loss(out, batch))
    actual = model.evaluate(**given(batch))
    found["evaluate"] = rel(actual, expected)
    assert model.training
    return found


def _taken(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """Without what the loss alone needs."""
    return {name: batch[name] for name in inspect.signature(model.forward).parameters if name in batch}


def counts_of(plan: Plan, model: nn.Module, batch: dict[str, Any]) -> dict[int, dict[str, int]]:
    """What ``explain`` says of the stages of a plan."""
    return StagedProgram.of(plan, model).counts(batch, predict(model, plan, batch).gradients)
