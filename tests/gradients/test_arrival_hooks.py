"""The hooks of one parameter, by themselves."""

from __future__ import annotations

import torch
from torch import nn

from vescale.compat import HookGate
from vescale.gradients._arrival_hooks import ArrivalHooks


def test_removed_hooks_are_not_called() -> None:
    parameter, called = nn.Parameter(torch.ones(2)), []
    hooks = ArrivalHooks(
        parameter, lambda gradient: called.append("begin"), lambda of: called.append("take"), HookGate()
    )
    parameter.sum().backward()
    assert called == ["begin"], "muted at first"
    hooks.notify(True)
    parameter.sum().backward()
    assert called == ["begin", "begin", "take"]
    hooks.notify(False)
    parameter.sum().backward()
    assert called[3:] == ["begin"]
    hooks.notify(True)
    hooks.remove()
    parameter.sum().backward()
    assert called[4:] == [] and parameter.grad.tolist() == [4.0, 4.0]


def test_frozen_parameters_have_hooks_once_they_are_trained() -> None:
    parameter, called = nn.Parameter(torch.ones(2), requires_grad=False), []
    hooks = ArrivalHooks(
        parameter, lambda gradient: called.append("begin"), lambda of: called.append("take"), HookGate()
    )
    hooks.notify(True)
    assert not parameter.requires_grad
    parameter.requires_grad_()
    parameter.sum().backward()
    assert called == ["begin", "take"]
