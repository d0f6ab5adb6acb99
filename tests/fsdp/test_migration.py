"""Changing the import is the whole migration; losses follow DDP bit for bit where the order of additions is the same."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.device import device_type
from tests.examples import NIGHTLY
from tests.fsdp.compare import by_block, mesh_of
from tests.fsdp.models import Net, net_loss
from tests.ranks import RankPools
from vescale.fsdp import fully_shard

SCRIPT = Path(__file__).with_name("user_script.py")


def run_script(mesh_shape: tuple[int, ...], dtype: torch.dtype, offload: bool) -> None:
    results = []
    for package in ("torch.distributed.fsdp", "vescale.fsdp"):
        source = SCRIPT.read_text().replace("from torch.distributed.fsdp import", f"from {package} import")
        source = source.replace('init_device_mesh("cpu"', f'init_device_mesh("{device_type()}"')
        source = source.replace('device="cpu"', f'device="{"cpu" if offload else device_type()}"')
        space: dict[str, Any] = {"__name__": "user_script"}
        exec(compile(source, str(SCRIPT), "exec"), space)
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder)
        results.append(space["train"](dist.get_rank(), mesh_shape, folder[0], dtype, offload))
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)


def run_scripts() -> None:
    run_script((2, 2), torch.float32, False)
    if NIGHTLY:
        run_script((4,), torch.float32, True)
        run_script((4,), torch.float32, False)
        run_script((4,), torch.bfloat16, False)


def test_only_the_import_changes(ranks: RankPools) -> None:
    ranks.run(run_scripts, world_size=4)
    ranks.run(run_script, (2,), torch.float32, True, world_size=2)


OPTIONS = [
    {"hsdp", "bfloat16", "wrapper", "prefetch"},
    {"placement", "wrapper", "keep"},
    {"two", "checkpoint"},
    {"bfloat16", "offload", "unshard"},
    {"ignored", "hsdp"},
    {"compile", "placement", "hsdp", "offload"},
]


def run_options() -> None:
    script = Path(__file__).with_name("options_script.py")
    for options in OPTIONS:
        results = []
        for package in ("torch.distributed.fsdp", "vescale.fsdp"):
            source = script.read_text().replace("from torch.distributed.fsdp import", f"from {package} import")
            space: dict[str, Any] = {"__name__": "options_script"}
            exec(compile(source, str(script), "exec"), space)
            results.append(space["train"](options))
        torch.testing.assert_close(
            results[1], results[0], rtol=1e-4, atol=1e-4, msg=lambda text, o=options: f"{o}: {text}"
        )


@pytest.mark.slow
def test_options_of_fsdp2(ranks: RankPools) -> None:
    ranks.run(run_options, world_size=4, device="cpu")  # which the script names


def like_ddp(steps: int) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    model = Net()
    ddp = DistributedDataParallel(copy.deepcopy(model))
    by_block(model, fully_shard, mesh_of())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, ddp)]
    found = []
    for step in range(steps):
        losses = []
        for m, optimizer in zip((model, ddp), optimizers, strict=True):
            optimizer.zero_grad()
            loss = net_loss(m, step, dist.get_rank())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append((losses[0], losses[1]))
    return found


def test_losses_equal_ddp(ranks: RankPools) -> None:
    for losses in ranks.run(like_ddp, 8, world_size=2):
        assert all(ours == ddp for ours, ddp in losses), losses
    for losses in ranks.run(like_ddp, 4, world_size=4):
        assert all(abs(ours - ddp) <= 1e-6 for ours, ddp in losses), losses
