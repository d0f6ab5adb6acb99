"""What PyTorch does, by private names, with modules and states that it takes for FSDP2's own.

A program that asks ``isinstance(module, torch.distributed.fsdp.FSDPModule)``, PyTorch's pipeline schedules among them, goes
on to call that class's methods, and looks the module's state up with ``torch.distributed.fsdp.fully_shard.state(module)``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import _is_composable_with_fsdp
from torch.torch_version import TorchVersion

from vescale.compat.ledger import note
from vescale.errors import FullyShardError, PrivateAttributeError, UnsupportedSettingError

_CONTRACT: Any = fully_shard.__wrapped__  # type: ignore[attr-defined]  # the key of its states


_REDUCES_AS_STORED = TorchVersion(torch.__version__) >= "2.15"


def reduce_dtype_of(policy: MixedPrecisionPolicy, dtype: torch.dtype, compute_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which FSDP2 reduces the gradient of a parameter of ``dtype``. Where the policy names none, that is the
    dtype of the computation, and from PyTorch 2.15 on that of the parameter."""
    return policy.reduce_dtype or (dtype if _REDUCES_AS_STORED else compute_dtype)


def policy_of_parameter(policy: MixedPrecisionPolicy, parameter: torch.Tensor) -> MixedPrecisionPolicy:
    """The policy with what its ``param_dtype_override_fn`` (PyTorch 2.15) answers for a parameter.

    Raises FullyShardError for an answer that is neither the parameter's dtype, nor ``param_dtype``, nor None.
    """
    override = getattr(policy, "param_dtype_override_fn", None)
    if override is None:
        return policy
    found = override(parameter)
    if found not in (None, policy.param_dtype, parameter.dtype):
        raise FullyShardError(
            f"param_dtype_override_fn returned {found} for a parameter of shape {tuple(parameter.shape)} and dtype "
            f"{parameter.dtype}; return {parameter.dtype} to keep its dtype, or None to use param_dtype={policy.param_dtype}"
        )
    kept = found == parameter.dtype and found != policy.param_dtype
    return replace(policy, param_dtype=None) if kept else policy


def fsdp2_state(module: nn.Module) -> Any:
    """What ``torch.distributed.fsdp.fully_shard.state(module)`` finds; None for a module that nobody has sharded so."""
    return module.__dict__.get(STATE_KEY, {}).get(_CONTRACT)


def register_fsdp2_state(module: nn.Module, state: FSDP2State) -> None:
    """Let ``torch.distributed.fsdp.fully_shard.state(module)`` find ``state``. PyTorch then refuses to shard the module once
    more, and to apply to it what does not go with sharding."""
    note("compat.fsdp2:instance", module)
    module.__dict__.setdefault(STATE_KEY, {})[_CONTRACT] = state
    module.__dict__.setdefault(REGISTRY_KEY, {})[_CONTRACT.__name__] = RegistryItem()


_SPLIT_BACKWARDS = "torch.distributed.pipelining.stage"
# The graph is let go of before the custom functions in it are asked for what they were given.
_LETS_GO = TorchVersion(torch.__version__) < "2.13"


def split_backwards_by(leaf_of: Callable[[Any], Any]) -> None:
    """Let PyTorch's stages of a pipeline, which compute the gradients of inputs and of weights apart, ask for the gradients
    of ``leaf_of(parameter)`` in the place of a module's registered parameters. Nothing happens before such stages are
    imported, and the second time."""
    stages: Any = sys.modules.get(_SPLIT_BACKWARDS)
    if stages is None or hasattr(stages.stage_backward_weight, "__wrapped__"):
        return
    note("compat.fsdp2:instance", stages)
    by_inputs, by_weights = stages.stage_backward_input, stages.stage_backward_weight

    @functools.wraps(by_inputs)
    def stage_backward_input(outputs: Any, gradients: Any, inputs: Any, weights: Any) -> Any:
        nodes = [x.grad_fn for x in outputs] if _LETS_GO else None
        found, groups = by_inputs(outputs, gradients, inputs, map(leaf_of, weights))
        for group in groups:
            group["nodes"] = nodes
        return found, groups

    @functools.wraps(by_weights)
    def stage_backward_weight(weights: Any, *args: Any, **kwargs: Any) -> Any:
        return by_weights(map(leaf_of, weights), *args, **kwargs)

    stages.stage_backward_input, stages.stage_backward_weight = stage_backward_input, stage_backward_weight


