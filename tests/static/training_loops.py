"""Training loops that do something else with a model in later steps: a table, beside that of ``programs``."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.static.programs import Scaled, Sums, in_thread, now, quantized, tensors_of, unless

Around = Callable[[Any, torch.Tensor, int], Any]


def _loss(out: Any) -> torch.Tensor:
    found: torch.Tensor = sum(y.square().mean() for y in tensors_of(out))  # type: ignore[assignment]
    return found


def _step(model: Any, x: torch.Tensor) -> Any:
    out = model(x)
    _loss(out).backward()
    return out


def _then(before: Callable[[Any], Any]) -> Around:
    """A change of the model before late steps; before the first of them, if it tells."""

    def run(model: Any, x: torch.Tensor, step: int) -> Any:
        if step >= 3:
            before(model)
        return _step(model, x)

    return run


def _once(before: Callable[[Any], Any]) -> Around:
    def run(model: Any, x: torch.Tensor, step: int) -> Any:
        if step == 3:
            before(model)
        return _step(model, x)

    return run


def _penalty(from_step: int) -> Around:
    """On the gradients, as in WGAN-GP."""

    def run(model: Any, x: torch.Tensor, step: int) -> Any:
        out = model(x)
        loss = out.tanh().square().mean()
        if step >= from_step:
            grads = torch.autograd.grad(loss, [model.up.weight, model.scale], create_graph=True)
            loss = loss + sum(grad.square().sum() for grad in grads)
        loss.backward()
        return out

    return run


def _hessian_vector(from_step: int) -> Around:
    def run(model: Any, x: torch.Tensor, step: int) -> Any:
        if step < from_step:
            return _step(model, x)
        (grad,) = torch.autograd.grad(model(x).square().sum(), [model.up.weight], create_graph=True)
        return torch.autograd.grad(grad.sum(), [model.up.weight])[0]

    return run


def _of_input(model: Any, x: torch.Tensor, step: int) -> Any:
    x.requires_grad_(step != 4)
    out = _step(model, x)
    return [out, *([x.grad] if x.grad is not None else [])]


def _twice(model: Any, x: torch.Tensor, step: int) -> Any:
    loss = _loss(model(x))
    loss.backward(retain_graph=True)
    if step >= 2:
        loss.backward()
    return loss


def _by_grad(model: Any, x: torch.Tensor, step: int) -> Any:
    parameters = [p for name, p in model.named_parameters() if not name.startswith(("other", "bn"))]
    return list(torch.autograd.grad(_loss(model(x)), parameters))


def _to_some(model: Any, x: torch.Tensor, step: int) -> Any:
    out = model(x)
    _loss(out).backward(inputs=[model.scale] if step >= 3 else None)
    return out


def _two_forwards(model: Any, x: torch.Tensor, step: int) -> Any:
    first, second = model(x), model(x * 2)
    (_loss(first) + (3 if step >= 3 else 1) * _loss(second)).backward()
    return [first, second]


def _chained(model: Any, x: torch.Tensor, step: int) -> Any:
    out = model(x)
    return _step(model, out.detach() if step >= 3 else x)


def _forward_only(model: Any, x: torch.Tensor, step: int) -> Any:
    with torch.no_grad() if step % 2 else torch.inference_mode():
        out = model(x)
    return [out, _step(model, x)]


def _in_other_thread(model: Any, x: torch.Tensor, step: int) -> Any:
    return in_thread(lambda: _step(model, x)) if step >= 2 else _step(model, x)


def _backwardin_thread(model: Any, x: torch.Tensor, step: int) -> Any:
    out = model(x)
    in_thread(lambda: _loss(out).backward())
    return out


def _fails_around(model: Any, x: torch.Tensor, step: int) -> Any:
    """A step without a backward, and one whose loss raises an error."""
    if step == 3:
        with contextlib.suppress(OSError):
            unless(True, OSError("late"), model(x))
    return _step(model, x)


def _own_loss(model: Any, x: torch.Tensor, step: int) -> Any:
    out = model(x)
    (_loss(out) + (model.scale.square().sum() if step >= 3 else 0.0)).backward()
    return out


def _clipped(model: Any, x: torch.Tensor, step: int) -> Any:
    out = _step(model, x)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return out


def _anomalies(model: Any, x: torch.Tensor, step: int) -> Any:
    with torch.autograd.set_detect_anomaly(step >= 3, check_nan=False):
        return _step(model, x)


def _around(context: Callable[[], Any]) -> Around:
    def run(model: Any, x: torch.Tensor, step: int) -> Any:
        with context() if step in (3, 4) else contextlib.nullcontext():
            return _step(model, x)

    return run


def _vmapped_grads(model: Any, x: torch.Tensor, step: int) -> Any:
    out = model(x)
    loss = torch.stack([_loss(out), _loss(out * 2)]) if step >= 2 else _loss(out)[None]
    grads = torch.eye(len(loss), dtype=x.dtype)
    return torch.autograd.grad(loss, [model.scale], grads, is_grads_batched=True)[0] if step >= 2 else _step(model, x)


def _other_shapes(model: Any, x: torch.Tensor, step: int) -> Any:
    return _step(model, x[: 2 + 2 * (step % 2), :, :].contiguous())


def _interrupted(model: Any, x: torch.Tensor, step: int) -> Any:
    """A part of a step, as after Ctrl-C, and the next one."""
    if step == 3:
        hook = model.down.register_forward_pre_hook(lambda *_: unless(True, KeyboardInterrupt(), None))
        with contextlib.suppress(KeyboardInterrupt):
            model(x)
        hook.remove()
    return [_step(model, x), torch.zeros(2)]


def _hook_that_goes(model: Any, x: torch.Tensor, step: int) -> Any:
    """It takes itself away in a late step, in which it still has its effect."""
    if step == 0:

        def doubled(_: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
            if now() == 3:
                handle.remove()
            return out * 2

        handle = model.down.register_forward_hook(doubled)
    return _step(model, x)


def _frozen_by_turns(model: Any, x: torch.Tensor, step: int) -> Any:
    """As those of two adversaries."""
    model.up.requires_grad_(step % 2 == 0)
    return _step(model, x)


def _swap(model: Any) -> None:
    model.up, model.other = model.other, model.up
    model.up, model.other = model.other, model.up
    model.down.weight, model.down.bias = model.down.weight, nn.Parameter(model.down.bias.detach() * 2)


def _on_parameter(model: Any) -> None:
    model.scale.register_hook(lambda grad: grad * 2)


def _post_accumulate(model: Any) -> None:
    def doubled(p: torch.Tensor) -> None:
        p.grad.mul_(2)  # type: ignore[union-attr]

    model.scale.register_post_accumulate_grad_hook(doubled)


def _shared_list(model: Any) -> None:
    model.up.weight.requires_grad_(False)


AROUND: dict[str, Around] = {
    "plain": lambda model, x, step: _step(model, x),
    "penalty": _penalty(0),
    "penalty later": _penalty(3),
    "hessian and vector": _hessian_vector(0),
    "hessian and vector later": _hessian_vector(3),
    "gradients of the input": _of_input,
    "backward twice": _twice,
    "autograd.grad": _by_grad,
    "backward to some": _to_some,
    "two forwards": _two_forwards,
    "chained": _chained,
    "forward only": _forward_only,
    "in another thread": _in_other_thread,
    "backward in a thread": _backwardin_thread,
    "fails around": _fails_around,
    "interrupted": _interrupted,
    "loss of parameters": _own_loss,
    "clipped": _clipped,
    "anomalies": _anomalies,
    "batched gradients": _vmapped_grads,
    "other shapes": _other_shapes,
    "function mode around": _around(Scaled),
    "dispatch mode around": _around(Sums),
    "saved tensors around": _around(lambda: quantized(torch.ones(()))),
    "autocast around": _around(lambda: torch.autocast("cpu", torch.bfloat16)),
    "device around": _around(lambda: torch.device("cpu")),
    "hook of a parameter": _once(_on_parameter),
    "hook after accumulation": _once(_post_accumulate),
    "hook of a module": _once(lambda m: m.other.register_forward_hook(lambda *_: None)),
    "hook that goes": _hook_that_goes,
    "hook that changes": _once(lambda m: m.down.register_forward_hook(lambda m, a, out: out * 2)),
    "backward hook": _once(lambda m: m.down.register_full_backward_hook(lambda m, grads, outs: (grads[0] * 2,))),
    "hook before": _once(lambda m: m.register_forward_pre_hook(lambda m, args: (args[0] * 2,))),
    "frozen": _once(_shared_list),
    "frozen by turns": _frozen_by_turns,
    "evaluation": _once(lambda m: m.eval()),
    "a part in evaluation": _once(lambda m: m.drop.eval()),
    "parameter is replaced": _once(_swap),
    "data of a parameter": _once(lambda m: setattr(m.scale, "data", m.scale.data * 2)),
    "parameter in place": _then(lambda m: m.scale.data.mul_(1.1)),
    "state is loaded": _once(lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()})),
    "state is assigned": _once(
        lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True)
    ),
    "other precision": _once(lambda m: m.float().double()),
    "attribute that a loop sets": _once(lambda m: setattr(m.scale, "factor", 5.0)),
    "forward of an object": _once(
        lambda m: setattr(m.down, "forward", lambda x: F.linear(x.tanh(), m.down.weight, m.down.bias))
    ),
    "class of a module": _once(lambda m: setattr(m.drop, "__class__", nn.Identity)),
    "part is replaced": _once(lambda m: setattr(m, "drop", nn.Identity())),
    "copy": _once(lambda m: copy.deepcopy(m)),
    "parametrization": _once(lambda m: torch.nn.utils.parametrize.register_parametrization(m.down, "bias", _Doubled())),
}


class _Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2
