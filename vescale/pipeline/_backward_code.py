"""``BackwardCode``: what of a forward runs Python in its backward, which may compute across the rows of a batch unseen by a
trace: hooks of tensors, of modules and of saved tensors, and functions of programs (``torch.autograd.Function``); or wants
to have a graph in the forward (``torch.autograd.grad``)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from vescale.compat import current_autograd_node, has_saved_tensors_hooks, no_torch_function
from vescale.pipeline._row_flow import is_torchs, users_line

_GRAD_FN = vars(torch.Tensor.__base__)["grad_fn"].__get__
_OF_MODULE = "a backward hook of a module"
# Functions that compute row by row, or as their module says.
_KNOWN = ("vescale.", "torch.distributed.", "torch.utils.checkpoint")


class BackwardCode(TorchFunctionMode):
    """During a trace. ``inside``: the path of the gated module that runs, or None.

    Attributes:
        found: texts, in the order of the forward.
    """

    def __init__(self, inside: Callable[[], str | None]) -> None:
        super().__init__()
        self._inside, self._seen = inside, set[Node]()
        self.found: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.register_hook or func == _GRAD_FN:
            frame: Any = sys._getframe(1)
            while frame.f_code.co_name == "__torch_function__":  # of other modes
                frame = frame.f_back
            is_modules = func == _GRAD_FN and is_torchs(frame)
            self._note(_OF_MODULE if is_modules else f"a hook of a tensor, registered at {users_line()}")
        return func(*args, **(kwargs or {}))

    def see_op(self) -> bool:
        """Below autograd. Returns whether a backward in the forward runs it."""
        is_in_backward = current_autograd_node() is not None
        if is_in_backward:
            self._note(f"gradients taken in the forward, at {users_line()}")
        if torch.is_grad_enabled() and has_saved_tensors_hooks(of_checkpoints=False):
            self._note(f"a hook of saved tensors, at {users_line()}")
        return is_in_backward

    def see_results(self, results: Iterable[Any]) -> None:
        """Of a gated module, or of the forward: what has made them, but for what was seen before."""
        with no_torch_function():
            nodes = nodes_behind(results, self._seen)
        for node in nodes:
            function = getattr(node, "_forward_cls", None) if isinstance(node, BackwardCFunction) else None
            if function is None or function.__module__.startswith(_KNOWN):
                continue
            if function.__module__.startswith("torch.nn."):
                self._note(_OF_MODULE)
                continue
            code = getattr(function.backward, "__code__", None)
            where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
            self._note(f"{function.__qualname__}.backward{where}")

    def _note(self, text: str) -> None:
        path = self._inside()
        self.found[f"{text}, in {path!r}" if path else text] = None

    def end(self) -> None:
        self._seen.clear()
        self._inside = lambda: None


def nodes_behind(results: Iterable[Any], seen: set[Node]) -> list[Node]:
    """The nodes of the graph that lead to these tensors, but those that were ``seen``, to which they are added."""
    pending = [x.grad_fn for x in results if isinstance(x, torch.Tensor) and x.grad_fn is not None]
    found = []
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            found.append(node)
            pending += [before for before, _ in node.next_functions if before is not None]
    return found
