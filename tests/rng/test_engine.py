"""The CPU engine against one native fill, for every coordinate of a mesh, without processes."""

from __future__ import annotations

import itertools
import random
import warnings

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from tests.examples import NIGHTLY
from tests.rng import cases
from vescale.placements import RaggedShard, local_region
from vescale.rng import _cpu_engine, _random_ops
from vescale.rng._cpu_engine import fill_region
from vescale.rng._random_ops import Fill, RandomOp

COMBINATIONS = 1_800  # of each of the 13 ops (and of bernoulli_ with a tensor): over 20,000 in all


@pytest.fixture(params=["one span", "many spans"])
def span_limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of production never cut small tensors: repeat with limits that cut and skip everywhere."""
    if request.param == "many spans":
        monkeypatch.setattr(_cpu_engine, "SCRATCH_ELEMENTS", 7)
        monkeypatch.setattr(_cpu_engine, "GAP_ELEMENTS", 2)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.filterwarnings("ignore", message=".*out of bounds.*")
    # The slow way has the right bits too: a test must not pass by it unawares.
    warnings.filterwarnings("error", message=".*every rank generates the whole tensor.*")


NAMES = [*cases.OPS, "bernoulli_tensor"]


def test_there_are_twenty_thousand_combinations() -> None:
    """Of op, dtype, shape and placements, a quarter of them daily; each is checked at every coordinate of its mesh."""
    assert len(NAMES) * COMBINATIONS >= 20_000


@pytest.mark.parametrize("name", NAMES)
def test_every_coordinate_gets_the_bits_of_one_device(name: str, span_limits: None) -> None:
    rng = random.Random(f"{name} {_cpu_engine.SCRATCH_ELEMENTS}")
    op = cases.OPS.get(name, RandomOp("bernoulli_"))
    dtypes = cases.DTYPES.get(name, cases.FLOATS)
    count = 0
    while count < COMBINATIONS // (2 if NIGHTLY else 8):
        dtype = rng.choice(dtypes)
        shape = cases.random_shape(rng)
        order = cases.random_memory_order(rng, len(shape))
        whole = cases.empty_in_order(shape, order, dtype)
        start = cases.used_generator(rng)
        expected = cases.clone_of(start)
        probabilities = None
        if name == "bernoulli_tensor":
            probabilities = torch.rand(shape, dtype=rng.choice(cases.FLOATS))
        op.fill(whole, expected, probabilities)
        state = expected.get_state()
        for _ in range(3):  # several placements share one reference
            mesh, placements = cases.random_placements(rng, shape, rng.choice((1, 2, 3, 4, 8)))
            where = f"{op} {dtype} {shape} order {order} mesh {mesh} {placements}"
            for coordinate in cases.coordinates(mesh):
                region = local_region(shape, placements, mesh, coordinate)
                local = torch.empty(region.local_shape, dtype=dtype)
                parameter = None if probabilities is None else cases.part_of(probabilities, region)
                generator = cases.clone_of(start)
                fill_region(local, Fill(op, region, whole.stride()), generator, parameter)
                assert torch.equal(local, cases.part_of(whole, region)), f"values: {where} at {coordinate}"
                assert torch.equal(generator.get_state(), state), f"generator: {where} at {coordinate}"
            count += 1


def test_the_bits_are_of_the_plain_chunks() -> None:
    """Once without any of the library's index arithmetic in the expectation."""
    whole = torch.empty(12, 10).normal_(generator=torch.Generator().manual_seed(1))
    for dim, index in itertools.product((0, 1), range(4)):
        local = torch.empty_like(whole.chunk(4, dim)[index])
        generator = torch.Generator().manual_seed(1)
        region = local_region((12, 10), [Shard(dim)], (4,), (index,))
        fill_region(local, Fill(RandomOp("normal_"), region, whole.stride()), generator)
        assert torch.equal(local, whole.chunk(4, dim)[index])


