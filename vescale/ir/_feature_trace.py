"""Which weights feed which, seen from a forward on the meta device: the products whose features stay together through
elementwise code, gates, splits and attention heads, up to the product that sums over them.

Names do not matter. Features are followed with the dims that run over them, outermost first (heads, then the features of
a head). A cut of them is a cut of the outermost dim, so that it never goes through a head. Whatever uses features otherwise
keeps their weights whole, and the reason is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from vescale.ir._expert_sharding import ExpertCalls, modules_of_experts
from vescale.ir._feature_flow import FeatureFlow, Features, Product
from vescale.ir._model_index import ModelIndex
from vescale.ir._operations import Local
from vescale.ir._placement_flow import FlowMode, is_elementwise, tensors_of


def trace_features(model: nn.Module, inputs: Mapping[str, Any], num_ranks: int) -> FeatureTrace:
    """Follow ``model(**inputs)`` on the meta device; ``num_ranks`` decides what can be cut. The model is left as it was."""
    trace = FeatureTrace(ModelIndex(model), num_ranks)
    trace.batch = next((x.shape[0] for x in tensors_of(inputs) if x.ndim), 1)
    with trace.watched(), FlowMode(trace):
        try:
            model(**inputs)
        except Exception as error:  # data-dependent code has no values on the meta device
            trace.stopped = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    return trace


class FeatureTrace(FeatureFlow):
    """What a forward did.

    Attributes:
        groups: weights whose features meet.
        products: by the first name of the weight, in the order of their first calls.
        experts: modules of experts, which are not run.
        keys_of_queries: weights of keys and values that stay whole because there are fewer heads than ranks need -> weight
            of their queries.
        stopped: why the forward ended early; "" if it did not.
    """

    def __init__(self, index: ModelIndex, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self.index = index
        self.products: dict[str, Product] = {}
        self.stopped, self.batch = "", 1
        self.experts: dict[str, nn.Module] = {}
        self._tokens = WeakIdKeyDictionary()  # results of products that may be heads -> the product
        self._running: list[str] = []
        for name, state in index.states.items():
            if state.is_parameter:
                path, attribute = index.owner(name)
                self._weights[getattr(index.modules[path], attribute)] = (name, False)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        handles = []
        for path, module in self.index.modules.items():
            handles.append(module.register_forward_pre_hook(lambda *_, path=path: self._running.append(path)))
            handles.append(module.register_forward_hook(lambda *_: self._running.pop() and None))
        undo = contextlib.ExitStack()
        calls = ExpertCalls()
        for path in modules_of_experts(self.index):
            self.experts[path] = self.index.modules[path]
            undo.enter_context(calls.replaced(self.index.modules[path], path, Local("experts", None, (), ()), self))
        try:
            yield
        finally:
            undo.close()
            for handle in handles:
                handle.remove()

    def tokens_met(self, path: str, tokens: torch.Tensor) -> tuple[None, ...]:
        return ()

    # Every torch function

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        plain = name.strip("_")
        self._follow_tokens(plain, args, kwargs, result)
        if self._alias(plain, args, result):
            return
        if plain in _PRODUCTS and self._product(plain, args, kwargs, result):
            return
        handler = _HANDLERS.get(plain)
        if handler is None:
            handler = FeatureTrace._elementwise if is_elementwise(name) else FeatureTrace._unknown
        handler(self, plain, args, kwargs, result)

    def _alias(self, name: str, args: tuple[Any, ...], result: Any) -> bool:
        """A parameter that is transposed or converted is still that parameter."""
        known = self._weights.get(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        if known is None or not isinstance(result, torch.Tensor):
            return False
        if name in ("t", "T", "mT") or (name in ("transpose", "swapaxes", "permute") and args[0].ndim == 2):
            self._weights[result] = (known[0], not known[1])
        elif name in ("to", "type_as", "float", "double", "half", "bfloat16", "contiguous", "type"):
            self._weights[result] = known
        else:
            return False
        return True

    def _note_table(self, weight: str) -> None:
        self._noted(weight, None, 1, -1)

    # Products

    def _product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> bool:
        """A product with a parameter; false if it is one of two activations."""
        x, weight, bias = _operands(name, args, kwargs)
        known = self._weights.get(weight) if isinstance(weight, torch.Tensor) else None
        if known is None or weight.ndim != 2 or not isinstance(x, torch.Tensor):
            return False
        given = self._of(x)
        rows_first = (name == "linear") != known[1]
        out_dim, in_dim = (0, 1) if rows_first else (1, 0)
        if name == "embedding":
            out_dim, in_dim = 1, -1
        if given is not None and in_dim >= 0 and given.dims[-1] != x.ndim - 1 and result.ndim == x.ndim:
            self._features[result] = given  # a product inside of each head: its weight serves all heads
            self._note(known[0], None, given)
            self.products.pop(known[0], None)
            return True
        product = self._noted(known[0], bias, out_dim, in_dim)
        product.num_dims.add(result.ndim)
        product.looks_up_positions |= in_dim < 0 and (x.ndim < 2 or x.shape[0] < self.batch)
        fits = given is not None and given.dims == (x.ndim - 1,) and in_dim >= 0
        if given is not None and not fits:
            self._keep_whole(given, f"'{product.path or 'the model'}' multiplies some of the features of each head")
        if given is not None and fits:
            self._use(given, x)
            group = self.groups.of(given.weight)
            if product not in group.consumers:
                group.consumers.append(product)
        product.inputs.add(given.weight if given is not None and fits else None)
        self._features[result] = Features(known[0], (result.ndim - 1,))
        if result.ndim == 3 and in_dim >= 0:
            self._tokens[result] = product
        return True

    def _noted(self, weight: str, bias: Any, out_dim: int, in_dim: int) -> Product:
        path = self._running[-1] if self._running else ""
        if weight in self.products:
            product = self.products[weight]
            if (product.in_dim < 0) == (in_dim < 0):
                if (boundary := self._boundary(path, weight)) not in product.boundaries:
                    product.boundaries.append(boundary)
                return product
            key = f"{weight}@{path}"  # a table that is a head, too
            found = self.products.get(key)
            if found is None:
                found = self.products[key] = self._new(path, weight, bias, out_dim, in_dim)
            self.groups.keep_whole(weight, "a table that the head shares")
            return found
        product = self.products[weight] = self._new(path, weight, bias, out_dim, in_dim)
        self.groups.add(product)
        return product

    def _new(self, path: str, weight: str, bias: Any, out_dim: int, in_dim: int) -> Product:
        known = self._weights.get(bias) if isinstance(bias, torch.Tensor) else None
        return Product(
            path, weight, known[0] if known is not None else "", out_dim, in_dim, [self._boundary(path, weight)]
        )

    def _boundary(self, path: str, weight: str) -> str | None:
        """The running module, if it does nothing but the product."""
        module = self.index.modules[path]
        own = {self.index.state_names[f"{path}.{n}" if path else n] for n, p in module.named_parameters() if p.ndim > 1}
        is_only = own == {weight} and not any(True for _ in module.children())
        return path if path and is_only else None

    def multi_head(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """``nn.MultiheadAttention`` runs as one function: packed rows of query, key and value, and the output's columns."""
        self._unknown(name, args, kwargs, result)
        path = self._running[-1] if self._running else ""
        module = self.index.modules[path]
        if not isinstance(module, nn.MultiheadAttention) or module.in_proj_weight is None:
            return
        names = {n: self.index.state_names[f"{path}.{n}"] for n, _ in module.named_parameters()}
        if names["in_proj_weight"] in self.products:
            return
        packed = Product(path, names["in_proj_weight"], names.get("in_proj_bias", ""), 0, 1, [path])
        output = Product(path, names["out_proj.weight"], names.get("out_proj.bias", ""), 0, 1, [path], {packed.weight})
        for product in (packed, output):
            self.products[product.weight] = product
            self.groups.add(product)
        group = self.groups.of(packed.weight)
        group.num_parts, group.uses_attention, group.consumers = 3, True, [output]
        if module.num_heads % self.num_ranks:
            group.whole = f"{self.num_ranks} ranks do not divide {module.num_heads} heads"
        if module.bias_k is not None or module.add_zero_attn:
            group.whole = "keys and values get a row of their own"

    def _note(self, weight: str, why: str | None, given: Features) -> None:
        if weight in self.groups:
            self.groups.keep_whole(weight, why or "it serves every head")

    # Tokens of heads

    def _follow_tokens(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Whether the tokens of a head's result stay together up to a loss."""
        tensors = [t for t in tensors_of((args, kwargs)) if t in self._tokens]
        for tensor in tensors:
            product = self._tokens[tensor]
            if name in ("cross_entropy", "shape", "size", "dim", "get"):
                continue
            for output in tensors_of(result):
                if (is_elementwise(name) and output.shape == tensor.shape) or (
                    name in ("view", "reshape", "flatten") and output.shape[-1] == tensor.shape[-1]
                ):
                    self._tokens[output] = product
                else:
                    product.splits_tokens = True


def _operands(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """(input, weight, bias) of a product."""
    if name in ("addmm", "baddbmm"):
        return args[1], args[2], args[0]
    if name == "rmatmul":
        return args[1], args[0], None
    names = ("input", "weight", "bias")
    given = [args[i] if i < len(args) else kwargs.get(n) for i, n in enumerate(names)]
    return given[0], given[1], given[2] if name == "linear" else None


_PAIRS = ("view_as_complex", "view_as_real")
_PRODUCTS = {"linear", "addmm", "matmul", "mm", "embedding"}
_Handler = Callable[[FeatureTrace, str, tuple[Any, ...], dict[str, Any], Any], None]
_HANDLERS: dict[str, _Handler] = {
    **dict.fromkeys(("view", "reshape", "reshape_as", "flatten", "unflatten"), FeatureTrace._view),
    **dict.fromkeys(
        ("transpose", "swapaxes", "swapdims", "permute", "unsqueeze", "squeeze", "movedim", "t", "T", "mT", *_PAIRS),
        FeatureTrace._move,
    ),
    **dict.fromkeys(("chunk", "split", "split_with_sizes", "tensor_split", "unbind", "iter"), FeatureTrace._split),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), FeatureTrace._expand),
    **dict.fromkeys(
        ("mean", "sum", "softmax", "var", "layer_norm", "rms_norm", "normalize", "cumsum", "amax", "log_softmax"),
        FeatureTrace._along,
    ),
    **dict.fromkeys(("matmul", "bmm", "baddbmm", "rmatmul"), FeatureTrace._matmul),
    **dict.fromkeys(("cat", "concat", "stack"), FeatureTrace._concatenate),
    **dict.fromkeys(("max", "min"), FeatureTrace._largest),
    "getitem": FeatureTrace._item,
    "select": FeatureTrace._select,
    F.scaled_dot_product_attention.__name__: FeatureTrace._attention,
    "multi_head_attention_forward": FeatureTrace.multi_head,
}
