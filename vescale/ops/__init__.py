"""What each op does on DTensors: one registry of placement rules, handlers and torch functions, by op family."""

from vescale.ops._context import OpContext
from vescale.ops._conversion import (
    bring,
    bring_with_gradient,
    convert,
    cut,
    enter_local,
    leave_local,
    reduced,
    wrap_global,
)
from vescale.ops._observer import ModelObserver, observe, report_implicit_move, running_module
from vescale.ops._registry import OpEntry, OpFamily, aten, entries, entry_of, families, register, register_family
from vescale.ops._strides import contiguous_stride, stride_like

__all__ = [
    "ModelObserver",
    "OpContext",
    "OpEntry",
    "OpFamily",
    "aten",
    "bring",
    "bring_with_gradient",
    "contiguous_stride",
    "convert",
    "cut",
    "enter_local",
    "entries",
    "entry_of",
    "families",
    "leave_local",
    "observe",
    "reduced",
    "register",
    "register_family",
    "report_implicit_move",
    "running_module",
    "stride_like",
    "wrap_global",
]
