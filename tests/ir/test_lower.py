"""What ``lower`` emits: golden texts, determinism, and each kind of entry."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.ir.models import Mlp, build, llama
from vescale import lower, plan_zoo
from vescale.ir import Annotate, Factory, Hook, Local, Place, Program, Redistribute, Unit, Wrap
from vescale.placements import RaggedShard
from vescale.plans import BWD, FWD, INIT, RUN, Plan

GOLDEN = Path(__file__).parent / "golden"
LAYER = r"model\.layers\.\d+"


def tensor_parallel() -> Plan:
    """Megatron's: every block begins with a copy and ends with a sum."""
    plan = Plan({"tp": 2})
    plan.shard(rf"{LAYER}.self_attn.<in:hidden_states>", Replicate())
    plan.shard(rf"{LAYER}.self_attn.(q|k|v)_proj.weight", Shard(0))
    plan.shard(rf"{LAYER}.self_attn.o_proj.weight", Shard(1))
    plan.shard(rf"{LAYER}.self_attn.o_proj.<out>", Replicate())
    plan.shard(rf"{LAYER}.mlp.<in>", Replicate())
    plan.shard(rf"{LAYER}.mlp.(gate|up)_proj.weight", Shard(0))
    plan.shard(rf"{LAYER}.mlp.down_proj.weight", Shard(1))
    return plan.shard(rf"{LAYER}.mlp.down_proj.<out>", Replicate())


def zero_3() -> Plan:
    """Parameters ragged at rest, gathered layer by layer."""
    plan = Plan({"dp": 4}).shard("<in>", Shard(0))
    plan.shard(rf"{LAYER}..*", RaggedShard(), phase=INIT).shard(rf"{LAYER}..*", Replicate(), phase=RUN)
    return plan.unit(LAYER)


def zero_3_over_two_axes() -> Plan:
    """One cut over both axes of the batch; beside it, a tensor-parallel one."""
    plan = Plan({"dp": 2, "ep": 4, "tp": 2}).shard("<in>", Shard(0), mesh=("dp", "ep"))
    plan.shard(rf"{LAYER}.mlp.(gate|up)_proj.weight", Shard(0), mesh="tp")
    plan.shard(rf"{LAYER}.mlp.down_proj.weight", Shard(1), mesh="tp")
    plan.shard(rf"{LAYER}.mlp.down_proj.<out>", Replicate(), mesh="tp")
    for phase, placement in ((INIT, RaggedShard()), (RUN, Replicate())):
        plan.shard(".*", placement, mesh=("dp", "ep"), phase=phase)
    return plan


PLANS: dict[str, Callable[[], Plan]] = {
    "llama_tp": tensor_parallel,
    "llama_tp_sp_vocab": lambda: plan_zoo.load("llama", {"dp": 1, "tp": 2}),
    "llama_dp_tp_sp": lambda: plan_zoo.load("llama", {"dp": 2, "tp": 2}),
    "llama_zero_3": zero_3,
    "llama_zero_3_over_two_axes": zero_3_over_two_axes,
}


def text_of(name: str) -> str:
    program = lower(PLANS[name](), llama(2))
    return f"# {program.axes}\n{program.to_text()}"


@pytest.mark.parametrize("name", PLANS)
def test_golden_texts(name: str) -> None:
    """To accept a change: ``python -m tests.ir.test_lower``, then read the diff."""
    assert text_of(name) == (GOLDEN / f"{name}.txt").read_text()


def mixed() -> Plan:
    """An entry of every kind, for a model that needs no transformers."""
    plan = Plan({"dp": 2, "tp": 2}).shard("<in>", Shard(0), mesh="dp").shard("layers.*fc1.weight", Shard(0), mesh="tp")
    plan.shard(r"layers.\d.fc2.weight", {"dp": Shard(0), "tp": Shard(1)}, phase=INIT)
    plan.shard(r"layers.\d.fc2.weight", {"dp": Replicate(), "tp": Shard(1)}, phase=RUN).unit(r"layers.\d")
    plan.redistribute(r"layers.\d.fc1.<in>", Shard(0), Replicate(), mesh="tp").annotate(
        ".*bias.grad", Partial(), mesh="tp"
    )
    return plan.factory("layers.1", Shard(0), mesh="dp").local("layers.2.fc2", outputs={"tp": Partial()})


