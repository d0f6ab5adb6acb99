"""Tensors that modules in eager mode share with others otherwise than as arguments and results, such as attributes."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator

from vescale.static._record import Recorder
from vescale.static._state import is_inside
from vescale.static._step_records import TensorRecord, Value

__all__ = ["side_channel"]


def side_channel(recorder: Recorder, eager: Collection[str]) -> tuple[str, str] | None:
    """The first tensor that is a DTensor for a module in eager mode, and a local tensor for one that is not.

    Args:
        eager: paths of the modules in eager mode.

    Returns:
        The path of the innermost module that contains both, and the reason why it cannot be static.
    """
    if not eager or "" in eager:
        return None
    eager = [path for path in eager if not any(path != outer and is_inside(path, outer) for outer in eager)]
    passed = {path: _values_of_module(recorder, path) for path in eager}
    around = functools.cache(lambda path: frozenset(outer for outer in eager if is_inside(path, outer)))
    made = {record.value: "" for record in recorder.inputs if record.value is not None}
    for path, inputs, outputs in _uses(recorder):
        for value in filter(None, (record.value for record in inputs)):
            maker = made.get(value)  # of views for units, and of what entries of the plan place, it is not known
            if value.name in recorder.written_names:
                maker = value.name.rpartition(".")[0]
            crossed = () if maker is None else around(path) ^ around(maker)
            outer = next((outer for outer in crossed if value not in passed[outer]), None)
            if maker is not None and outer is not None:
                places = f"{path or 'the model'} uses a tensor of {maker or 'the model'}"
                reason = f"{places}, which is no argument or result of {outer}, a module in eager mode"
                return _common(recorder, path, maker), reason
        for value in filter(None, (record.value for record in outputs)):
            made.setdefault(value, path)
    return None


def _uses(recorder: Recorder) -> Iterator[tuple[str, list[TensorRecord], list[TensorRecord]]]:
    for call in recorder.calls:
        if call.site is not None:
            yield call.site[0].module, call.inputs, call.outputs


def _values_of_module(recorder: Recorder, path: str) -> set[Value]:
    """What it gets and returns, also as its entries of the plan place it."""
    records = [record for call in recorder.module_calls.get(path, ()) for part in call for record in part]
    for placing, calls in recorder.boundaries.items():
        if placing.instruction.path == path:
            records += [record for placed in calls for one in placed for record in (one.input, one.output)]
    return {record.value for record in records if record.value is not None}


def _common(recorder: Recorder, first: str, second: str) -> str:
    """The innermost module that has run and contains both."""
    common = first
    while common and not (is_inside(second, common) and common in recorder.module_calls):
        common = common.rpartition(".")[0]
    return common