@pytest.mark.parametrize("op", [RandomOp("normal_"), RandomOp("uniform_"), RandomOp("log_normal_")])
def test_large_tensors_cross_spans_and_jumps(op: RandomOp) -> None:
    """Sizes at which spans are cut by the real limits, and the way to a shard is long."""
    shape = (600, 2_003)
    start = torch.Generator().manual_seed(9)
    whole, expected = torch.empty(shape), cases.clone_of(start)
    op.fill(whole, expected)
    for placements in ([Shard(0)], [Shard(1)], [RaggedShard()], [Replicate()]):
        for coordinate in ((0,), (2,), (3,)):
            region = local_region(shape, placements, (4,), coordinate)
            local, generator = torch.empty(region.local_shape), cases.clone_of(start)
            fill_region(local, Fill(op, region, whole.stride()), generator)
            assert torch.equal(local, cases.part_of(whole, region)), (placements, coordinate)
            assert torch.equal(generator.get_state(), expected.get_state())


def test_local_tensors_of_any_strides() -> None:
    whole = torch.empty(9, 6).normal_(generator=torch.Generator().manual_seed(2))
    region = local_region((9, 6), [Shard(0)], (2,), (1,))
    for local in (torch.empty(6, 4).t(), torch.empty(4, 12)[:, ::2], torch.empty(6, 6)[1:5]):
        fill_region(local, Fill(RandomOp("normal_"), region, whole.stride()), torch.Generator().manual_seed(2))
        assert torch.equal(local, whole[5:])


def test_strided_slices_are_filled_row_major() -> None:
    """A global tensor with holes (a slice) is filled in row-major order, by pairs."""
    base = torch.zeros(6, 20)
    base[:, ::2].normal_(generator=torch.Generator().manual_seed(3))
    region = local_region((6, 10), [Shard(0)], (2,), (1,))
    local = torch.empty(3, 10)
    fill_region(local, Fill(RandomOp("normal_"), region, (20, 2)), torch.Generator().manual_seed(3))
    assert torch.equal(local, base[3:, ::2])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), RaggedShard()])
@pytest.mark.parametrize("op", [RandomOp("normal_", (0.0, 3.0)), RandomOp("uniform_", (0.5, 3.0))])
def test_complex(dtype: torch.dtype, placement: object, op: RandomOp) -> None:
    start = torch.Generator().manual_seed(4)
    whole, expected = torch.empty(5, 7, dtype=dtype), cases.clone_of(start)
    op.fill(whole, expected)
    for index in range(3):
        region = local_region((5, 7), [placement], (3,), (index,))  # type: ignore[list-item]
        local, generator = torch.empty(region.local_shape, dtype=dtype), cases.clone_of(start)
        fill_region(local, Fill(op, region, whole.stride()), generator)
        assert torch.equal(local, cases.part_of(whole, region))
        assert torch.equal(generator.get_state(), expected.get_state())


def test_unknown_draws_are_replayed_whole_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cpu_engine, "rule_holds", lambda *_: False)
    monkeypatch.setattr(_cpu_engine, "_warned", set())
    rng = random.Random(5)
    with pytest.warns(UserWarning, match="every rank generates the whole tensor") as caught:
        for op, parameter_dtype in ((cases.OPS["normal"], None), (RandomOp("bernoulli_"), torch.float32)):
            for _ in range(40):
                shape = cases.random_shape(rng)
                order = cases.random_memory_order(rng, len(shape))
                whole = cases.empty_in_order(shape, order, torch.float32)
                probabilities = None if parameter_dtype is None else torch.rand(shape)
                expected = torch.Generator().manual_seed(6)
                op.fill(whole, expected, probabilities)
                mesh, placements = cases.random_placements(rng, shape, 4)
                for coordinate in cases.coordinates(mesh):
                    region = local_region(shape, placements, mesh, coordinate)
                    local, generator = torch.empty(region.local_shape), torch.Generator().manual_seed(6)
                    parameter = None if probabilities is None else cases.part_of(probabilities, region)
                    fill_region(local, Fill(op, region, whole.stride()), generator, parameter)
                    assert torch.equal(local, cases.part_of(whole, region))
                    assert torch.equal(generator.get_state(), expected.get_state())
    assert len([w for w in caught if "whole tensor" in str(w.message)]) == 2  # one for each op and dtype


