"""The modules whose forward is computed again in backward, as ``vescale explain`` shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from vescale.ir import Program


def checkpoint_rows(program: Program) -> list[dict[str, Any]]:
    """A row for each module, repeated layers merged: what it saves, whether collectives in it run again, its budget."""
    from vescale.ir import Checkpoint, merge_repeats

    found = ((i.path, i.op) for i in program if isinstance(i.op, Checkpoint))
    return [
        {
            "module": path,
            "policy": op.policy.text(),
            "communication": _communication(op.policy.kind, op.policy.recompute_communication),
            "budget_gib": op.budget_gib,
            "modules": count,
        }
        for path, op, count in merge_repeats(found)
    ]


def _communication(kind: str, again: bool) -> str:
    return "as without" if kind == "offload" else "again" if again else "results saved"


def print_checkpoints(console: Console, program: Program) -> None:
    from vescale.cli._console import new_table

    rows = checkpoint_rows(program)
    if not rows:
        console.print("none: each forward saves what its backward needs")
        return
    table = new_table("module", "saved for backward", "communication", "budget", "modules", right=("budget", "modules"))
    for row in rows:
        saved = {"full": "inputs", "offload": "everything, on the host"}.get(row["policy"], f"inputs, {row['policy']}")
        budget = "" if row["budget_gib"] is None else f"{row['budget_gib']:g} GiB"
        table.add_row(row["module"], saved, row["communication"], budget, str(row["modules"]))
    console.print(table)
    if any(row["budget_gib"] is not None for row in rows):
        console.print(
            "modules with a budget save more where it allows that: decided after the first step, vescale.report(model)"
        )
