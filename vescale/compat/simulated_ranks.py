"""A process that is one rank of a job whose other ranks do not exist: what a training script asks PyTorch for.

For processes that run one script and end: nothing is taken back.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeWork, _unregister_process_group
from torch.distributed import checkpoint, device_mesh, distributed_c10d
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale.compat.devices import modules_of_scripts
from vescale.compat.ledger import note
from vescale.compat.needed_names import ESTIMATES
from vescale.compat.needs import require
from vescale.compat.patching import Changes, rebind, undo
from vescale.compat.sharding_caches import clear_sharding_caches

require(ESTIMATES)  # this module is no part of what vescale imports at first


def become_rank(
    rank: int,
    world_size: int,
    store: dist.Store,
    waited: Callable[[Any], None],
    made_group: Callable[[dist.ProcessGroup], None],
) -> None:
    """From now on, ``init_process_group`` of any backend makes a fake world in which this process is ``rank``.

    ``store``: the rendezvous. ``waited``: called with each work that the program waits for; ``made_group``: with each group
    that ``new_group`` has made of this rank and others.
    """
    changes = Changes()
    initialize, make_mesh, make_group = dist.init_process_group, device_mesh.init_device_mesh, dist.new_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        timeout = kwargs.get("timeout", args[1] if len(args) > 1 else None)
        initialize("fake", rank=rank, world_size=world_size, store=store, timeout=timeout)

    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        if not dist.is_initialized():
            init_process_group()
        kwargs.pop("backend_override", None)
        return make_mesh("cpu", *args, **kwargs)

    def new_group(*args: Any, **kwargs: Any) -> Any:
        found = make_group(*args, **kwargs)
        if isinstance(found, dist.ProcessGroup):
            made_group(found)
        return found

    class Connection:
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return store

    changes.function(initialize, init_process_group)
    changes.function(make_mesh, init_device_mesh)
    changes.function(make_group, new_group)
    changes.function(dist.TCPStore, Connection)
    changes.function(dist.FileStore, Connection)
    changes.function(distributed_c10d.monitored_barrier, lambda group=None, *_, **__: dist.barrier(group))
    for kind in (FakeWork, dist.Work):
        _note_waits(changes, kind, waited)
        changes.attribute(kind, "_source_rank", lambda work: int(rank == 0))  # of a receive from any rank: one of them
    _with_gradients_of_buckets(changes)
    _without_devices(changes)
    _without_files(changes)
    note("compat.simulated_ranks:torch", *changes.names())
    rebind(changes)


def _with_gradients_of_buckets(changes: Changes) -> None:
    """``DistributedDataParallel`` takes each bucket from its collective's future, which a fake work leaves without a value:
    models without a hook of their own get one that reduces buckets as PyTorch does."""
    kind = DistributedDataParallel
    forward, register = kind.forward, kind.register_comm_hook
    hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def reduced(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        dist.all_reduce(gradients.div_(group.size()), group=group)
        found: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        found.set_result(gradients)
        return found

    reduced.__annotations__ = {}  # PyTorch compares them with types, and these are strings

    def register_comm_hook(model: Any, state: Any, hook: Any) -> None:
        hooked.add(model)
        register(model, state, hook)

    def with_hook(model: Any, *args: Any, **kwargs: Any) -> Any:
        if model not in hooked:
            register_comm_hook(model, model.process_group, reduced)
        return forward(model, *args, **kwargs)

    changes.attribute(kind, "register_comm_hook", register_comm_hook)
    changes.attribute(kind, "_register_builtin_comm_hook", lambda *_: None)
    changes.attribute(kind, "forward", with_hook)


def _without_files(changes: Changes) -> None:
    """Values are not real: what would write them to files leaves the files of real runs as they are."""
    save = torch.save

    def to_memory(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(f, (str, os.PathLike)):
            save(obj, f, *args, **kwargs)

    def meet(*args: Any, process_group: Any = None, no_dist: bool = False, **kwargs: Any) -> Any:
        if dist.is_initialized() and not no_dist:
            dist.barrier(process_group)

    def begin(*args: Any, **kwargs: Any) -> Any:
        meet(*args, **kwargs)
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    changes.function(save, to_memory)
    for function in (checkpoint.save, checkpoint.load):
        changes.function(function, meet)
    changes.function(checkpoint.async_save, begin)


def _note_waits(changes: Changes, kind: Any, waited: Callable[[Any], None]) -> None:
    for name in ("wait", "block_current_stream", "synchronize"):
        original = vars(kind).get(name)
        if original is None:
            continue

        def wait(work: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            waited(work)
            return _original(work, *args, **kwargs)

        changes.attribute(kind, name, wait)


def _without_devices(changes: Changes) -> None:
    """Calls that scripts make for their own device do nothing."""
    actions = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all")
    figures = ("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    for _, module in modules_of_scripts():
        if module.is_available():
            changes.attribute(module, "is_available", lambda: False)
        for names, answer in ((actions, None), (figures, 0)):
            for name in names:
                changes.attribute(module, name, lambda *_, answer=answer, **__: answer)
    changes.attribute(torch.accelerator, "set_device_index", lambda *_: None)


_HOST = ("cpu", "meta")


class OnHost(TorchFunctionMode):
    """Tensors that a script asks for on a device, which there is none of, are made on the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if (
            name in ("pin_memory", *(kind for kind, _ in modules_of_scripts()))
            and args
            and isinstance(args[0], torch.Tensor)
        ):
            return args[0]
        if any(_is_device(x) for x in args[1:]):
            args = (args[0], *(_host(x) for x in args[1:]))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _host(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _is_device(x: Any) -> bool:
    return isinstance(x, torch.device) or (isinstance(x, str) and x.partition(":")[0] in dict(modules_of_scripts()))


def _host(x: Any) -> Any:
    if isinstance(x, int) and not isinstance(x, bool):
        return "cpu"
    return "cpu" if _is_device(x) and torch.device(x).type not in _HOST else x


def work_of(result: Any) -> Any:
    """The work that an operator of c10d returns, as the program gets it; None if it returns none."""
    last = result[-1] if isinstance(result, tuple) else result
    if isinstance(last, torch.ScriptObject):
        try:
            return dist.Work.unbox(last)
        except (RuntimeError, TypeError):
            return None
    return last if isinstance(last, dist.Work) else None


def reduction_name(operator: Any) -> str:
    """``sum``, ``max``, ... of the argument of an operator of c10d."""
    found: Any = operator.op() if hasattr(operator, "op") else operator
    return str(dist.ReduceOp.RedOpType(int(found)).name).lower()


# A default process group of ``world_size`` ranks that do not exist, beside the one that this process may have.

require(ESTIMATES)  # this module is no part of what vescale imports at first


class _World(c10d._World):
    """The state of ``torch.distributed``, apart from that of the process."""

    pg_map: Any = property(lambda self: self.own["pg_map"])
    pg_names: Any = property(lambda self: self.own["pg_names"])
    pg_group_ranks: Any = property(lambda self: self.own["pg_group_ranks"])
    pg_backend_config: Any = property(lambda self: self.own["pg_backend_config"])
    tags_to_pg: Any = property(lambda self: self.own["tags_to_pg"])
    pg_to_tag: Any = property(lambda self: self.own["pg_to_tag"])

    def __init__(self, first_number: int) -> None:
        super().__init__()
        tables = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
        self.own: dict[str, dict[Any, Any]] = {name: {} for name in tables}
        self._number = first_number

    @property
    def group_count(self) -> int:
        return self._number

    @group_count.setter
    def group_count(self, value: int) -> None:
        self._number = value


# Names of groups are numbers, of which a process has one set: those of fake worlds are far from those of real ones.
_FIRST_NUMBER = 1 << 40
# The state of torch.distributed is the process's: one fake world at a time.
_LOCK = threading.RLock()


@contextlib.contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """Inside, this process is ``rank`` of ``world_size``: collectives return at once, and leave their outputs as they are.

    The process's own default group, if there is one, is there again afterwards, with the groups made of it; its meshes must
    not be used inside. Sharding decisions, which PyTorch remembers with a mesh that equals others, are forgotten before and
    after. Other threads that enter a fake world wait; none may use ``torch.distributed`` meanwhile.
    """
    with _LOCK:
        world, changes = _World(_FIRST_NUMBER), Changes()
        clear_sharding_caches()
        changes.attribute(c10d, "_world", world)
        changes.attribute(sys, "excepthook", sys.excepthook)  # init_process_group puts the rank before each line of it
        try:
            note("compat.simulated_ranks:torch", *changes.names())
            dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
            yield
        finally:
            for name in set(world.pg_names.values()):
                with contextlib.suppress(RuntimeError):
                    _unregister_process_group(name)
            undo(changes)
            clear_sharding_caches()
