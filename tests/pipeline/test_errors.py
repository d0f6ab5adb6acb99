"""What a pipeline refuses, before anything is communicated, and the edit that each message gives."""

from __future__ import annotations

import contextlib
import contextvars
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import library, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.pipeline.steps import Net, mesh_of, token_batch
from tests.ranks import RankError, RankPools
from tests.runtime.zero import sharded_at_rest
from vescale import parallelize
from vescale.checks import InputMismatchError, StepMismatchError
from vescale.pipeline import StagedProgram, check_stages
from vescale.pipeline._batches import microbatches_of, traced_pair
from vescale.pipeline._gates import current_run
from vescale.pipeline._stage_run import StageRun
from vescale.plans import Plan, PlanError

NAMES = ("ids", "labels")


def pipeline(axes: dict[str, int] | None = None, **options: Any) -> Plan:
    return Plan(axes or {"pp": 2}).pipeline(**{"split_before": ["blocks.2"], "microbatches": 4, **options})


ENTRIES: dict[str, tuple[dict[str, Any], str]] = {
    "no axis": ({"axes": {"dp": 2}}, "no axis 'pp'; the axes are dp=2"),
    "two cuts": ({"balance": "cost"}, "split_before and balance determines? the stages; pass exactly one of"),
    "no cut": ({"split_before": None}, "nothing determines the stages; pass exactly one of"),
    "unknown schedule": ({"schedule": "1F2B"}, "'1F2B' is none of GPipe, 1F1B, .* did you mean.*1F1B"),
    "micro-batches": ({"microbatches": 0}, "microbatches=0; use a number of at least 1"),
    "reduce": ({"reduce": "steps"}, "reduce='steps'; use 'step' or 'microbatch'"),
    "loss": ({"loss": "loss"}, "use a path that begins with the output, such as 'out.loss'"),
    "loss of one argument": (
        {"loss": lambda out: (out, 1)},
        r"\(out\) cannot be called with \(out, batch\): .* with both parameters",
    ),
    "limit without balance": ({"memory_gib": 4}, "memory_gib=4; use a positive number, together with balance="),
    "a path of an input": ({"split_before": ["blocks.2.<in>"]}, "takes a module path"),
    "unknown path": ({"split_before": ["layers.2"]}, "'layers.2' matches no module .* for example 'blocks.0'"),
    "the model itself": ({"split_before": [""]}, "module|path"),
    "inside of each other": ({"split_before": ["blocks.2", "blocks.2.up"]}, "'blocks.2.up' is part of 'blocks.2'"),
    "too many stages": (
        {"split_before": ["blocks.1", "blocks.2"]},
        "schedule 1F1B: 3 stages for 2 ranks along 'pp'; split the model into a multiple of 2",
    ),
    "two stages a rank": (
        {"split_before": ["blocks.1", "blocks.2", "blocks.3"]},
        "it runs one stage on each rank, but the model is split into 4 stages for 2 ranks; split it into 2, or use "
        "Interleaved1F1B",
    ),
    "one stage a rank": ({"schedule": "ZBV"}, "it runs exactly 2 stages on each rank; split the model into 4, not 2"),
    "too few micro-batches": ({"microbatches": 1}, "1 micro-batches for 2 stages; use microbatches=2 or more"),
    "rounds": (
        {"schedule": "Interleaved1F1B", "microbatches": 5, "split_before": ["blocks.1", "blocks.2", "blocks.3"]},
        "5 micro-batches on 2 ranks; .* use a multiple of 2",
    ),
    "no beginning": (
        {"split_before": []},
        r"split_before=\[\] names no module; name one",
    ),
    "a line of text": (
        {"schedule": "0F0,0B0\n"},
        "it has 1 lines for 2 ranks along 'pp'; write one line for each rank",
    ),
    "a stage of text": (
        {"schedule": "0F0,0B0\n5F0,5B0\n", "microbatches": 1},
        "'5F0' is of stage 5, but the model is split into stages 0 to 1",
    ),
    "a forward of text": (
        {"schedule": "0F0,0F0,0B0\n1F0,1B0\n", "microbatches": 1},
        "it contains 0F0 more than once; write each computation once",
    ),
    "listed twice": (
        {"split_before": None, "stages": [["blocks.0", "blocks.1"], ["blocks.1"]]},
        "all modules of stage 1, blocks.1, are also in other stages",
    ),
    "out of order": (
        {"split_before": None, "stages": [["blocks.3"], ["blocks.1"]], "schedule": "GPipe"},
        "not in order|in stage|belongs",
    ),
    "too few blocks": (
        {"split_before": None, "balance": "cost", "stages_per_rank": 4, "schedule": "Interleaved1F1B"},
        "balance='cost' found no ModuleList of at least 8 blocks; pass split_before=",
    ),
    "a stage without parameters": (
        {"split_before": ["dropouts"]},
        "stage 1, which begins before 'dropouts.0', has no para",
    ),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_entries(name: str) -> None:
    options, message = ENTRIES[name]
    model = Net()
    if name == "a stage without parameters":
        model.dropouts = nn.ModuleList([nn.Dropout()])
    with pytest.raises(PlanError, match=message) as raised:
        plan = pipeline(**options)
        staged = StagedProgram.of(plan, model)
        staged.counts(token_batch(0, names=NAMES), ())
    assert raised.value.source is None or raised.value.source.line > 0


@pytest.mark.parametrize("what", ["checkpoint", "unit with mp_policy="])
def test_entries_of_torn_modules(what: str) -> None:
    plan = Plan({"pp": 2, "dp": 2}).pipeline(split_before=["inner.blocks.2"], microbatches=4)
    sharded_at_rest(plan, ".*", "dp")
    if what == "checkpoint":
        plan.checkpoint("inner")
    else:
        plan.unit("inner", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with pytest.raises(PlanError, match=rf"begins before 'inner.blocks.2', inside of 'inner', which has a {what}"):
        StagedProgram.of(plan, Outer())


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.inner(ids, labels)


class Unused(Net):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        mask = (ids != 0).unsqueeze(-1).float()
        return {"loss": self.blocks[0](self.embed(ids), mask).mean()}


BATCHES: dict[str, tuple[type[nn.Module], dict[str, Any], dict[str, Any], str]] = {
    "indivisible": (
        Net,
        {},
        {"rows": 6},
        "a batch of 6 rows cannot be split into 4 equal micro-batches; pass a multiple of 4",
    ),
    "never called": (Unused, {}, {}, "the forward does not call 'blocks.2', before which a stage begins"),
    "loss path": (Net, {"loss": "out.losses"}, {}, "the model's output, a dict, has no 'losses'"),
    "loss of dims": (Net, {"loss": "out.logits"}, {}, r"loss='out.logits' is a tensor of shape \(.*, 32\)"),
    "other order": (
        Net,
        {"split_before": None, "stages": [["embed", "norm"], ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]]},
        {},
        "the forward calls 'norm' in stage 1, but .* it belongs to stage 0; pass stages=",
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches(name: str) -> None:
    cls, options, batch, message = BATCHES[name]
    with pytest.raises(PlanError, match=message):
        staged = StagedProgram.of(pipeline(**options), cls())
        assert name in ("indivisible", "loss path", "loss of dims"), "inputs can be guessed: found without a batch"
        staged.counts(token_batch(0, names=NAMES, **batch), ())


def test_check_finds_what_lower_raises() -> None:
    findings = check_stages(pipeline(split_before=["layers.2"]), Net())
    assert any("matches no module" in finding.problem for finding in findings if finding.severity == "error")


def raised_everywhere() -> list[str]:
    found = []
    for name in ("indivisible", "loss path", "loss of dims"):
        cls, options, batch, _ = BATCHES[name]
        torch.manual_seed(0)
        plan = Plan(mesh_of(pp=2)).pipeline(**{"split_before": ["blocks.2"], "microbatches": 4, **options})
        try:
            model = parallelize(cls(), plan)
            model.step(**token_batch(0, names=NAMES, **batch))
        except PlanError as error:
            found.append(str(error))
    model = parallelize(Net(), Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4))
    with pytest.raises(InputMismatchError, match="'ids'") as raised:
        model.step(**token_batch(dist.get_rank(), names=NAMES))
    found.append(str(raised.value))
    model = parallelize(Net(), Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4))
    with pytest.raises(StepMismatchError) as differ:
        (model.step if dist.get_rank() == 0 else model.evaluate)(**token_batch(0, names=NAMES))
    found.append(str(differ.value))
    with pytest.raises(RuntimeError, match=r"runs in stages, so that no rank can run its whole forward; call \.step"):
        model(**token_batch(0, names=NAMES))
    plan = Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4)
    with pytest.raises(PlanError, match=r"mode='static' records a step of the whole model.* remove mode="):
        parallelize(Net(), plan, mode="static")
    return found


