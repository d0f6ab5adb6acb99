"""EMA: averages against the equation, on one device and on ranks; swapping, checkpoints, bad use."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.device import device_type
from tests.optim.test_adamw8bit_ranks import Net, loss_of, model_of, run_all, set_gradients, sharded
from tests.ranks import RankPools
from tests.whole import whole_tensors
from vescale.comm import record_comms
from vescale.fsdp import fully_shard
from vescale.optim import EMA, AdamW8bit


def averages(ema: EMA) -> dict[str, torch.Tensor]:
    return dict(whole_tensors(ema.state_dict()["averages"]))  # type: ignore[arg-type]


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    found = whole_tensors({name: p.detach() for name, p in model.named_parameters()})
    return {name: value.clone() for name, value in found.items()}  # type: ignore[union-attr]


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def change(model: nn.Module, step: int) -> None:
    """One step of training, the same on every mesh."""
    optimizer = AdamW8bit(model.parameters(), lr=0.1)
    set_gradients(model, step)
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_equation(dtype: torch.dtype) -> None:
    model = model_of().to(dtype)
    ema = EMA(model, 0.9)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    expected = {name: p.detach().to(wide, copy=True) for name, p in model.named_parameters()}
    for _ in range(5):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        ema.update()
        for name, p in model.named_parameters():
            expected[name] = 0.9 * expected[name] + 0.1 * p.detach().to(wide)
    found = averages(ema)
    for name, value in expected.items():
        assert found[name].dtype == wide
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    assert ema.num_updates == 5 and "out.weight" not in found  # tied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swapping_loses_nothing(dtype: torch.dtype) -> None:
    model = model_of().to(dtype)
    ema = EMA(model, 0.9)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    ema.update()
    trained, averaged = values(model), copy.deepcopy(averages(ema))
    version = model.up.weight._version
    with ema.swap() as same:
        assert same is ema
        assert_equal(values(model), {name: value.to(dtype) for name, value in averaged.items()})
        for call in (ema.update, ema.state_dict, lambda: ema.load_state_dict({})):
            with pytest.raises(RuntimeError, match="swapped in"):
                call()
    assert model.up.weight._version > version
    assert_equal(values(model), trained)
    assert_equal(averages(ema), averaged)
    with pytest.raises(ZeroDivisionError), ema.swap():
        _ = 1 / 0
    assert_equal(values(model), trained)
    ema.swap()
    ema.swap()
    assert_equal(values(model), trained)


def test_late_gone_and_resized_parameters() -> None:
    model = model_of()
    ema = EMA(model)
    model.late = nn.Parameter(torch.ones(3))
    ema.update()
    assert torch.equal(averages(ema)["late"], torch.ones(3))
    model.late = nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match="late is"):
        ema.update()
    del model.late
    with pytest.raises(ValueError, match="no longer has late"):
        ema.update()
    with pytest.raises(ValueError, match="only the state dict has an average of late"):
        EMA(model).load_state_dict(ema.state_dict())
    with pytest.raises(ValueError, match=r"decay is 1\.5"):
        EMA(model, 1.5)
    with torch.device("meta"), pytest.raises(ValueError, match="on the meta device"):
        EMA(nn.Linear(2, 2))


def test_buffers() -> None:
    model = nn.BatchNorm1d(4)
    ema = EMA(model, 0.5, use_buffers=True)
    model(torch.randn(8, 4) + 10)
    after = model.running_mean.clone()
    ema.update()
    with ema.swap():
        torch.testing.assert_close(model.running_mean, after / 2)
    assert torch.equal(model.running_mean, after)
    assert "running_mean" not in EMA(model).state_dict()["averages"]


def on_ranks(kind: str) -> None:
    """The bits of one device; evaluation with the averages; nothing is communicated."""
    one, model = model_of(), sharded(kind)
    emas = EMA(one, 0.9), EMA(model, 0.9)
    for step in range(3):
        for m, ema in zip((one, model), emas):
            change(m, step)
            loss_of(m, step).detach()  # leaves units gathered that do not reshard
            with record_comms() as ledger:
                ema.update()
            assert not ledger.records
    assert_equal(averages(emas[1]), averages(emas[0]))
    for name, p in model.named_parameters():
        average = emas[1].state_dict()["averages"][name]
        assert isinstance(average, DTensor) == isinstance(p, DTensor)
        if isinstance(p, DTensor):
            assert average.placements == p.placements and average.device_mesh == p.device_mesh
    before, losses = values(model), []
    for m, ema in zip((one, model), emas):
        with ema.swap(), torch.no_grad():
            loss = loss_of(m, 9)
            losses.append(float(loss.full_tensor() if isinstance(loss, DTensor) else loss))
    assert abs(losses[0] - losses[1]) < 1e-5
    assert_equal(values(model), before)


def gathered_root() -> None:
    """A root that stays gathered after a forward: its shards get the averages, and the next forward sees them."""
    one, model = model_of(), model_of()
    fully_shard(model, mesh=init_device_mesh(device_type(), (2,)), reshard_after_forward=False)
    emas = EMA(one, 0.5), EMA(model, 0.5)
    for m, ema in zip((one, model), emas):
        with torch.no_grad():
            for p in m.parameters():
                p.mul_(2.0)
        ema.update()
        loss_of(m, 0)
    losses = []
    for m, ema in zip((one, model), emas):
        with ema.swap():
            losses.append(float(loss_of(m, 1)))
    assert abs(losses[0] - losses[1]) < 1e-5


def test_on_ranks(ranks: RankPools) -> None:
    cases: list[Any] = [(on_ranks, (kind,)) for kind in ("fsdp", "plan")]
    ranks.run(run_all, [*cases, (gathered_root, ())], world_size=2)
    ranks.run(run_all, [(on_ranks, ("tp",))], world_size=4)


def average_of(kind: str) -> tuple[Net, EMA]:
    model = sharded(kind)
    ema = EMA(model, 0.9)
    change(model, 0)  # type: ignore[arg-type]
    ema.update()
    return model, ema  # type: ignore[return-value]


def save(kind: str, folder: str) -> None:
    dcp.save({"ema": average_of(kind)[1]}, checkpoint_id=folder)


def load(kind: str, folder: str) -> None:
    _, expected = average_of("plain")
    ema = EMA(sharded(kind), 0.5)
    dcp.load({"ema": ema}, checkpoint_id=folder)
    assert_equal(averages(ema), averages(expected))
    assert (ema.decay, ema.num_updates) == (0.9, 1)
    whole = EMA(sharded(kind), 0.5)
    whole.load_state_dict(expected.state_dict())
    assert_equal(averages(whole), averages(expected))


def test_checkpoints(ranks: RankPools, tmp_path: Path) -> None:
    ranks.run(save, "tp", str(tmp_path), world_size=4)
    ranks.run(load, "fsdp", str(tmp_path), world_size=3)
