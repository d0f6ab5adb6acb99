"""Records what a training step computes, tensor by tensor, in the order of execution, with the same names on one device
and on a mesh."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.compat import map_tensors, no_torch_function, tensors_in
from vescale.errors import ArgumentTypeError, kind_of

__all__ = ["Recorder", "Value", "loss_of", "run_step", "whole"]


class Value:
    """A recorded value.

    Attributes:
        step: of the training.
        kind: ``parameter``, ``buffer``, ``generator``, ``output``, ``dropout``, ``loss``, ``gradient``,
            ``parameter gradient``, ``optimizer`` or ``stepped`` (a parameter or buffer after the step).
        module: path of the module that it belongs to.
        what: its name in the module: ``<out:0>``, the name of a parameter.
        op: the op that computed it, if known.
    """

    __slots__ = ("kind", "module", "op", "step", "what")

    def __init__(self, step: int, kind: str, module: str, what: str, op: str = "") -> None:
        self.step, self.kind, self.module, self.what, self.op = step, kind, module, what, op

    @property
    def key(self) -> str:
        return f"{self.step}|{self.kind}|{self.module}|{self.what}"

    @property
    def is_exact(self) -> bool:
        """Whether it must be equal bit for bit, because no sum over ranks has contributed to it."""
        return self.kind in ("generator", "dropout") or (self.step == 0 and self.kind in ("parameter", "buffer"))


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

Take = Callable[[Value, torch.Tensor], None]


class Recorder:
    """Hooks on a model that pass each whole value to ``take``. On a mesh, this communicates."""

    def __init__(
        self, model: nn.Module, take: Take, *, perturb: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        self.step = 0
        self._take, self._perturb = take, perturb
        self._calls: Counter[str] = Counter()
        self._handles = []
        for path, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._before(path), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(path)))

    def remove(self) -> None:
        """Take the hooks away: some packages share modules (activations) among all models of a process."""
        for handle in self._handles:
            handle.remove()

    def begin(self, step: int) -> None:
        self.step = step
        self._calls.clear()

    def take(self, kind: str, module: str, what: str, tensor: torch.Tensor, op: str = "") -> None:
        with no_torch_function(), torch.no_grad():
            self._take(Value(self.step, kind, module, what, op), whole(tensor))

    def take_generator(self, module: str, what: str) -> None:
        digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).digest()[:8]
        with no_torch_function():  # no tensor of the model
            made = torch.tensor(list(digest), dtype=torch.uint8)
        self.take("generator", module, what, made)

    def _before(self, path: str) -> Callable[..., Any]:
        """Inputs that need a gradient are replaced by views, so that gradients of other uses of the same tensor are not
        included."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            call, views = _text(self._calls[path]), {}

            def view(tensor: torch.Tensor) -> torch.Tensor:
                if not (torch.is_grad_enabled() and tensor.requires_grad and tensor.is_floating_point()):
                    return tensor
                if id(tensor) not in views:  # models compare inputs by identity
                    with no_torch_function():
                        views[id(tensor)] = tensor, tensor.view_as(tensor)
                    self._watch(path, f"<in:{len(views) - 1}>{call}", views[id(tensor)][1])
                return views[id(tensor)][1]

            return map_tensors(view, args), map_tensors(view, kwargs)

        return hook

    def _after(self, path: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            call = self._calls[path]
            self._calls[path] += 1
            if self._perturb is not None:
                perturb = self._perturb
                with no_torch_function():
                    output = map_tensors(lambda t: perturb(t) if t.is_floating_point() else t, output)
            for index, tensor in enumerate(tensors_in(output)):
                what = f"<out:{index}>{_text(call)}"
                op = tensor.grad_fn.name() if tensor.grad_fn is not None else type(module).__name__
                if isinstance(module, _DROPOUTS) and module.training:
                    with no_torch_function(), torch.no_grad():
                        self.take("dropout", path, what, (whole(tensor) == 0) & (whole(args[0]) != 0), op)
                self.take("output", path, what, tensor, op)
                self._watch(path, what, tensor)
            self.take_generator(path, f"after call {call}")
            return output if self._perturb is not None else None

        return hook

    def _watch(self, path: str, what: str, tensor: torch.Tensor) -> None:
        """Record the gradient of a tensor when it is complete."""
        if not (torch.is_grad_enabled() and tensor.requires_grad and tensor.is_floating_point()):
            return

        def took(grad: torch.Tensor) -> torch.Tensor | None:
            self.take("gradient", path, f"gradient of {what}", grad)
            if self._perturb is not None:
                return self._perturb(grad)
            return None

        with no_torch_function():
            tensor.register_hook(took)


def run_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recorder: Recorder,
    step: int,
    batch: Any,
    loss_fn: Callable[[Any], torch.Tensor] | None,
) -> None:
    """One step of training, of which every value is passed to the recorder."""
    recorder.begin(step)
    if step == 0:
        for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in tensors:
                module, _, own = name.rpartition(".")
                recorder.take(kind, module, own, tensor)
    recorder.take_generator("", "before the step")
    optimizer.zero_grad()
    with torch.enable_grad():
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
        loss = loss_of(output, loss_fn)
    recorder.take("loss", "", "loss", loss.detach())
    loss.backward()
    named = list(model.named_parameters())
    for name, parameter in reversed(named):
        if parameter.grad is not None:
            module, _, own = name.rpartition(".")
            recorder.take("parameter gradient", module, f"{own}.grad", parameter.grad)
    optimizer.step()
    for name, parameter in named:
        module, _, own = name.rpartition(".")
        for what, tensor in _tensor_state(optimizer, parameter):
            recorder.take("optimizer", module, f"{own} {what}", tensor)
    for name, tensor in (*named, *model.named_buffers()):
        module, _, own = name.rpartition(".")
        recorder.take("stepped", module, f"{own} after the step", tensor)
    recorder.take_generator("", "after the step")


def loss_of(output: Any, loss_fn: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    """The scalar to differentiate: ``loss_fn(output)``; else the output's loss; else a scalar output; else a sum with a
    different gradient for every element.

    Raises TypeError if there is no tensor to start from.
    """
    if loss_fn is not None:
        return loss_fn(output)
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    tensors = [tensor for tensor in tensors_in(output) if tensor.is_floating_point() and tensor.requires_grad]
    if not tensors:
        raise ArgumentTypeError(
            f"the model returns {kind_of(output)} without a floating point tensor that needs a gradient; pass loss_fn="
        )
    if tensors[0].ndim == 0:
        return tensors[0]
    return (tensors[0] * tensors[0].sin() + tensors[0]).mean()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The global tensor as a plain one; collective for a DTensor that is not replicated."""
    found = tensor.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found


def _tensor_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for what, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, torch.Tensor):
            yield what, value


def _text(call: int) -> str:
    return "" if call == 0 else f" of call {call}"