def test_meta_and_real_models_give_the_same_program_and_stay_as_they_are() -> None:
    plan = Plan({"tp": 2}).shard("fc1.weight", Shard(0)).shard("fc1.<out>", Replicate())
    real, meta = Mlp(), build("mlp")
    before = {name: value.clone() for name, value in real.state_dict().items()}
    assert lower(plan, real) == lower(plan, meta)
    assert all(torch.equal(value, before[name]) for name, value in real.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in real.modules())


def test_every_parameter_and_buffer_has_a_place() -> None:
    program = lower(Plan({"dp": 2, "tp": 2}).shard("fc1.weight", Shard(-1), mesh="tp"), Mlp())
    places = {f"{i.path}.{i.target}": i.op.placements for i in program if isinstance(i.op, Place)}
    whole = (Replicate(), Replicate())
    expected = dict.fromkeys(("fc1.bias", "fc2.weight", "fc2.bias", ".scale", ".step"), whole)
    assert places == {"fc1.weight": (Replicate(), Shard(1)), **expected}  # dims counted from the front


def ops(program: Program, path: str, hook: Hook, target: str) -> list[object]:
    return [i.op for i in program if (i.path, i.hook, i.target) == (path, hook, target)]


def test_a_parameter_that_runs_elsewhere_moves_before_the_forward() -> None:
    plan = Plan({"dp": 2}).shard("fc1.weight", Shard(0), phase=INIT).shard("fc1.weight", Shard(1), phase=RUN)
    program = lower(plan, Mlp())
    rest, run = (Shard(0),), (Shard(1),)
    assert ops(program, "fc1", Hook.INIT, "weight") == [Place(rest)]
    assert ops(program, "fc1", Hook.FORWARD_PRE, "weight") == [Redistribute(run, rest)]
    assert ops(program, "fc1", Hook.FORWARD_POST, "weight") == []  # the one at rest is shown again, which moves nothing
    assert ops(program, "fc2", Hook.FORWARD_PRE, "weight") == []


def test_only_the_running_placement_given_means_replicated_at_rest() -> None:
    program = lower(Plan({"tp": 2}).shard("fc1.weight", Shard(0), phase=RUN), Mlp())
    assert ops(program, "fc1", Hook.INIT, "weight") == [Place((Replicate(),))]
    assert ops(program, "fc1", Hook.FORWARD_PRE, "weight") == [Redistribute((Shard(0),), (Replicate(),))]


def test_units_gather_where_they_begin() -> None:
    plan = Plan({"dp": 2}).shard(r".*weight", Shard(0), phase=INIT).shard(r".*weight", Replicate(), phase=RUN)
    program = lower(plan.unit(r"layers\.\d+").unit(r"layers\.1\.fc1"), build("stack"))
    assert ops(program, "layers.0", Hook.INIT, "<self>") == [Unit(("fc1.weight", "fc2.weight"), ("dp",))]
    assert ops(program, "layers.1", Hook.INIT, "<self>") == [Unit(("fc2.weight",), ("dp",))]
    assert ops(program, "layers.1.fc1", Hook.INIT, "<self>") == [Unit(("weight",), ("dp",))]
    assert not any(i.hook is Hook.FORWARD_PRE and i.target.endswith("weight") for i in program)


