"""Scripts of a first day, on two ranks: mistakes end in an error on every rank, and correct look-alikes run to the end."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import vescale
from tests.ranks import RankPools, run_cases
from vescale import InputMismatchError, StepMismatchError
from vescale.errors import MixedTensorsError, OpPlacementError
from vescale.fsdp import fully_shard


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 2)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("scale", torch.ones(2))

    def forward(
        self, x: torch.Tensor, mask: Any = None, temperature: float = 1.0, kind: str = "column"
    ) -> torch.Tensor:
        if isinstance(x, dict):
            x = x["x"]
        if mask is not None:
            x = x * mask
        return self.down(self.drop(torch.tanh(self.up(x)))) * self.scale / temperature


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


def parallel(given: str = "global", on: DeviceMesh | None = None) -> nn.Module:
    torch.manual_seed(0)
    plan = vescale.Plan(on or mesh())
    plan.shard("<in:x>", Shard(0), given=given)  # type: ignore[arg-type]
    return vescale.parallelize(Net(), plan)


def tensor_parallel() -> nn.Module:
    torch.manual_seed(0)
    plan = vescale.Plan(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    plan.shard("up.weight", Shard(0))
    plan.shard("up.bias", Shard(0))
    plan.shard("down.weight", Shard(1))
    plan.shard("down.<out>", Replicate())
    return vescale.parallelize(Net(), plan)


def sharded() -> nn.Module:
    torch.manual_seed(0)
    return fully_shard(Net(), mesh=mesh())


def batch(number: int = 0, rows: int = 4) -> torch.Tensor:
    return torch.arange(rows * 4.0).reshape(rows, 4) / 10 + number


def step(model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    loss = (model(*args, **kwargs) ** 2).mean()
    loss.backward()
    return loss


# Mistakes


def different_data() -> None:
    step(parallel(), batch(dist.get_rank()))


def different_data_over_tp() -> None:
    step(tensor_parallel(), batch(dist.get_rank()))


def different_data_in_the_fourth_step() -> None:
    model = parallel()
    for number in range(5):
        step(model, batch(dist.get_rank() if number == 3 else 0))


def different_data_in_a_container() -> None:
    step(tensor_parallel(), {"x": batch(), "ids": [torch.full((3,), dist.get_rank())]})


def different_number() -> None:
    step(parallel(), batch(), temperature=1.0 + dist.get_rank())


def different_constants_in_the_fifth_step() -> None:
    model = tensor_parallel()
    for number in range(6):
        kind = "row" if dist.get_rank() and number == 4 else "column"
        names = [f"a file of rank {dist.get_rank()}"]
        step(model, {"x": batch(number), "names": names, 3: None}, None, temperature=2.0, kind=kind)


def different_dtypes() -> None:
    step(parallel(), batch().double().float() if dist.get_rank() else batch().to(torch.bfloat16))


def different_sizes() -> None:
    step(parallel(), batch(rows=4 + 2 * dist.get_rank()))


def an_input_of_one_rank() -> None:
    step(tensor_parallel(), batch(), torch.ones(4) if dist.get_rank() else None)


def different_labels() -> None:
    model = parallel()
    for _ in range(2):
        F.cross_entropy(model(batch()), torch.full((4,), dist.get_rank())).backward()


def different_targets() -> None:
    model = parallel()
    for _ in range(2):
        F.mse_loss(model(batch()), torch.full((4, 2), 1.0 * dist.get_rank())).backward()


def a_distributed_sampler() -> None:
    model = parallel()
    data = TensorDataset(torch.randn(16, 4))
    sampler: Any = torch.utils.data.DistributedSampler(data, num_replicas=2, rank=dist.get_rank())
    for (x,) in DataLoader(data, 4, sampler=sampler):
        step(model, x)


def different_state() -> None:
    model = parallel()
    model.load_state_dict({name: torch.full(p.shape, 1.0 * dist.get_rank()) for name, p in model.state_dict().items()})


def different_plain_data() -> None:
    model = parallel()
    model.up.weight.data = torch.full((8, 4), 1.0 * dist.get_rank())
    step(model, batch())


def parts_that_no_cut_gives() -> None:
    step(parallel("local"), batch(rows=1 + dist.get_rank()))


def replicas_with_different_parts() -> None:
    torch.manual_seed(0)
    on = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    plan = vescale.Plan(on)
    plan.shard("<in:x>", Shard(0), mesh="dp", given="local")
    step(vescale.parallelize(Net(), plan), batch(dist.get_rank()))


def a_batch_that_is_not_global() -> None:
    model = parallel()
    step(model, vescale.shard_batch(batch(dist.get_rank()), model))


def evaluation_on_one_rank() -> None:
    model = parallel()
    step(model, batch())
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(batch())
    step(model, batch())


def evaluation_mode_on_one_rank() -> None:
    model = parallel()
    if dist.get_rank() == 0:
        model.eval()
    step(model, batch())


def a_backward_on_one_rank() -> None:
    model = parallel()
    for _ in range(2):
        loss = (model(batch()) ** 2).mean()
        if dist.get_rank() == 0:
            loss.backward()


def a_skipped_batch() -> None:
    model = parallel()
    for number in range(8):
        if dist.get_rank() == 1 and number == 4:
            continue
        step(model, batch(number))


def a_sharded_value_on_one_rank() -> None:
    model = parallel()
    y = model(batch())
    if dist.get_rank() == 0:
        y.full_tensor()
    (y**2).mean().backward()


def an_element_on_one_rank() -> None:
    y = parallel()(batch())
    if dist.get_rank() == 0:
        y[0, 0].item()
    dist.get_rank() == 1 and y.sum().item()


def a_forward_of_fully_shard_on_one_rank() -> None:
    model = sharded()
    for number in range(3):
        step(model, batch(number + dist.get_rank()))
        if dist.get_rank() == 0 and number == 1:
            model(batch())


def an_evaluation_of_fully_shard_on_one_rank() -> None:
    model = sharded()
    step(model, batch())
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(batch())
    step(model, batch())


def another_model_on_one_rank() -> None:
    on = mesh()
    first, second = parallel(on=on), parallel(on=on)
    step(first, batch())
    step(second if dist.get_rank() else first, batch())


def threads_in_another_order() -> None:
    """Training and evaluation on a thread each, which take turns in another order on each rank."""
    model, errors = parallel(), []

    def on_a_thread(work: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                work()
            except StepMismatchError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    turns = [lambda: step(model, batch()), lambda: model.eval()(batch())]
    step(model, batch())
    for work in turns if dist.get_rank() == 0 else turns[::-1]:
        on_a_thread(work)
        if errors:
            raise errors[0]


def a_write_on_one_rank() -> None:
    model: Any = parallel()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model.up.bias.fill_(1.0)
    step(model, batch())


def a_write_to_a_part_on_one_rank() -> None:
    """Of parameters that are cut over tp, those along dp hold the same part."""
    names = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    plan = vescale.Plan(names).shard("<in:x>", Shard(0), mesh="dp").shard("up.weight", Shard(0), mesh="tp")
    model: Any = vescale.parallelize(Net(), plan.shard("down.weight", Shard(1), mesh="tp"))
    step(model, batch())
    if dist.get_rank() == 1:
        model.up.weight.to_local().detach().mul_(2)
    step(model, batch())


def another_learning_rate_on_one_rank() -> None:
    model = parallel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank()))
    for _ in range(2):
        step(model, batch())
        optimizer.step()


def a_frozen_parameter_on_one_rank() -> None:
    model: Any = tensor_parallel()
    model.up.weight.requires_grad_(dist.get_rank() == 0)
    step(model, batch())


def a_part_of_the_model_on_one_rank() -> None:
    model: Any = tensor_parallel()
    if dist.get_rank() == 0:
        model.up(batch())
    step(model, batch())


def no_sync_on_one_rank() -> None:
    model = parallel()
    for _ in range(2):
        with vescale.no_sync(model) if dist.get_rank() else contextlib.nullcontext():
            step(model, batch())


def different_weights_of_a_loss() -> None:
    model = parallel()
    loss = (model(batch()) * torch.full((4, 2), 1.0 + dist.get_rank())).sum()
    loss.backward()


def a_collective_of_gradients() -> None:
    model = parallel()
    step(model, batch())
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def a_sum_of_losses_with_gradients() -> None:
    total = torch.zeros(())
    total += step(parallel(), batch())


def a_plain_parameter_of_each_rank() -> None:
    (parallel()(batch()) * nn.Parameter(torch.full((2,), 1.0 + dist.get_rank()))).sum().backward()


MISTAKES: list[tuple[Callable[[], None], type[Exception], str]] = [
    (different_data, InputMismatchError, r"input 'x' of forward 1 of Net.*on rank 0.*on rank 1.*given=\"local\".*Sampler"),
    (different_data_over_tp, InputMismatchError, "the input 'x' of forward 1 of Net"),
    (different_data_in_the_fourth_step, InputMismatchError, "the input 'x' of forward 4 of Net"),
    (different_data_in_a_container, InputMismatchError, r"the input \"x\['ids'\]\[0\]\" of forward 1"),
    (different_number, InputMismatchError, "the input 'temperature' of forward 1 of Net.*1.0 on rank 0 and 2.0 on rank 1"),
    (different_constants_in_the_fifth_step, InputMismatchError,
     r"the input 'kind' of forward 5 of Net.*'column' on rank 0 and 'row' on rank 1"),
    (different_dtypes, InputMismatchError, r"bfloat16\[4, 4\].*on rank 0 and float32\[4, 4\]"),
    (different_sizes, InputMismatchError, r"float32\[4, 4\].*on rank 0 and float32\[6, 4\]"),
    (an_input_of_one_rank, InputMismatchError, "the input 'mask' of forward 1 of Net.*nothing on rank 0"),
    (different_labels, InputMismatchError, "'target of nll_loss_forward' of the backward of forward 1 of Net"),
    (different_targets, InputMismatchError, "'target of mse_loss' of a read of the loss"),
    (a_distributed_sampler, InputMismatchError, "the input 'x' of forward 1 of Net"),
    (different_state, InputMismatchError, r"'up\.weight' of load_state_dict of Net"),
    (different_plain_data, InputMismatchError, "'data of data' of forward 1 of Net"),
    (parts_that_no_cut_gives, InputMismatchError, r"\{0: \(1, 4\), 1: \(2, 4\)\} by rank.*drop_last=True"),
    (replicas_with_different_parts, InputMismatchError, "although they have the same part of it.*ShardedBatchSampler"),
    (a_batch_that_is_not_global, InputMismatchError, "the input 'batch' of forward 1 of Net"),
    (evaluation_on_one_rank, StepMismatchError, r"rank 0 is before forward 2 of Net, in training, without gradients \(te.*"
     r"rank 1 is before forward 2 of Net, in training, with gradients.*no `if rank == 0:`"),
    (evaluation_mode_on_one_rank, StepMismatchError, "rank 0 is before forward 1 of Net, in evaluation"),
    (a_backward_on_one_rank, StepMismatchError, "rank 0 is before the backward of forward 1 .*rank 1 is before forward 2"),
    (a_skipped_batch, InputMismatchError, "the input 'x' of forward 5 of Net"),
    (a_sharded_value_on_one_rank, StepMismatchError, r"rank 0 is before a read of full.*rank 1 is before the backward"),
    (an_element_on_one_rank, StepMismatchError, "rank 0 is before a read of an operand of aten.*rank 1 is before a read of"),
    (a_forward_of_fully_shard_on_one_rank, StepMismatchError,
     "rank 0 is before forward 4 of Net.*rank 1 is before the backward of step 3 of Net"),
    (an_evaluation_of_fully_shard_on_one_rank, StepMismatchError,
     "rank 0 is before forward 2 of Net, in training, without gradients.*rank 1 is before forward 2 of Net, in tr.*with gr"),
    (another_model_on_one_rank, StepMismatchError, "forward 2 of Net.*forward 1 of Net"),
    (a_write_on_one_rank, InputMismatchError, r"parameter 'up\.bias' before forward 1 of Net.*\[1\.0, .* on rank 0 and"),
    (a_write_to_a_part_on_one_rank, InputMismatchError, r"parameter 'up\.weight' before forward 2 of Net"),
    (another_learning_rate_on_one_rank, InputMismatchError, r"lr of step 1 of SGD, group 0 is .* on rank 0 and"),
    (a_frozen_parameter_on_one_rank, InputMismatchError, r"requires_grad.*True of all on rank 0 and False of up\.weight"),
    (a_part_of_the_model_on_one_rank, StepMismatchError, "rank 0 is before a call of 'up', a part of.*rank 1 is bef"),
    (no_sync_on_one_rank, StepMismatchError, "rank 0 is before the backward of forward 1.*rank 1 is before forward 2"),
    (different_weights_of_a_loss, InputMismatchError, "'other of mul' of the backward of forward 1 of Net"),
    (a_collective_of_gradients, OpPlacementError, "collective allreduce on a DTensor.*remove the collective"),
    (a_sum_of_losses_with_gradients, MixedTensorsError, r"add_ writes a DTensor .*x\.detach\(\)"),
    (a_plain_parameter_of_each_rank, InputMismatchError, "'other of mul' of the backward of forward 1 of Net"),
    (threads_in_another_order, StepMismatchError, "in training.*in evaluation.*Several threads of this process run"),
]  # fmt: skip


def fails_alike(number: int) -> None:
    """The same error on both ranks, and nothing is left of it: another model trains afterwards."""
    run, kind, message = MISTAKES[number]
    with pytest.raises(kind, match=f"(?s){message}"):
        run()
    dist.barrier()


def mistakes() -> None:
    run_cases(fails_alike, [(n,) for n in range(len(MISTAKES))])


def test_mistakes_raise_on_every_rank(ranks: RankPools) -> None:
    ranks.run(mistakes, world_size=2)


# Correct programs that look like mistakes


def even_batches() -> None:
    model = parallel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(5):
        loss = step(model, batch(number))
        optimizer.step()
        optimizer.zero_grad()
        assert f"{loss:.3f}" and f"{loss.item()}" and repr(loss)


def own_parts() -> None:
    model = parallel("local")
    for number in range(5):
        step(model, batch(number + dist.get_rank()))


def uneven_last_parts() -> None:
    """5 rows as torch.chunk cuts them: the numbers of one device."""
    torch.manual_seed(0)
    reference = Net().eval()
    model = parallel("local").eval()
    for rows in (4, 5, 3):
        whole = batch(rows, rows)
        y = model(whole.chunk(2)[dist.get_rank()])
        assert y.shape == (rows, 2)
        torch.testing.assert_close(y.full_tensor(), reference(whole))
        loss = (y**2).mean()
        torch.testing.assert_close(loss.item(), (reference(whole) ** 2).mean().item())
        loss.backward()


def sharded_batch_sampler() -> None:
    on = mesh()
    model = parallel("local", on)
    data = TensorDataset(torch.randn(11, 4))
    for (x,) in DataLoader(data, batch_sampler=vescale.ShardedBatchSampler(data, 4, on, "dp", shuffle=True)):
        step(model, x)


def labels_of_a_sharded_batch() -> None:
    model = parallel()
    for number in range(3):
        x, labels, other = vescale.shard_batch((batch(number), torch.arange(4) % 2, "text"), model)
        assert isinstance(x, DTensor) and x.placements == (Shard(0),) and other == "text"
        F.cross_entropy(model(x), labels).backward()


def numbers_on_one_rank() -> None:
    model = parallel()
    for _ in range(3):
        y = model(batch())
        loss = F.cross_entropy(y, torch.zeros(4, dtype=torch.long))
        if dist.get_rank() == 0:
            assert f"{loss:.2f}" and float(loss) == loss.item()
        loss.backward()


def plain_tensors_outside_of_the_model() -> None:
    """Metrics, weights, sums and writes: what one device computes of its plain model."""

    def run(model: nn.Module) -> list[Any]:
        x, target, rows = batch(), batch(1)[:, :2], torch.tensor([1, 1, 0, 1])
        out = model(x)
        weighted = (out - target).square().mul(torch.linspace(1, 2, 2)).mean() + torch.cat([target, out]).sin().sum()
        loss = weighted + torch.where(target > 1.5, out, target).sum() + torch.gather(out, 1, rows[:, None]).sum()
        total, kept = torch.zeros(()), torch.zeros(4, 2)
        total += loss.detach()
        kept[1:] += out.detach()[1:]
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.ones(parameter.shape))
        grads = [parameter.grad for parameter in model.parameters()]
        return [
            total,
            kept,
            (out.argmax(-1) == rows).float().mean(),
            out[rows].sum(),
            rows.float() @ out,
            *grads,
            *model.parameters(),
        ]

    torch.manual_seed(0)
    expected = run(Net().eval())
    found = run(parallel().eval())
    assert not any(isinstance(value, DTensor) for value in found[:2])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.full_tensor() if isinstance(one, DTensor) else one, other)


def dropout_in_evaluation() -> None:
    model = parallel().eval()
    with torch.no_grad():
        for number in range(4):
            model(batch(number))
    model.train()
    step(model, batch())


def accumulation() -> None:
    model = parallel()
    for number in range(3):
        with vescale.no_sync(model):
            step(model, batch(number))
        step(model, batch(number + 1))


def accumulation_on_one_rank() -> None:
    """A backward that only accumulates communicates nothing here."""
    model = parallel("local")
    for number in range(2):
        with vescale.no_sync(model):
            loss = (model(batch(number)) ** 2).mean()
            if dist.get_rank() == 0:
                loss.backward()
        step(model, batch())


def several_models() -> None:
    on = mesh()
    first, second = parallel(on=on), parallel(on=on)
    teacher = copy.deepcopy(first)
    for number in range(3):
        with torch.no_grad():
            teacher(batch(number))
        loss = (first(batch(number)) ** 2).mean() + (second(batch(number)) ** 2).mean()
        loss.backward()


def several_calls() -> None:
    model = parallel()
    for number in range(3):
        (model(batch(number)).mean() + model(batch(number + 1)).sum()).backward()
        model.up(batch().new_ones(2, 4))


def generating() -> None:
    model = tensor_parallel().eval()
    x = batch(rows=1)
    with torch.inference_mode():
        for _ in range(6):
            y = model(x)
            x = torch.cat([x, (y if not isinstance(y, DTensor) else y.full_tensor())[-1:].repeat(1, 2)])


def checkpointing() -> None:
    model = parallel()
    for number in range(3):
        x = batch(number).requires_grad_()
        (checkpoint(model, x, use_reentrant=number == 1) ** 2).mean().backward()


def lines_of_their_own() -> None:
    model = parallel()
    for number in range(3):
        if dist.get_rank() == 0:
            step(model, batch(number))
        else:
            step(model, batch(number))


def values_that_differ_on_purpose() -> None:
    model = parallel()
    with vescale.unchecked():
        model.load_state_dict({"scale": torch.full((2,), 1.0 + dist.get_rank())}, strict=False)
        with torch.no_grad():
            model(batch(dist.get_rank()))
    step(model, batch())


def different_work_between_steps() -> None:
    model = parallel()
    for number in range(4):
        step(model, batch(number))
        if dist.get_rank() == number % 2:
            torch.randn(200, 200).matmul(torch.ones(200, 200)) if number > 9 else sum(range(200000))


def plain_models_on_one_rank() -> None:
    model, other = parallel(), Net()
    for number in range(3):
        if dist.get_rank() == 0:
            with torch.random.fork_rng():  # its dropout would draw from what the other model draws from
                step(other, batch(number))
        step(model, batch(number))


def nans_and_empty_tensors() -> None:
    model = tensor_parallel()
    for _ in range(4):
        model(batch() * float("nan"), torch.zeros(0, 4)[:0].sum() * torch.ones(4))


def parts_of_a_mesh() -> None:
    """A value that is whole on an axis may be read by some ranks alone."""
    on = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = parallel(on=on["dp"])
    weight = model.up.weight
    if dist.get_rank() == 0:
        weight.full_tensor(), weight.sum().item()
    step(model, batch())


def loading_the_same_state() -> None:
    model = parallel()
    state = {name: torch.ones(p.shape) for name, p in model.state_dict().items()}
    model.load_state_dict(state)
    model.up.weight.data = torch.full((8, 4), 2.0)
    assert model.up.weight.full_tensor().sum() == 64
    step(model, batch())


def finishing_without_a_backward() -> None:
    from vescale.runtime import gradient_reducer

    model = parallel("local")
    for number in range(3):
        loss = (model(batch()) ** 2).mean()
        if dist.get_rank() == 0 or number != 1:
            loss.backward()
        gradient_reducer(model).finish()


def fully_shard_with_data_of_its_own() -> None:
    model = sharded()
    for number in range(3):
        step(model, batch(number + dist.get_rank(), rows=3 + dist.get_rank()))
        with torch.no_grad():
            model(batch(dist.get_rank()))


LOOK_ALIKES = [
    even_batches, own_parts, uneven_last_parts, sharded_batch_sampler, labels_of_a_sharded_batch, numbers_on_one_rank,
    dropout_in_evaluation, accumulation, accumulation_on_one_rank, several_models, several_calls, generating, checkpointing,
    lines_of_their_own, values_that_differ_on_purpose, different_work_between_steps, plain_models_on_one_rank,
    plain_tensors_outside_of_the_model, nans_and_empty_tensors, parts_of_a_mesh, loading_the_same_state,
    fully_shard_with_data_of_its_own,
]  # fmt: skip


def look_alike(number: int) -> None:
    LOOK_ALIKES[number]()


def look_alikes() -> None:
    run_cases(look_alike, [(n,) for n in range(len(LOOK_ALIKES))])


@pytest.mark.parametrize("mode", ["", "steps"])
def test_correct_programs_raise_nothing(ranks: RankPools, mode: str) -> None:
    ranks.run(in_mode, mode, world_size=2)


def in_mode(mode: str) -> None:
    os.environ["VESCALE_CHECK"] = mode
    try:
        look_alikes()
    finally:
        del os.environ["VESCALE_CHECK"]


# Reads along some axes


def on_two_axes() -> tuple[nn.Module, DTensor]:
    torch.manual_seed(0)
    plan = vescale.Plan(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    plan.shard("up.weight", Shard(0), mesh="tp").shard("up.bias", Shard(0), mesh="tp")
    plan.shard("down.weight", Shard(1), mesh="tp").shard("down.<out>", Replicate(), mesh="tp")
    model: Any = vescale.parallelize(Net(), plan)
    return model, model.up.weight


def a_read_by_one_rank_of_an_axis() -> None:
    """The rank that reads, and the others, which are before a forward of all ranks, wait for each other."""
    model, weight = on_two_axes()
    if dist.get_rank() == 0:
        weight.full_tensor()
    model(batch())


def another_read_by_one_rank_of_an_axis() -> None:
    _, weight = on_two_axes()
    if dist.get_rank() < 2:
        weight.full_tensor() if dist.get_rank() else weight.sum().item()
    else:
        raise StepMismatchError("a read of full_tensor", ())


def reads_along_an_axis() -> None:
    """Of all ranks that have parts, and of no others; also after errors that have ended some ranks' events earlier."""
    for run, text in (
        (
            a_read_by_one_rank_of_an_axis,
            r"rank 0 is at .a read of full_tensor\(\).*rank 1 is at .forward 1 of Net",
        ),
        (another_read_by_one_rank_of_an_axis, "a read of full_tensor"),
    ):
        with pytest.raises(StepMismatchError, match=f"(?s){text}"):
            run()
        model, weight = on_two_axes()
        for number in range(3):
            if dist.get_rank() < 2:
                assert weight.full_tensor().shape == (8, 4)
            step(model, batch(number))


def test_reads_along_an_axis_are_compared_by_its_ranks(ranks: RankPools) -> None:
    ranks.run(reads_along_an_axis, world_size=4)


def the_same_model_after_an_error() -> None:
    """Its ranks have run different numbers of events when all have raised, one of them long after the others."""
    model, weight = on_two_axes()
    if dist.get_rank() == 3:
        time.sleep(1.0)
    with pytest.raises(StepMismatchError, match=r"rank 0 is at .a read of full_tensor\(\).*rank 1 is at .forward 1"):
        if dist.get_rank() == 0:
            weight.full_tensor()
        model(batch())
    torch.manual_seed(0)
    alone = Net().eval()
    model.eval()
    for number in range(2):
        assert step(model, batch(number)).item() == pytest.approx(step(alone, batch(number)).item(), rel=1e-5)
        assert weight.full_tensor().shape == (8, 4)


def test_a_script_that_goes_on_after_an_error_is_not_refused(ranks: RankPools) -> None:
    ranks.run(the_same_model_after_an_error, world_size=4, timeout=60.0)
