"""``load_state_dict`` that keeps the dtypes and cuts of states: torch's casts those of floating-point parameters."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from vescale.placements import distribute_tensor

__all__ = ["ExactStates"]


class ExactStates(Optimizer):
    """An optimizer whose states are loaded as :meth:`loaded_state` says, instead of cast to the parameter's dtype.

    Hooks of ``load_state_dict`` run as in torch's: pre-hooks before, and post-hooks after the states are there.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, with states as :meth:`loaded_state` returns them; parameters without a saved state keep theirs.

        After an error the optimizer is as it was."""
        aside: dict[str, Any] = {}
        before, state, groups = dict(self.state), self.state, self.param_groups

        def set_aside(_: Optimizer, found: dict[str, Any]) -> dict[str, Any]:
            aside.update(found)
            return {**found, "state": {}}

        def put_back(_: Optimizer) -> None:
            for group, own in zip(self.param_groups, groups):  # saved by an optimizer with fewer options
                for option, value in own.items():
                    group.setdefault(option, value)
            saved = chain.from_iterable(group["params"] for group in aside["param_groups"])
            params_here = chain.from_iterable(group["params"] for group in self.param_groups)
            params = dict(zip(saved, params_here, strict=True))
            loaded = {
                params[key]: self.loaded_state(params[key], state, before.get(params[key], {}))
                for key, state in aside["state"].items()
                if key in params
            }
            self.state.update(before | loaded)

        # Ours is the last pre-hook, behind those that replace the dict, and the first post-hook.
        hooks: list[Any] = [
            self.register_load_state_dict_pre_hook(set_aside),
            self.register_load_state_dict_post_hook(put_back, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            self.state, self.param_groups = state, groups
            raise
        finally:
            for hook in hooks:
                hook.remove()

    def adopt_parameters(self, replaced: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Go on with new parameters in the places of those that ``parallelize`` or ``fully_shard`` has replaced.

        Args:
            replaced: the new parameter by the one that it replaces.

        States become those of the new parameters as :meth:`loaded_state` says: whole tensors are cut without communication.
        After an error the optimizer is as it was.
        """
        before = dict(self.state)
        lists = [(group["params"], list(group["params"])) for group in self.param_groups]
        try:
            for members, old in lists:
                members[:] = [replaced.get(parameter, parameter) for parameter in old]
            saved = {replaced[old]: self.state.pop(old) for old in replaced if old in self.state}
            self._take_replaced(replaced)
            for parameter, state in saved.items():
                self.state[parameter] = self.loaded_state(parameter, state, self.state.get(parameter, {}))
        except BaseException:
            for members, old in lists:
                members[:] = old
            self.state.clear()
            self.state.update(before)
            raise

    def _take_replaced(self, replaced: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Plan, and make states for, new parameters that are in the groups already."""
        raise NotImplementedError

    def loaded_state(self, parameter: torch.Tensor, state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """The state of ``parameter`` from a saved one: copies in the dtypes that were saved, placed like its ``own`` state.

        Whole tensors are cut without communication; DTensors that are placed otherwise are redistributed, on all ranks.
        """
        return {
            key: _placed(value.detach(), own.get(key)) if isinstance(value, torch.Tensor) else value
            for key, value in state.items()
        }


def _placed(value: torch.Tensor, like: Any) -> torch.Tensor:
    if not isinstance(like, torch.Tensor):
        return value.clone()
    if not isinstance(like, DTensor):
        return value.to(like.device, copy=True)
    if not isinstance(value, DTensor):
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return (
        value.redistribute(placements=like.placements).clone()
        if value.device_mesh == like.device_mesh
        else value.clone()
    )
