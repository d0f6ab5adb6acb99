"""Seconds of a step that `vescale.estimate` says, with the table of `vescale estimate --calibrate`, beside those of ranks.

    python -m benchmarks.step_time                      # calibrates, then runs six cases and ten plans on two gloo ranks
    python -m benchmarks.step_time --table here.yaml    # with a table that is there
    python -m benchmarks.step_time --json

Ranks run the cases in turns, some steps each, and the larger reference model of the calibration with them. Compared are:
a step by the clock, the least, which means something on an idle host only (the share of the time that a rank waited for a
processor is printed); processor seconds of a rank, all of its threads, the median step; and these as a share of the
reference's in the same round. On a busy host processor seconds of the same step differ by a third from minute to minute,
because others use the caches: the share cancels that, as a calibration at the same time would.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale import Plan, parallelize, plan_zoo
from vescale.comm import messages
from vescale.estimation import Device, calibrate, device_of, estimate, on_processors, references, zero_plan

RANKS = 2
_DECODER = {"vocab_size": 512, "max_position_embeddings": 256, "num_hidden_layers": 3, "num_attention_heads": 8}
_LLAMA = {**_DECODER, "hidden_size": 256, "intermediate_size": 768, "num_key_value_heads": 4}
_EXPERTS = {**_LLAMA, "hidden_size": 128, "intermediate_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2}
_GPT2 = {"vocab_size": 512, "n_embd": 256, "n_layer": 3, "n_head": 8, "n_positions": 256}


@dataclass(frozen=True)
class Case:
    """A model of transformers with a plan of the zoo."""

    model: str
    sizes: Mapping[str, Any]
    plan: str
    mesh: Mapping[str, int]
    batch: tuple[int, int] = (8, 128)
    zero: int | None = None
    policy: str | None = None
    stages: Mapping[str, Any] | None = None

    def build(self) -> nn.Module:
        import transformers

        config = getattr(transformers, self.model.split("LMHead")[0].split("For")[0].removesuffix("Model") + "Config")
        return getattr(transformers, self.model)._from_config(config(**self.sizes))  # type: ignore[no-any-return]

    def make_plan(self, mesh: Any) -> Plan:
        plan = plan_zoo.load(self.plan, mesh)
        blocks = r"transformer.h.\d+" if "GPT2" in self.model else r"model.layers.\d+"
        if self.zero is not None:
            plan = _zero(plan, self.zero, blocks, mesh)
        if self.policy is not None:
            plan.checkpoint(blocks, self.policy)
        return plan if self.stages is None else plan.pipeline(mesh="pp", **self.stages)

    def inputs(self) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 512, self.batch, generator=torch.Generator().manual_seed(1))
        return {"input_ids": ids, "labels": ids.clone()}


def _zero(plan: Plan, stage: int, blocks: str, mesh: Any) -> Plan:
    found = zero_plan(plan, ("dp",), stage, (blocks,))
    if isinstance(mesh, Mapping):
        return found
    real = Plan(mesh)
    for entry in found.entries:
        real.add(entry)
    return real


_REFERENCE = "reference"
_DP, _TP, _PP = {"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}, {"pp": 2, "dp": 1, "tp": 1}
_L = ("LlamaForCausalLM", _LLAMA)
_SPLIT = {"split_before": ["model.layers.2"], "microbatches": 4}
CASES = {
    "llama, dp": Case(*_L, "llama", _DP),
    "llama, tp": Case(*_L, "llama", _TP),
    "llama, ZeRO-3": Case(*_L, "llama_zero3", _DP),
    "llama, ZeRO-3, full checkpointing": Case(*_L, "llama_zero3", _DP, policy="full"),
    "gpt2, tp": Case("GPT2LMHeadModel", _GPT2, "gpt2", _TP),
    "mixtral, dp": Case("MixtralForCausalLM", _EXPERTS, "mixtral", _DP),
}
PLANS = {
    "dp": Case(*_L, "llama", _DP),
    "dp, full checkpointing": Case(*_L, "llama", _DP, policy="full"),
    "dp, selective checkpointing": Case(*_L, "llama", _DP, policy="selective"),
    "ZeRO-1": Case(*_L, "llama", _DP, zero=1),
    "ZeRO-2": Case(*_L, "llama", _DP, zero=2),
    "ZeRO-3": Case(*_L, "llama", _DP, zero=3),
    "tp": Case(*_L, "llama", _TP),
    "tp, full checkpointing": Case(*_L, "llama", _TP, policy="full"),
    "pp, 1F1B": Case(*_L, "llama", _PP, stages={**_SPLIT, "schedule": "1F1B"}),
    "pp, 1F1B, full checkpointing": Case(*_L, "llama", _PP, policy="full", stages={**_SPLIT, "schedule": "1F1B"}),
}


def run_rank(job: tuple[dict[str, Case], int, int], rank: int, send: Callable[[Any], None]) -> None:
    """All cases in turns, and the reference of calibrations; sends by name the rounds of steps (seconds, processor seconds,
    seconds without a processor)."""
    cases, rounds, steps = job
    calls = {_REFERENCE: references(RANKS)[1].step()}
    for name, case in cases.items():
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))
        model = parallelize(case.build(), case.make_plan(mesh))
        calls[name] = _step(model, torch.optim.AdamW(model.parameters(), lr=1e-3), case)
    found: dict[str, list[list[tuple[float, float, float]]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()  # the first one after another model finds caches cold
            found[name].append([_timed(call) for _ in range(steps)])
    send(("steps", found))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case) -> Callable[[], None]:
    inputs = case.inputs()

    def step() -> None:
        if case.stages is not None:
            model.step(**inputs, use_cache=False)  # type: ignore[operator]
        else:
            model(**inputs, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _timed(call: Callable[[], None]) -> tuple[float, float, float]:
    begin = time.perf_counter(), time.process_time(), _waited()
    call()
    return time.perf_counter() - begin[0], time.process_time() - begin[1], _waited() - begin[2]


def _waited() -> float:
    """Seconds that this thread was ready to run and had no processor; 0 where the system does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def measured(cases: dict[str, Case], rounds: int, steps: int) -> dict[str, dict[str, float]]:
    """By case, of the rank that takes longest: the least step by the clock, the median in processor seconds, and the median
    over rounds of what a step takes of the same round's steps of the reference."""
    of_ranks: dict[int, Any] = {}
    preload = ("vescale.estimation", "transformers.models.llama.modeling_llama")
    for rank, message in messages(run_rank, RANKS, (cases, rounds, steps), preload=preload, one_device=False):
        of_ranks[rank] = message[1]
    found = {}
    for name in cases:
        every = [[step for round_ in own[name] for step in round_] for own in of_ranks.values()]
        ratios = [
            [_median(case) / _median(reference) for case, reference in zip(own[name], own[_REFERENCE])]
            for own in of_ranks.values()
        ]
        found[name] = {
            "clock": max(min(step[0] for step in own) for own in every),
            "processor": max(_median(own) for own in every),
            "share": max(statistics.median(own) for own in ratios),
            "waited": sum(step[2] for own in every for step in own) / sum(step[0] for own in every for step in own),
        }
    return found