def test_torchs_attention_reads_a_weight_of_a_child_that_it_never_calls() -> None:
    plan = Plan({"dp": 2}).shard(".*", Replicate(), phase=INIT).shard(".*", Shard(0), phase=RUN)
    program = lower(plan, build("attention"))
    assert len(ops(program, "attention", Hook.FORWARD_PRE, "out_proj.weight")) == 1
    assert len(ops(program, "attention", Hook.FORWARD_PRE, "in_proj_weight")) == 1
    assert ops(program, "attention.out_proj", Hook.FORWARD_PRE, "weight") == []


def test_a_shared_module_is_named_once() -> None:
    program = lower(Plan({"tp": 2}).shard("again.<out>", Replicate()), build("stack"))
    assert ops(program, "layers.0", Hook.FORWARD_POST, "<out>") == [Redistribute((Replicate(),))]
    assert not any(i.path.startswith("again") for i in program)


def test_a_tied_weight_moves_wherever_it_is_read() -> None:
    plan = Plan({"dp": 2}).shard("lm_head.weight", Shard(0), phase=INIT).shard("lm_head.weight", Shard(1), phase=RUN)
    program = lower(plan, llama(1, tied=True))
    assert len(ops(program, "model.embed_tokens", Hook.INIT, "weight")) == 1
    for path in ("model.embed_tokens", "lm_head"):
        assert len(ops(program, path, Hook.FORWARD_PRE, "weight")) == 1


def test_the_gradient_of_a_boundary() -> None:
    """Everything but an entry for the backward alone leaves it to the boundary rule."""
    for phase in (FWD, RUN, FWD | BWD | INIT):
        plan = Plan({"tp": 2}).shard("fc1.<in>", Replicate(), phase=phase)
        assert ops(lower(plan, Mlp()), "fc1", Hook.FORWARD_PRE, "<in>") == [Redistribute((Replicate(),))]
    plan = Plan({"tp": 2}).shard("fc1.<in>", Replicate()).shard("fc1.<in>", Shard(0), phase=BWD)
    expected = Redistribute((Replicate(),), grad_dst=(Shard(0),))
    assert ops(lower(plan, Mlp()), "fc1", Hook.FORWARD_PRE, "<in>") == [expected]


def test_redistribute_and_annotate() -> None:
    plan = Plan({"dp": 2, "tp": 2})
    plan.redistribute("fc1.<in>", Shard(1), Replicate(), grad_src=Partial(), grad_dst=Shard(1), mesh="tp")
    plan.shard("fc1.<in>", Shard(0), mesh="dp")
    plan.annotate("fc2.<out>", Partial(), mesh="tp").annotate("fc1.bias.grad", Partial(), mesh="tp")
    plan.annotate("fc2.bias", Shard(0), mesh="tp").shard("fc2.weight.grad", Replicate(), mesh="tp")
    program = lower(plan, Mlp())
    moved = Redistribute((Shard(0), Replicate()), (None, Shard(1)), (None, Partial()), (None, Shard(1)))
    assert ops(program, "fc1", Hook.FORWARD_PRE, "<in>") == [moved]
    assert ops(program, "fc2", Hook.FORWARD_POST, "<out>") == [Annotate((None, Partial()))]
    assert ops(program, "fc1", Hook.BACKWARD, "bias") == [Annotate((None, Partial()))]
    assert ops(program, "fc2", Hook.BACKWARD, "weight") == [Redistribute((None, Replicate()))]
    assert ops(program, "fc2", Hook.INIT, "bias") == [Annotate((Replicate(), Shard(0)))]  # given so, not placed


def indexed(program: Program, path: str = "") -> dict[object, object]:
    return {i.index: i.op for i in program if i.path == path and i.target == "<in>"}


def test_inputs_of_the_model() -> None:
    plan = Plan({"dp": 2, "tp": 2}).shard("<in:0>", Shard(0), mesh="dp", given="local")
    assert indexed(lower(plan, Mlp())) == {
        "x": Wrap((Shard(0), Replicate()), "local"),  # position 0 has a name
        None: Wrap((Replicate(), Replicate())),  # every other input
    }
    plan = Plan({"dp": 2, "tp": 2}).shard("<in>", Shard(0), mesh="dp").shard("<in:x>", Shard(1), mesh="tp")
    assert indexed(lower(plan, Mlp())) == {None: Wrap((Shard(0), Replicate())), "x": Wrap((Shard(0), Shard(1)))}


