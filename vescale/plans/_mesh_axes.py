"""The named axes of a mesh, which are all that a plan needs to know of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from vescale.errors import PlanValueError, did_you_mean, kind_of


@dataclass(frozen=True)
class MeshAxes:
    """Axis names and sizes, outermost first.

    A plan can be written, checked and lowered with these alone, without a device or a process group.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes):
            raise PlanValueError(f"{len(self.names)} axis names {self.names} for {len(self.sizes)} sizes {self.sizes}")
        if len(set(self.names)) != len(self.names):
            raise PlanValueError(f"mesh axis names {self.names} repeat; use a different name for each axis")
        for name, size in zip(self.names, self.sizes):
            if not name.isidentifier():
                raise PlanValueError(f"mesh axis name {name!r} is not an identifier; use letters, digits and _")
            if size < 1:
                raise PlanValueError(f"mesh axis {name!r} has size {size}; an axis needs at least one rank")

    @classmethod
    def of(cls, mesh: DeviceMesh | Mapping[str, int] | MeshAxes) -> MeshAxes:
        """The axes of a DeviceMesh, or of ``{"dp": 2, "tp": 4}``. Raises ValueError for a mesh without names."""
        if isinstance(mesh, MeshAxes):
            return mesh
        if isinstance(mesh, Mapping):
            wrong = next((f"{name!r}: {size!r}" for name, size in mesh.items() if not _is_size(name, size)), None)
            if wrong is not None:
                raise PlanValueError(
                    f"mesh {{{wrong}}} is not an axis and a size; pass names and integers, such as {{'dp': 2, 'tp': 4}}"
                )
            return cls(tuple(mesh), tuple(int(size) for size in mesh.values()))
        if not isinstance(mesh, DeviceMesh):
            raise PlanValueError(
                f"mesh is {mesh!r}, {kind_of(mesh)}; pass a DeviceMesh with axis names, or sizes, such as {{'dp': 2, "
                "'tp': 4}"
            )
        if mesh.mesh_dim_names is None:
            raise PlanValueError(
                f"{mesh} has no axis names, which a plan needs; pass mesh_dim_names= to init_device_mesh, for example "
                f"{tuple(f'axis{i}' for i in range(mesh.ndim))}"
            )
        return cls(tuple(mesh.mesh_dim_names), tuple(mesh.size(axis) for axis in range(mesh.ndim)))

    @classmethod
    def parse(cls, text: str) -> MeshAxes:
        """``dp=2,tp=4``. Raises ValueError saying what is wrong."""
        return cls.of(axis_sizes(text))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def size(self, name: str) -> int:
        return self.sizes[self.index(name)]

    def index(self, name: str) -> int:
        """The axis's position. Raises ValueError naming the axes and a near miss."""
        if name not in self.names:
            raise PlanValueError(
                f"the mesh has no axis {name!r} (axes: {', '.join(self.names)}){did_you_mean(str(name), self.names)}"
            )
        return self.names.index(name)

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes))


def _is_size(name: object, size: object) -> bool:
    return isinstance(name, str) and not isinstance(size, bool) and hasattr(size, "__index__")


def axis_sizes(text: str, *, may_be_open: bool = False) -> dict[str, int]:
    """Names and sizes in ``dp=2,tp=4``, and with ``may_be_open`` also in ``dp=-1,tp=4``. Raises ValueError."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not equals or not (size.removeprefix("-") if may_be_open else size).isdigit():
            advice = "dp=2,tp=4, or dp=-1,tp=4" if may_be_open else "dp=2,tp=4"
            raise PlanValueError(f"{part.strip()!r} is not axis=size; write a mesh as {advice}")
        if name in sizes:
            raise PlanValueError(f"mesh axis {name!r} is given twice in {text!r}")
        sizes[name] = int(size)
    return sizes