def _median(steps: list[tuple[float, float, float]]) -> float:
    return statistics.median(step[1] for step in steps)


def reference_seconds(table: Device) -> float:
    reference = references(RANKS)[1]
    found = estimate(reference.model(), reference.plan(), batch={"x": reference.shape}, device=on_processors(table))
    return found.step_seconds


def estimated(case: Case, table: Device) -> dict[str, float]:
    with torch.device("meta"):
        model = case.build()
    given = {"batch": case.inputs(), "optimizer": "adamw"}
    by_clock = estimate(model, case.make_plan(dict(case.mesh)), device=table, **given)
    on_host = estimate(model, case.make_plan(dict(case.mesh)), device=on_processors(table), **given)
    terms = {name: getattr(on_host.time, name) for name in ("compute", "memory", "exposed", "host", "bubble")}
    return {"clock": by_clock.step_seconds, "processor": on_host.step_seconds - on_host.time.bubble, **terms}


def pairs(rows: dict[str, dict[str, Any]], by: str) -> tuple[int, int]:
    """Of pairs whose measured times are at least 10 % apart: (in the right order, all)."""
    right = total = 0
    for one, other in itertools.combinations(rows.values(), 2):
        low, high = sorted((one, other), key=lambda row: row["measured"][by])
        if high["measured"][by] >= 1.1 * low["measured"][by]:
            total += 1
            right += low["estimated"][by] < high["estimated"][by]
    return right, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--table", help="a table of vescale estimate --calibrate; default: this machine is measured first"
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5, help="of a case in each round")
    parser.add_argument("--only-cases", action="store_true", help="without the ten plans whose order is compared")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = (
            device_of(args.table) if args.table else calibrate(os.path.join(folder, "here.yaml"), "cpu", ranks=RANKS)
        )
    plans = {} if args.only_cases else PLANS
    every = {**CASES, **plans}
    steps = measured(every, args.rounds, args.steps)
    reference = reference_seconds(table)
    rows = {}
    for name, case in every.items():
        said = estimated(case, table)
        rows[name] = {"estimated": {**said, "share": said["processor"] / reference}, "measured": steps[name]}
    kinds = ("share", "processor", "clock")
    orders = {by: pairs({name: rows[name] for name in plans}, by) for by in kinds}
    if args.json:
        print(json.dumps({"load": os.getloadavg(), "rows": rows, "orders": orders}, indent=1))
        return
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors; milliseconds, and shares of the reference\n")
    heads = " | ".join(f"{kind}: measured | estimated | " for kind in kinds)
    print(f"| case | {heads} | waited |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        cells = []
        for by in kinds:
            real, said, unit = row["measured"][by], row["estimated"][by], 1 if by == "share" else 1e3
            cells += [f"{unit * real:.2f}", f"{unit * said:.2f}", f"{said / real - 1:+.0%}"]
        print(f"| {name} | {' | '.join(cells)} | {row['measured']['waited']:.0%} |")
    for by, (right, total) in orders.items():
        if total:
            print(f"\n{by}: of {total} pairs of plans that are 10 % apart, {right} are in the right order")


if __name__ == "__main__":
    main()
