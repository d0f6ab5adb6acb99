"""AdamW8bit on one device: against the reference on one page, torch's AdamW, torchao and bitsandbytes; its interface."""

from __future__ import annotations

import copy
import functools
import io
import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.optim.reference_adamw8bit import (
    ReferenceAdamW8bit,
    encode,
    flat_blocks,
    reference_map,
    row_blocks,
)
from vescale import csrc
from vescale.optim import AdamW8bit
from vescale.optim._adamw8bit_update import dequantize, dynamic_map, quantize
from vescale.optim._blocks import Part

FORMS = ["native", "fallback"]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "fallback":
        monkeypatch.setenv("VESCALE_NO_NATIVE", "1")
    elif csrc.load("adamw8bit") is None:
        pytest.skip("compares the C++ helper with the PyTorch ops, and it is not built: there is no compiler")
    return str(request.param)


def gradient(shape: Any, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Magnitudes over eight decades, rows of zeros."""
    return _gradient(tuple(shape), step).to(dtype, copy=True)


@functools.lru_cache(maxsize=512)
def _gradient(shape: tuple[int, ...], step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    found = torch.randn(shape, generator=generator) * 10 ** (-8 * torch.rand(shape, generator=generator))
    if found.ndim and found.shape[0] > 3:
        found[:2] = 0
    return found


def maps() -> tuple[Any, Any]:
    return dynamic_map(True).values.numpy(), dynamic_map(False).values.numpy()


def test_maps() -> None:
    for signed in (True, False):
        found = dynamic_map(signed).values.numpy()
        assert len(found) == 256 and (np.diff(found) > 0).all()
        np.testing.assert_allclose(found, reference_map(signed), rtol=2e-7)
    signed, unsigned = maps()
    assert signed[-1] == unsigned[-1] == 1 and unsigned[0] == 0 and abs(signed[0] + 0.99297) < 1e-5
    assert abs(signed[128] - 5.5e-7) < 1e-12 and abs(unsigned[1] - 3.25e-7) < 1e-12


@pytest.mark.parametrize("signed", [True, False])
def test_codes_of_every_kind_of_number(signed: bool) -> None:
    """Around all thresholds, zeros, subnormals; against the search of the reference."""
    found = dynamic_map(signed)
    near = torch.cat([found.thresholds, found.values])
    x = torch.cat([torch.nextafter(near, near + 1), torch.nextafter(near, near - 1), near, torch.randn(4096) / 5])
    x = torch.cat([x, torch.tensor([0.0, -0.0, 1e-45, 1.0])]).clamp(-1.0, 1.0)
    x = x if signed else x.abs()
    codes, largest = quantize(x, Part(1, 1, len(x), 1, len(x)), found)
    expected, top = encode(x.numpy(), found.values.numpy())
    assert largest.tolist() == [top]
    assert np.array_equal(codes.numpy(), expected)


def test_blocks_decode(form: str) -> None:
    for scale in (1e-42, 1e-30, 1.0, 1e38):
        part = Part(1, 1, 1000, 1, 256)
        x = (torch.rand(1000) * 2 - 1) * scale
        x[256:512] = 0
        codes, largest = quantize(x, part, dynamic_map(True))
        back = dequantize(codes, largest, part, dynamic_map(True))
        assert (back[256:512] == 0).all()
        assert (back - x).abs().max() <= 0.016 * scale


@pytest.mark.parametrize(
    "shape, block", [((5000,), None), ((70, 61), None), ((70, 61), (32, 48)), ((3, 50, 40), (16, 64))]
)
def test_the_reference(shape: tuple[int, ...], block: tuple[int, int] | None, form: str) -> None:
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(shape))
    blocks = flat_blocks(param.numel(), 256) if block is None else row_blocks(shape, *block)
    reference = ReferenceAdamW8bit(param.detach().numpy(), blocks, maps())
    optimizer = AdamW8bit([param], lr=1e-2, weight_decay=0.1, block=block)
    for step in range(20):
        param.grad = gradient(shape, step)
        optimizer.step()
        reference.step(param.grad.numpy(), 1e-2, decay=0.1)
    state = optimizer.state[param]
    assert np.array_equal(param.detach().numpy().reshape(-1), reference.param)
    for key, codes, largest in zip(("exp_avg", "exp_avg_sq"), reference.codes, reference.largest):
        assert state[key].dtype == torch.uint8 and state[key].shape == shape
        assert np.array_equal(state[key].numpy().reshape(-1), codes)
        assert np.array_equal(state[f"{key}_max"].numpy().reshape(-1), largest)
        expected = (
            (len(blocks),) if block is None else (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
        )
        assert state[f"{key}_max"].shape == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_parameters_follow_torch(dtype: torch.dtype, form: str) -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((), (1, 7), (63, 64))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizers = [AdamW8bit(ours, weight_decay=0.1), torch.optim.AdamW(theirs, weight_decay=0.1)]
    for step in range(20):
        for p, q in zip(ours, theirs):
            p.grad = gradient(p.shape, step, dtype)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(ours, theirs):
        assert optimizers[0].state[p]["exp_avg"].dtype == dtype
        torch.testing.assert_close(p, q, rtol=1e-6 if dtype == torch.float32 else 1e-12, atol=2e-7)


def test_both_forms_agree_on_other_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    if csrc.load("adamw8bit") is None:
        pytest.skip("compares the C++ helper with the PyTorch ops, and it is not built: there is no compiler")

    def run() -> list[torch.Tensor]:
        found = []
        variants: list[dict[str, Any]] = [
            {},
            {"stochastic_rounding": True},
            {"master_weights": False, "maximize": True},
            {"state_dtype": torch.bfloat16},
            {"block": (32, 48)},
        ]
        for options in variants:
            torch.manual_seed(0)
            params = [
                torch.nn.Parameter(torch.randn(s).to(d))
                for s in ((90, 70), (5,))
                for d in (torch.float32, torch.bfloat16)
            ]
            optimizer = AdamW8bit(params, lr=1e-2, **options)
            for step in range(5):
                for p in params:
                    p.grad = gradient(p.shape, step, p.dtype)
                optimizer.step()
            found += [p.detach() for p in params]
            found += [value for p in params for value in optimizer.state[p].values()]
        return found

    native = run()
    monkeypatch.setenv("VESCALE_NO_NATIVE", "1")
    fallback = run()
    assert len(native) == len(fallback) > 50
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(native, fallback))


def test_threads_do_not_show() -> None:
    def run(threads: int) -> torch.Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            torch.manual_seed(0)
            p = torch.nn.Parameter(torch.randn(1_000_003))
            optimizer = AdamW8bit([p])
            for step in range(2):
                p.grad = gradient(p.shape, step)
                optimizer.step()
            return p.detach()
        finally:
            torch.set_num_threads(before)

    assert torch.equal(run(1), run(3))


@pytest.mark.parametrize("signed", [True, False])
def test_codes_of_torchao(signed: bool) -> None:
    """Their format: the same map, nearest value, scale max(|x|) at least 1e-12."""
    theirs = pytest.importorskip("torchao.optim.quant_utils", reason="torchao is not installed")
    qmap = torch.tensor(theirs.create_dynamic_map(signed))
    x = torch.randn(256 * 500) * 10 ** (-6 * torch.rand(256 * 500))
    x = x if signed else x.square()
    assert torch.equal(qmap, dynamic_map(signed).values)
    scaled, scale = theirs.scale_tensor(x, 256)
    codes, largest = quantize(x, Part(1, 1, len(x), 1, 256), dynamic_map(signed))
    assert torch.equal(scale.view(-1), largest)
    assert torch.equal(theirs.quantize_8bit_with_qmap(scaled.view(-1), qmap), codes)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_of_bitsandbytes(signed: bool) -> None:
    theirs = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    code = theirs.create_dynamic_map(signed)
    assert torch.equal(code, dynamic_map(signed).values)
    x = torch.randn(256 * 500 + 9) * 10 ** (-6 * torch.rand(256 * 500 + 9))
    x = x if signed else x.square()
    part = Part(1, 1, len(x), 1, 256)
    codes, largest = quantize(x, part, dynamic_map(signed))
    theirs_codes, state = theirs.quantize_blockwise(x, code=code, blocksize=256)
    assert torch.equal(state.absmax, largest)
    # Their CPU kernel looks codes up in a coarse table: where it finds another one, that is farther from x.
    each = largest.repeat_interleave(256)[: len(x)]
    scaled = x / each
    assert ((code[codes.int()] - scaled).abs() <= (code[theirs_codes.int()] - scaled).abs()).all()
    # Their definition for other devices: times 1 / absmax, the middles between values.
    nearest = torch.bucketize(x * (1.0 / each), (code[:-1] + code[1:]) / 2)
    assert (nearest != codes).sum() <= 20 and (nearest - codes.int()).abs().max() <= 1
    back = theirs.dequantize_blockwise(codes, state)
    assert torch.equal(back, dequantize(codes, largest, part, dynamic_map(signed)))


def test_state_bytes() -> None:
    p = torch.nn.Parameter(torch.zeros(1_000_000))
    state = AdamW8bit([p]).state[p]
    assert sum(value.nbytes for value in state.values()) <= 2.05 * p.numel()


def test_bfloat16_parameters_have_masters(form: str) -> None:
    """Small updates are not lost, and a parameter changed from outside is not changed back."""
    p = torch.nn.Parameter(torch.ones(5000, dtype=torch.bfloat16))
    q = torch.nn.Parameter(torch.ones(5000))
    optimizers = AdamW8bit([p], lr=1e-4), AdamW8bit([q], lr=1e-4)
    for step in range(30):
        q.grad = gradient(p.shape, step).bfloat16().float()
        p.grad = q.grad.bfloat16()
        for optimizer in optimizers:
            optimizer.step()
    assert optimizers[0].state[p]["master"].dtype == torch.float32
    assert torch.equal(optimizers[0].state[p]["master"], q)
    assert torch.equal(p, q.bfloat16())
    with torch.no_grad():
        p[:10] = 7.0
    optimizers[0].step()
    assert (p[:10] - 7.0).abs().max() < 0.1


def test_stochastic_rounding(form: str) -> None:
    """The mean of what is rounded is what was to be rounded; repeated runs have the same bits."""

    def run(**options: Any) -> torch.Tensor:
        p = torch.nn.Parameter(torch.ones(40_000, dtype=torch.bfloat16))
        optimizer = AdamW8bit([p], lr=1e-4, weight_decay=0.0, stochastic_rounding=True, **options)
        for _ in range(10):
            p.grad = torch.ones_like(p)
            optimizer.step()
        assert "master" not in optimizer.state[p]
        return p.detach()

    found = run()
    assert abs(float(found.double().mean()) - (1 - 10e-4)) < 3e-5
    assert torch.equal(found, run()) and not torch.equal(found, run(seed=1))


def test_nan_and_inf(form: str) -> None:
    """Without skip_nonfinite they come through, in the blocks that have one; with it nothing changes."""
    p = torch.nn.Parameter(torch.randn(5000))
    optimizer = AdamW8bit([p])
    p.grad = gradient(p.shape, 0)
    p.grad[300], p.grad[600] = math.nan, math.inf
    optimizer.step()
    state = optimizer.state[p]
    assert p.isnan().nonzero().flatten().tolist() == [300, 600]
    assert not state["exp_avg_max"].isfinite()[1:3].any() and state["exp_avg_max"].isfinite().sum() == 18
    assert (state["exp_avg"][256:768] == 127).all()

    q = torch.nn.Parameter(torch.randn(5000))
    other = torch.nn.Parameter(torch.randn(3))
    optimizer = AdamW8bit([q, other], skip_nonfinite=True)
    other.grad, q.grad = torch.ones(3), torch.ones(5000)
    optimizer.step()
    before = copy.deepcopy([q, other, optimizer.state_dict()])
    q.grad[17] = math.inf
    optimizer.step()
    after = [q, other, optimizer.state_dict()]
    assert_same(before, after)
    q.grad = torch.ones(5000)
    optimizer.step()
    assert not torch.equal(before[0], q)


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(found, torch.Tensor):
        assert torch.equal(found, expected) and found.dtype == expected.dtype
    elif isinstance(found, dict):
        assert list(found) == list(expected)
        for key in found:
            assert_same(found[key], expected[key])
    elif isinstance(found, list | tuple):
        assert len(found) == len(expected)
        for a, b in zip(found, expected):
            assert_same(a, b)
    else:
        assert found == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_dict_keeps_dtypes(dtype: torch.dtype, form: str) -> None:
    def fresh() -> tuple[list[torch.nn.Parameter], AdamW8bit]:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in ((90, 60), (6,))]
        return params, AdamW8bit([{"params": params[:1], "lr": 1e-2}, {"params": params[1:]}])

    def steps(params: list[torch.nn.Parameter], optimizer: AdamW8bit, numbers: range) -> None:
        for step in numbers:
            for p in params:
                p.grad = gradient(p.shape, step, dtype)
            optimizer.step()

    params, optimizer = fresh()
    steps(params, optimizer, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others, resumed = fresh()
    with torch.no_grad():
        for p, q in zip(params, others):
            q.copy_(p)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    steps(params, optimizer, range(3, 6))
    steps(others, resumed, range(3, 6))
    assert_same([p.detach() for p in params], [p.detach() for p in others])
    assert_same(optimizer.state_dict(), resumed.state_dict())
    assert resumed.state[others[0]]["exp_avg"].dtype == torch.uint8
    assert resumed.state[others[0]]["exp_avg_max"].dtype == torch.float32
    clone = copy.deepcopy(resumed)
    assert_same(clone.state_dict(), resumed.state_dict())


def test_loading_hooks_and_errors() -> None:
    p = torch.nn.Parameter(torch.randn(5000))
    optimizer = AdamW8bit([("w", p)])
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda o, d: seen.append("pre"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[p]["exp_avg"].dtype))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["pre", torch.uint8]
    q = torch.nn.Parameter(torch.randn(5000))
    q.grad = torch.ones(5000)
    stock = torch.optim.AdamW([q])
    stock.step()
    before = optimizer.state[p]["exp_avg"]
    with pytest.raises(ValueError, match=r"exp_avg_max.* for parameter w"):
        optimizer.load_state_dict(stock.state_dict())
    assert optimizer.state[p]["exp_avg"] is before
    other = AdamW8bit([q], block_size=128)
    saved = other.state_dict()
    for group in saved["param_groups"]:
        group["block_size"] = 256
    with pytest.raises(ValueError, match=r"exp_avg_max.*of w.*shape \(40,\).*shape \(20,\)"):
        optimizer.load_state_dict(saved)


def test_interface() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(80, 80), torch.nn.Linear(80, 1))
    model[1].bias.requires_grad_(False)
    optimizer = AdamW8bit(model.named_parameters(), lr=torch.tensor(1e-2))
    assert set(optimizer.state) == {model[0].weight, model[0].bias, model[1].weight}
    scheduler = torch.optim.lr_scheduler.StepLR(AdamW8bit(model.parameters(), lr=1e-2), 1, 0.1)
    assert scheduler.get_last_lr() == [1e-2]
    x = torch.randn(32, 80)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x[:, :1]).square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    versions = model[0].weight._version
    for _ in range(30):
        returned = optimizer.step(closure)
    assert returned.item() == losses[-1] < 0.2 * losses[0]
    assert model[0].weight._version > versions
    frozen = model[1].bias.clone()
    assert torch.equal(frozen, model[1].bias)
    model[1].bias.requires_grad_()
    optimizer.step(closure)
    assert not torch.equal(frozen, model[1].bias) and model[1].bias in optimizer.state
    late = torch.nn.Parameter(torch.randn(64, 64))
    optimizer.add_param_group({"params": [("late", late)], "lr": 0.1})
    assert optimizer.state[late]["exp_avg"].dtype == torch.uint8
    model[0].weight.grad = None
    before = copy.deepcopy(optimizer.state[model[0].weight]), model[0].weight.detach().clone()
    optimizer.step()
    assert_same(before, (optimizer.state[model[0].weight], model[0].weight.detach()))


def test_tied_and_strided_parameters(form: str) -> None:
    torch.manual_seed(0)
    base = torch.randn(70, 80)
    straight = torch.nn.Parameter(base.clone())
    turned = torch.nn.Parameter(base.t().contiguous().t())
    assert not turned.is_contiguous()
    optimizers = AdamW8bit([straight]), AdamW8bit([turned])
    for step in range(3):
        straight.grad = gradient(base.shape, step)
        turned.grad = straight.grad.t().contiguous().t()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(straight, turned) and not turned.is_contiguous()
    model = torch.nn.ModuleList([torch.nn.Embedding(80, 64), torch.nn.Linear(64, 80, bias=False)])
    model[1].weight = model[0].weight
    assert len(AdamW8bit(model.parameters()).param_groups[0]["params"]) == 1


def test_capturable_scalars() -> None:
    """Numbers on the device give the bits of numbers on the host."""
    torch.manual_seed(0)
    p, q = (torch.nn.Parameter(x.clone()) for x in [torch.randn(5000)] * 2)
    lr = torch.tensor(1e-2, dtype=torch.float64)
    optimizers = AdamW8bit([p], lr=1e-2), AdamW8bit([q], lr=lr, capturable=True)
    for step in range(5):
        p.grad = gradient(p.shape, step)
        q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        if step == 2:
            lr.mul_(0.5)
            optimizers[0].param_groups[0]["lr"] = 5e-3
    assert torch.equal(p, q)
    assert torch.equal(optimizers[0].state[p]["exp_avg"], optimizers[1].state[q]["exp_avg"])


@pytest.mark.parametrize(
    "options, text",
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] is 1.0"),
        ({"eps": -1e-8}, "eps is -1e-08"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block": 3}, "block is 3"),
        ({"block": (32,)}, r"block is \(32,\)"),
        ({"state_dtype": torch.int8}, "state_dtype is int8"),
        ({"stochastic_rounding": True, "master_weights": True}, "exclude each other"),
        ({"skip_nonfinite": True, "capturable": True}, "decides on the host"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        AdamW8bit([torch.nn.Parameter(torch.zeros(2))], **options)


def test_parameters_that_cannot_be_updated() -> None:
    with pytest.raises(ValueError, match=r"parameter c is torch.complex64"):
        AdamW8bit([("c", torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64)))])
    with pytest.raises(ValueError, match="stochastic rounding needs bfloat16 parameters"):
        AdamW8bit([torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))], stochastic_rounding=True)
    embedding = torch.nn.Embedding(100, 64, sparse=True)
    optimizer = AdamW8bit(embedding.named_parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="weight has a sparse gradient"):
        optimizer.step()