def is_replicated(module: nn.Module) -> bool:
    """Whether PyTorch's ``replicate`` has the parameters in ``module``: a composable form of data parallelism."""
    return dict.__contains__(module.__dict__.get(REGISTRY_KEY, {}), "replicate")


def refuse_composable_apis(module: nn.Module, names: Sequence[str], refuse: Callable[[str], NoReturn]) -> None:
    """Let PyTorch's composable functions of these names call ``refuse(name)`` when they are given the module, and
    ``fully_shard`` when it is given one around it."""
    note("compat.fsdp2:instance", module)
    registry = _Refusing(module.__dict__.get(REGISTRY_KEY, {}))
    registry.names, registry.refuse = tuple(names), refuse
    module.__dict__[REGISTRY_KEY] = registry


class _Refusing(dict[str, Any]):
    """What the functions look themselves up in before they change a module."""

    names: tuple[str, ...] = ()
    refuse: Callable[[str], NoReturn]

    def __contains__(self, name: object) -> bool:
        if name in self.names:
            self.refuse(str(name))
        if name == "replicate" and sys._getframe(1).f_code is _is_composable_with_fsdp.__code__:
            self.refuse("fully_shard")  # which asks so of each module inside of the one that it was given
        return super().__contains__(name)


def is_refusing(module: nn.Module) -> bool:
    """Whether :func:`refuse_composable_apis` was given the module."""
    return isinstance(module.__dict__.get(REGISTRY_KEY), _Refusing)


def mark_as_managed(module: nn.Module) -> None:
    """``torch.compile`` then takes parameters as inputs, and Hugging Face's models know that all ranks must run the same
    number of forwards (``generate`` goes on until the last rank is done)."""
    module._is_fsdp_managed_module = True  # type: ignore[assignment]
    module._fsdp_use_orig_params = True  # type: ignore[assignment]


class FSDP2Module(FSDPModule):
    """Base of modules that PyTorch takes for FSDP2's. To stand behind a class that has all public methods, and before the
    module's own class. Of FSDP2's private ones, which reach into an engine that is not there, nothing is inherited."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise PrivateAttributeError(
            f"{cls.__name__} does not define __new__; list the class that defines it before FSDP2Module"
        )

    def _get_fsdp_state(self) -> Any:
        return fsdp2_state(self)  # type: ignore[arg-type]

    def _set_unshard_async_op(self, async_op: bool) -> NoReturn:
        raise UnsupportedSettingError(
            f"_set_unshard_async_op({async_op}) is private to FSDP2: it selects the stream on which gathered "
            "parameters are allocated; vescale always uses the same one. Delete this call"
        )

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        return super(FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]  # the module's own


class FSDP2State:
    """Base of the states of such modules. A pipeline schedule (``torch.distributed.pipelining``) accumulates gradients over
    its microbatches without sync, and then, outside of any backward, has them reduced: it goes through the states of the
    module's tree, and through the groups of each, and at last concludes."""

    def tree_states(self) -> Sequence[FSDP2State]:
        """All states of the tree that this one is in."""
        raise NotImplementedError

    def reduce_accumulated(self) -> None:
        """Start to reduce what this state's parameters have accumulated."""
        raise NotImplementedError

    def conclude_accumulation(self) -> None:
        """Finish the reductions of the whole tree."""
        raise NotImplementedError

    @property
    def _state_ctx(self) -> Any:
        return SimpleNamespace(all_states=self.tree_states())

    @property
    def _fsdp_param_group(self) -> Any:  # what is asked for before 2.12
        return SimpleNamespace(post_backward=self.reduce_accumulated)

    @property
    def _fsdp_param_groups(self) -> list[Any]:
        return [self._fsdp_param_group]

    def _root_post_backward_final_callback(self) -> None:
        self.conclude_accumulation()

    def __getattr__(self, name: str) -> NoReturn:
        raise PrivateAttributeError(
            f"{type(self).__name__} has no {name!r}. The state of a module of vescale.fsdp.fully_shard does not have "
            "FSDP2's private attributes; use the methods of vescale.fsdp.FSDPModule, and vescale.fsdp's "
            "share_comm_ctx and register_fsdp_forward_method instead of those of torch.distributed.fsdp",
            name=name,
            obj=self,
        )