def test_steps_refuse_on_every_rank(ranks: RankPools) -> None:
    one, other = ranks.run(raised_everywhere, world_size=2, timeout=60)
    assert one == other and len(one) == 5


def summed(out: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    labels = batch["labels"].flatten()
    return F.cross_entropy(out["logits"].flatten(0, 1), labels, reduction="sum"), (labels != -100).sum()


def reads_a_number(out: Any, batch: Any) -> Any:
    assert summed(out, batch)[0].item() > 0
    return summed(out, batch)


def reads_an_array(out: Any, batch: Any) -> Any:
    assert out["logits"].detach().numpy().shape == np.asarray(out["logits"].detach()).shape
    return summed(out, batch)


def reads_a_list(out: Any, batch: Any) -> Any:
    assert len(out["logits"].tolist()) > 0
    return summed(out, batch)


def casts(out: Any, batch: Any) -> Any:
    with torch.autocast(out["logits"].device.type, dtype=torch.bfloat16):
        return summed(out, batch)


def compares_devices(out: Any, batch: Any) -> Any:
    if out["logits"].device != batch["labels"].device:
        raise ValueError("put labels where logits are")
    return summed(out, batch)


def misses_metadata(out: Any, batch: Any) -> Any:
    raise RuntimeError("no metadata in this batch")


# None: a loss that a trace without values must not refuse; else what the error names.
LOSSES: dict[Any, str | None] = {
    summed: None,
    reads_a_number: None,
    reads_an_array: None,
    reads_a_list: None,
    casts: None,
    compares_devices: None,
    misses_metadata: "RuntimeError: no metadata in this batch",
    lambda out, batch: (out.logits, 1): "AttributeError: 'dict' object has no attribute 'logits'",
    lambda out, batch: summed(out, {"labels": batch["label"]}): "KeyError: 'label'",
    lambda out, batch: (out["logits"] @ torch.ones(7), 1): "RuntimeError: .*7",
    lambda out, batch: (out["logits"], 1): r"returns a pair of \(8, 6, 32\) and int",
    lambda out, batch: summed(out, batch)[0]: "returns a Tensor",
}


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_callable_losses_before_the_step(loss: Any) -> None:
    """Mistakes are told apart from what a forward without values cannot compute; the texts of errors say nothing."""
    pipeline_of = StagedProgram.of(pipeline(loss=loss), Net())
    batch = token_batch(0, names=NAMES)
    message = LOSSES[loss]
    with pytest.raises(PlanError, match=message) if message is not None else contextlib.nullcontext():
        traced_pair(
            pipeline_of.skeleton,
            pipeline_of.cut,
            pipeline_of.entry,
            batch,
            microbatches_of(batch, pipeline_of.entry)[0],
        )


class Logging(Net):
    """Takes a value that depends on parameters to Python."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        if float(self.embed(ids).abs().max()) > 100.0:
            raise ValueError("overflow")
        return super().forward(ids, labels)


def test_forwards_that_read_what_depends_on_parameters() -> None:
    with pytest.raises(
        PlanError, match=r"branches on values of parameters, or reads them in Python .* use torch\.where"
    ):
        StagedProgram.of(pipeline(), Logging())


class Distilled(Net):
    """Its inputs are guessed as token ids, for which the loss of a teacher's logits has no kernel."""

    def forward(self, ids: torch.Tensor, teacher_logits: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, torch.ones(1).to(x.dtype))
        return {"loss": F.kl_div(self.head(self.norm(x)).log_softmax(-1), teacher_logits.softmax(-1), reduction="sum")}


library.define("vescale_tests::halved", "(Tensor x) -> Tensor")
library.impl("vescale_tests::halved", "cpu", lambda x: x / 2)


class Halving(Net):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            torch.ops.vescale_tests.halved(self.embed(ids))
        return super().forward(ids, labels)


def test_an_op_that_cannot_run_without_values() -> None:
    with pytest.raises(PlanError, match=r"calls an op that cannot run without values .*halved.*register_fake"):
        StagedProgram.of(pipeline({"pp": 2}), Halving())
    library.register_fake("vescale_tests::halved", torch.empty_like)
    StagedProgram.of(pipeline({"pp": 2}), Halving())


def test_a_guess_of_another_dtype_is_no_shape_of_values() -> None:
    staged = StagedProgram.of(pipeline({"pp": 2}, split_before=["blocks.2"], microbatches=4), Distilled())
    ids = torch.randint(1, 32, (8, 6))
    assert staged.traced({"ids": ids, "teacher_logits": torch.randn(8, 6, 32)}).boundaries[1].shapes == ((2, 6, 16),)


def token_out_of_range() -> None:
    """Caught by the script, which goes on; the next stage waits for a message of this one."""
    plan = Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4, mesh="pp", loss="out.loss")
    model: Any = parallelize(Net(tied=False), plan)
    model.step(**token_batch(0, names=NAMES))
    batch = token_batch(1, names=NAMES)
    batch["ids"][5, 2] = 99
    with contextlib.suppress(IndexError):
        model.step(**batch)
    model.step(**token_batch(2, names=NAMES))


