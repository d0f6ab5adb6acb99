"""Ranks wait for each other in the first forwards. Later they send a message in each step, which is looked at in the step in
the memory of the host, and a step later on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import vescale
from tests.ranks import RankPools
from vescale import InputMismatchError
from vescale.checks import StepChecks, StepMismatchError, _steps
from vescale.runtime import Runtime


@contextmanager
def compared(host_waits: bool) -> Iterator[None]:
    """``host_waits``: for answers, as in the host's memory; else they are looked at later, as on a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VESCALE_CHECK_EVERY", "4")
        if not host_waits:
            patch.setattr(_steps, "accelerator_module", lambda: object())
        yield


def parallel(given: str = "global") -> tuple[nn.Module, StepChecks]:
    torch.manual_seed(0)
    plan = vescale.Plan(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    model = vescale.parallelize(nn.Linear(4, 2), plan.shard("<in>", Shard(0), given=given))  # type: ignore[arg-type]
    runtime = Runtime.of(model)
    assert runtime is not None
    return model, runtime.checks


def steps(model: nn.Module, differs_at: int, number: int = 11) -> int:
    """The step that raises; 0: none does."""
    for step in range(1, number + 1):
        x = torch.full((4, 4), float(step + (dist.get_rank() if step == differs_at else 0)))
        try:
            model(x).sum().backward()
        except InputMismatchError as error:
            text = str(error)
            assert "input" in text and f"of forward {differs_at} of Linear" in text and "rank 1" in text, text
            return step
    return 0


def later() -> None:
    with compared(host_waits=False):
        for differs_at in (1, 3, 4):
            model, _ = parallel()
            assert steps(model, differs_at) == differs_at
        for differs_at in (5, 6, 8):  # 8: one of those that are described
            model, _ = parallel()
            raised = steps(model, differs_at)
            assert raised == differs_at + 1, (differs_at, raised)
        model, checks = parallel()
        assert steps(model, 0) == 0 and not checks._handed_in


def evaluations() -> None:
    """Without a backward, one message in many forwards."""
    with compared(host_waits=False), torch.no_grad():
        model, _ = parallel()
        with pytest.raises(InputMismatchError, match=r"forward 10 of Linear"):
            for step in range(80):
                model(torch.full((4, 4), float(step + (dist.get_rank() if step == 9 else 0))))
        assert step <= 70


def skipped() -> None:
    """One rank runs no backward."""
    with compared(host_waits=False):
        model, _ = parallel()
        with pytest.raises(
            StepMismatchError, match=r"rank 0 is before the backward of forward 6.*rank 1 is before forward 7"
        ):
            for step in range(1, 10):
                loss = model(torch.ones(4, 4)).sum()
                if step != 6 or dist.get_rank() == 0:
                    loss.backward()
        assert step <= 8


def written() -> None:
    """A parameter that is written to on one rank; all ranks hold the same part of it."""
    with compared(host_waits=False):
        model, _ = parallel()
        with pytest.raises(InputMismatchError, match=r"'weight'.*on some ranks only"):
            for step in range(1, 12):
                dist.barrier()  # the ranks are about as far: what they have handed in is there
                model(torch.ones(4, 4)).sum().backward()
                if step == 5 and dist.get_rank() == 1:
                    with torch.no_grad():
                        model.weight.to_local().add_(1)
        assert step == 9


def parts() -> None:
    """Parts of other sizes are gathered where they were so at first; else they are an error."""
    with compared(host_waits=False):
        model, _ = parallel("local")
        for step in range(1, 12):
            rows = 2 + (step % 2 if dist.get_rank() == 0 else 0)
            out = model(torch.ones(rows, 4))
            assert out.shape[0] == 4 + step % 2
            out.sum().backward()
        model, _ = parallel("local")
        with pytest.raises(InputMismatchError, match=r"different sizes in forward 6 of Linear.*CHECK=steps"):
            for step in range(1, 9):
                model(torch.ones(2 + (dist.get_rank() if step == 6 else 0), 4)).sum().backward()
        assert step == 7


def other_parts() -> None:
    """Of a model whose parts have had different sizes, one rank's gets a dim more."""
    with compared(host_waits=False):
        model, _ = parallel("local")
        with pytest.raises(InputMismatchError, match="not the shards of any tensor"):
            for step in range(1, 9):
                rows = torch.ones(3 - dist.get_rank(), 4)
                model(rows[None] if step == 6 and dist.get_rank() else rows).sum().backward()
        assert step == 6


def in_the_step() -> None:
    with compared(host_waits=True):
        for differs_at in (1, 3, 4, 5, 6, 8):
            model, _ = parallel()
            assert steps(model, differs_at) == differs_at


def a_read_on_one_rank() -> None:
    """The others are before a backward, and no message meets one of another size."""
    with compared(host_waits=True):
        model, _ = parallel()
        with pytest.raises(StepMismatchError, match=r"rank 0 is before a read of item.*rank 1 is before the backward"):
            for step in range(1, 12):
                out = model(torch.ones(4, 4))
                if step == 6 and dist.get_rank() == 0:
                    (out * 2).sum().item()
                out.sum().backward()
        assert step == 6


def parts_that_differ_late() -> None:
    with compared(host_waits=True):
        model, _ = parallel("local")
        for step in range(1, 12):
            rows = 2 + (1 if step == 9 and dist.get_rank() == 0 else 0)
            assert model(torch.ones(rows, 4)).shape[0] == (5 if step == 9 else 4)


def gathered() -> None:
    """What ranks send in a steady step."""
    with compared(host_waits=False):
        model, _ = parallel()
        assert steps(model, 0, 5) == 0
        with vescale.comm.record_comms() as ledger:
            model(torch.ones(4, 4)).sum().backward()
        (sent,) = (record for record in ledger.records if record.requester == "comparison of steps")
        assert sent.op == "all_reduce" and sent.bytes <= 16


def two_models() -> None:
    """Of one mesh: which of them reduces is compared with the other events, and nothing else is sent."""
    with compared(host_waits=True):
        models = [parallel()[0] for _ in range(2)]
        for step in range(1, 8):
            with vescale.comm.record_comms() as ledger:
                for model in models if step % 2 else models[::-1]:
                    model(torch.ones(4, 4)).sum().backward()
            found = [record.requester for record in ledger.records if "reduces" in record.requester]
            assert not found
        losses = [model(torch.ones(4, 4)).sum() for model in models]
        with pytest.raises(StepMismatchError, match="the backward of forward 8 of Linear"):
            for loss in losses if dist.get_rank() else losses[::-1]:
                loss.backward()


CASES = [
    later,
    evaluations,
    skipped,
    written,
    parts,
    other_parts,
    in_the_step,
    a_read_on_one_rank,
    parts_that_differ_late,
    two_models,
]


@pytest.mark.parametrize("case", [*CASES, gathered], ids=lambda case: str(case.__name__))
def test_later_forwards(ranks: RankPools, case: Callable[[], None]) -> None:
    ranks.run(case, world_size=2)