def test_an_input_of_the_model_that_is_moved_arrives_as_its_source() -> None:
    plan = Plan({"tp": 2}).redistribute("<in:x>", Shard(0), Replicate())
    found = [i.op for i in lower(plan, Mlp()) if i.index == "x"]
    assert found == [Wrap((Shard(0),)), Redistribute((Replicate(),), (Shard(0),))]
    plan = Plan({"tp": 2}).annotate("<in:x>", Shard(0))
    assert indexed(lower(plan, Mlp()))["x"] == Wrap((Shard(0),), "local")


def test_indexed_inputs_add_to_what_is_said_of_all() -> None:
    plan = Plan({"dp": 2, "tp": 2}).shard(r"layers.1.<in>", Shard(0), mesh="dp")
    plan.shard(r"layers.1.<in:shift>", Replicate(), mesh="tp")
    assert indexed(lower(plan, build("stack")), "layers.1") == {
        None: Redistribute((Shard(0), None)),
        "shift": Redistribute((Shard(0), Replicate())),
    }


def test_positions_of_a_variadic_forward_stay_positions() -> None:
    program = lower(Plan({"dp": 2}).shard("<in:1>", Shard(0)), build("stack"))
    assert indexed(program)[1] == Wrap((Shard(0),))


def test_regions() -> None:
    """A factory is inherited by what the forward calls, so it stands only where it changes."""
    plan = Plan({"dp": 2, "tp": 2}).factory(".*", Replicate(), mesh="tp").factory("layers.1", Shard(0), mesh="dp")
    plan.local("layers.2.fc1", inputs={"tp": Replicate()}, outputs={"dp": Shard(0), "tp": Partial()})
    program = lower(plan, build("stack"))
    factories = {i.path: i.op for i in program if isinstance(i.op, Factory)}
    assert factories == {"": Factory((Replicate(), Replicate())), "layers.1": Factory((Shard(0), Replicate()))}
    region = Local(None, None, (None, Replicate()), (Shard(0), Partial()))
    assert ops(program, "layers.2.fc1", Hook.FORWARD, "<self>") == [region]


def test_instructions_know_the_line_that_asked_for_them() -> None:
    plan = plan_zoo.load("llama", {"dp": 2, "tp": 2})
    program = lower(plan, llama(1))
    found = next(i for i in program if i.target == "<out>" and i.path == "model.norm")
    entry = next(entry for entry in plan.entries if entry.path.text == "model.norm.<out>")
    assert found.source == entry.source is not None
    assert next(i for i in program if i.path == "model.norm" and i.hook is Hook.INIT).source is None  # nobody asked


def test_instructions_stand_in_module_order_then_hook_order() -> None:
    program = lower(plan_zoo.load("llama", {"dp": 2, "tp": 2}), llama(2))
    modules = {name: number for number, (name, _) in enumerate(llama(2).named_modules())}
    hooks = list(Hook)
    keys = [(modules[i.path], hooks.index(i.hook)) for i in program]
    assert keys == sorted(keys)


def test_a_model_of_405_billion_parameters_lowers_quickly() -> None:
    """The figure is 5 seconds; processor time, because a loaded machine must not turn this red."""
    model = llama(
        126,
        hidden_size=16384,
        intermediate_size=53248,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    assert sum(p.numel() for p in model.parameters()) > 405e9
    start = time.process_time()
    program = lower(plan_zoo.load("llama", {"dp": 16, "tp": 8}), model)
    assert time.process_time() - start < 5
    assert len(program) > 126 * 9


if __name__ == "__main__":
    for each in PLANS:
        (GOLDEN / f"{each}.txt").write_text(text_of(each))