@pytest.mark.parametrize(("name", "dtype"), [("normal", torch.float32), ("uniform", torch.bfloat16)])
def test_a_build_that_draws_otherwise_is_noticed(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another torch draws a word before each fill: the probe sees it, and the slow way has that build's own bits."""
    native = RandomOp.fill

    def other(self: RandomOp, out: torch.Tensor, generator: torch.Generator | None, parameter: object = None) -> object:
        torch.empty(1, dtype=torch.uint8).random_(generator=generator)
        return native(self, out, generator, parameter)  # type: ignore[arg-type]

    _cpu_engine._holds.cache_clear()
    monkeypatch.setattr(_cpu_engine, "_warned", set())
    monkeypatch.setattr(RandomOp, "fill", other)
    try:
        with pytest.warns(UserWarning, match="every rank generates the whole tensor") as caught:
            for _ in range(2):
                whole, expected = torch.empty(13, 7, dtype=dtype), torch.Generator().manual_seed(8)
                cases.OPS[name].fill(whole, expected)
                for placements, index in itertools.product(([Shard(0)], [Shard(1)], [RaggedShard()]), range(3)):
                    region = local_region((13, 7), placements, (3,), (index,))
                    local, generator = torch.empty(region.local_shape, dtype=dtype), torch.Generator().manual_seed(8)
                    fill_region(local, Fill(cases.OPS[name], region, (7, 1)), generator)
                    assert torch.equal(local, cases.part_of(whole, region))
                    assert torch.equal(generator.get_state(), expected.get_state())
        assert len(caught) == 1
    finally:
        _cpu_engine._holds.cache_clear()


@pytest.mark.parametrize("follows_last_block", [True, False])
def test_either_rule_of_half_normals_gives_the_bits_of_this_build(
    follows_last_block: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11 and 2.13 differ; a wrong guess costs a warning, never bits."""
    monkeypatch.setattr(_random_ops, "half_normal_tail_follows_last_block", lambda: follows_last_block)
    monkeypatch.setattr(_cpu_engine, "_warned", set())
    warnings.filterwarnings("ignore", message=".*every rank generates the whole tensor.*")
    whole = torch.empty(9, 5, dtype=torch.bfloat16).normal_(generator=torch.Generator().manual_seed(3))
    for index in range(2):
        region = local_region((9, 5), [Shard(0)], (2,), (index,))
        local = torch.empty(region.local_shape, dtype=torch.bfloat16)
        fill_region(local, Fill(RandomOp("normal_", (0.0, 1.0)), region, (5, 1)), torch.Generator().manual_seed(3))
        assert torch.equal(local, cases.part_of(whole, region))


def test_probes_refuse_a_wrong_rule() -> None:
    from vescale.rng._random_ops import NormalBlocks, NormalPairs, WordsPerElement

    tail_is_wrong = not _random_ops.half_normal_tail_follows_last_block()
    op = RandomOp("uniform_")
    assert _cpu_engine.rule_holds(op, torch.float32, WordsPerElement(1))
    assert not _cpu_engine.rule_holds(op, torch.float32, WordsPerElement(2))
    assert not _cpu_engine.rule_holds(RandomOp("normal_"), torch.float32, NormalBlocks(1, True))
    assert not _cpu_engine.rule_holds(RandomOp("normal_"), torch.bfloat16, NormalBlocks(1, tail_is_wrong))
    assert not _cpu_engine.rule_holds(RandomOp("log_normal_"), torch.float32, WordsPerElement(2))
    assert not _cpu_engine.rule_holds(op, torch.float32, NormalPairs(False))


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (RandomOp("normal_", (0.0, -1.0)), torch.float32),
        (RandomOp("uniform_", (2.0, 1.0)), torch.float32),
        (RandomOp("bernoulli_", (1.5,)), torch.float32),
        (RandomOp("random_", (5, 5)), torch.int64),
        (RandomOp("exponential_"), torch.int64),
        (RandomOp("exponential_"), torch.complex64),
    ],
)
def test_bad_arguments_raise_everywhere_and_draw_nothing(op: RandomOp, dtype: torch.dtype) -> None:
    """Also where the shard is empty: every rank raises what one device would raise."""
    for index in (0, 3):
        region = local_region((3, 2), [Shard(0)], (4,), (index,))
        generator = torch.Generator().manual_seed(7)
        before = generator.get_state()
        with pytest.raises((RuntimeError, NotImplementedError)):
            fill_region(torch.empty(region.local_shape, dtype=dtype), Fill(op, region, (2, 1)), generator)
        assert torch.equal(generator.get_state(), before)


def test_a_local_tensor_of_another_rank_is_refused() -> None:
    region = local_region((5, 2), [Shard(0)], (2,), (0,))
    with pytest.raises(ValueError, match="expected the same shapes"):
        fill_region(torch.empty(2, 2), Fill(RandomOp("normal_"), region, (2, 1)), torch.Generator())