class Failing(nn.Module):
    """A block that raises in the second step: in its forward, or when it runs again in backward."""

    def __init__(self, block: nn.Module, error: type[BaseException], again: bool) -> None:
        super().__init__()
        self.block, self.error, self.again = block, error, again

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        is_again = torch._C._current_graph_task_id() != -1
        is_traced = current_run() is not None and not isinstance(current_run(), StageRun)
        if SECOND.get() and not is_traced and is_again == self.again:
            raise self.error("no longer")
        return self.block(x, mask)


SECOND = contextvars.ContextVar("SECOND", default=False)


def failing_step(policy: str, error: type[BaseException], again: bool) -> None:
    """Caught on its rank, which goes on; the other one waits for a message of this one."""
    model: Any = Net(tied=False)
    model.blocks[3] = Failing(model.blocks[3], error, again)
    plan = Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4, mesh="pp", loss="out.loss")
    model = parallelize(model, plan.checkpoint(r"blocks\.\d+", policy))
    model.step(**token_batch(0, names=NAMES))
    SECOND.set(True)
    with contextlib.suppress(error):
        model.step(**token_batch(1, names=NAMES))
    model.step(**token_batch(2, names=NAMES))


@pytest.mark.parametrize(
    ("policy", "error", "again"),
    [
        ("full", RuntimeError, True),
        ("selective", torch.OutOfMemoryError, True),
        ("full", KeyboardInterrupt, False),
    ],
)
def test_errors_of_checkpointed_blocks_end_the_others_soon(
    policy: str, error: type[BaseException], again: bool
) -> None:
    pools, started = RankPools(), time.monotonic()
    try:
        with pytest.raises(RankError, match=f"rank 1 has failed: {error.__name__}: no longer"):
            pools.run(failing_step, policy, error, again, world_size=2)
    finally:
        pools.close()
    assert time.monotonic() - started < 45  # gloo's limit is 60 s


def test_an_error_of_one_stage_ends_the_others_soon() -> None:
    pools = RankPools()
    started = time.monotonic()
    try:
        with pytest.raises(RankError, match="rank 0 has failed: IndexError: index out of range"):
            pools.run(token_out_of_range, world_size=2)
    finally:
        pools.close()
    assert time.monotonic() - started < 45  # gloo's limit is 60 s
