"""``MeshStrategy``: PyTorch Lightning's strategy for models that parallelize themselves, with a mesh of any axes."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy

from vescale.runtime import init_mesh


class MeshStrategy(ModelParallelStrategy):
    """Gives a LightningModule the mesh, as ``self.device_mesh`` in its ``configure_model()``, which parallelizes the model.

    The loaders of all ranks draw the same global batches, which the plan shards.

    Args:
        axes: as for :func:`vescale.init_mesh`, for example ``"dp=-1,tp=2"``.
    """

    def __init__(self, axes: str) -> None:
        super().__init__()
        self._axes = axes

    def setup_environment(self) -> None:
        super(ModelParallelStrategy, self).setup_environment()
        self._setup_distributed()
        self._device_mesh = init_mesh(self._axes, device=self.root_device.type)
        module: Any = self.lightning_module
        module._device_mesh = self._device_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """A sampler that Lightning adds draws the same rows on every rank."""
        return {"num_replicas": 1, "rank": 0}
