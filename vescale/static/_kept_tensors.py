"""``KeptTensors``: where a forward may leave tensors for later steps, other than in modules."""

from __future__ import annotations

import dis
import functools
import gc
import types
from collections import deque
from typing import Any

from torch.distributed.tensor import DTensor

from vescale.compat import tensors_in

__all__ = ["KeptTensors", "names_of_globals_set"]

_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_CACHE = type(functools.lru_cache(lambda: None))


class KeptTensors:
    """Containers, objects, caches of functions, attributes of classes and functions, cells of closures and globals that
    functions set, and the DTensors in them when they were added."""

    def __init__(self) -> None:
        self._holders: list[tuple[str, Any, dict[int, DTensor]]] = []

    def add(self, name: str, holder: Any) -> None:
        self._holders.append((name, holder, _dtensors_in(holder)))

    def add_globals(self, code: types.CodeType, held: dict[str, Any]) -> None:
        """Those that the function with this code sets."""
        for name in names_of_globals_set(code):
            self.add(f"the global {name}", functools.partial(held.get, name))

    def changed(self) -> str:
        """The name of a holder that has other DTensors than before; "" if there is none."""
        return next((name for name, held, before in self._holders if _dtensors_in(held).keys() - before.keys()), "")


@functools.lru_cache(maxsize=4096)
def names_of_globals_set(code: types.CodeType) -> frozenset[str]:
    """Names of globals that a function, or one that is defined in it, sets."""
    own = (
        (one.argval for one in dis.get_instructions(code) if one.opcode == _STORE_GLOBAL)
        if _STORE_GLOBAL in code.co_code[::2]
        else ()
    )
    inner = (names_of_globals_set(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(own).union(*inner)


def _dtensors_in(holder: Any) -> dict[int, DTensor]:
    match holder:
        case list():
            items = holder
        case dict():
            items = list(dict.values(holder))
        case set() | deque():
            items = list(holder)
        case types.CellType():
            items = [_contents(holder)]
        case functools.partial():  # of a global
            items = [holder()]
        case _ if isinstance(holder, _CACHE):
            items = [x for x in gc.get_referents(holder) if isinstance(x, DTensor | list | tuple)]
        case type():
            items = [x for x in vars(holder).values() if isinstance(x, DTensor | list | tuple | dict)]
        case _:
            items = [vars(holder)]
    return {id(x): x for x in tensors_in(items) if isinstance(x, DTensor)}


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
