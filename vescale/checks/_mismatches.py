"""Errors of ranks that do or give different things, and their texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vescale.agreement import first_difference
from vescale.errors import Coded


class StepMismatchError(Coded, RuntimeError, code="VS0301"):
    """Ranks are about to do different things, or some do not come; ``ranks``: those that differ from most, or are absent."""

    def __init__(self, problem: str, ranks: Sequence[int]) -> None:
        super().__init__(problem)
        self.ranks = tuple(ranks)


class InputMismatchError(StepMismatchError, code="VS0302"):
    """Ranks pass different values where all of them must pass the same."""


SEED = "seed and state of the default generator"
NUMBERS = ("state of numpy.random", "state of Python's random")
"""Of generators that have no seed to ask for."""
USED = "calls of the forward"
"""What the model has computed where ranks may have drawn from these."""
MADE = "made: "
"""What names of tensors begin with that a forward has made of numbers, arrays or texts."""
WRITTEN_GATHERED = "written while it was gathered: "
"""What names of parameters begin with that a forward has written to."""
DRAWN = "drawn: "
"""What names of random ops on DTensors begin with, outside of forwards."""
COMPUTED = "before backward: "
"""What names of ops begin with that a script has run between a model and a backward."""
WRITTEN = "writes: "
"""What names of gradients and writes begin with, of tensors of which each rank may hold a part of its own."""
UNKNOWN = "unknown"
"""What a rank says of what it cannot tell, as where a mode would see it look; names that begin so are not compared."""
STEPPED = "optimizer: "
"""What names of steps of optimizers begin with."""
PARTS = "parts of sharded tensors"
"""Of a state dict that comes from a file."""
GENERATING = ", in generate()"
"""What modes of forwards end with that ``generate`` of the model makes."""
STATE = "state: "
"""What names of parameters begin with."""
SAME_STEPS = (
    "Every rank must make the same calls in the same order, also during evaluation (no `if rank == 0:` around a call "
    "of the model, its backward, or a read of a value that is sharded over ranks), and must process the same number "
    "of batches"
)
SEVERAL_THREADS = (
    ". Several threads of this process run forwards on equal meshes, and their order differs between ranks: run them "
    "on one thread, or in an order that is the same on every rank"
)


def places_text(
    places: Mapping[int, str], advice: str, sites: Mapping[int, str] | None = None
) -> tuple[str, Sequence[int]]:
    """Of ranks that are at different ``places``: a sentence, and the ranks that are elsewhere than most. ``sites``: what
    tells whether two places are the same."""
    texts = "; ".join(f"rank {rank} is before {place}" for rank, place in list(places.items())[:16])
    difference = first_difference("", {rank: [("", site)] for rank, site in (sites or places).items()})
    return f"ranks run different steps: {texts}. {advice}", difference.ranks


def compare_data(
    found: Sequence[dict[str, Any]], ranks: Sequence[int], coordinates: Sequence[tuple[int, ...]]
) -> list[Mapping[int, Any]] | None:
    """Compare what ranks give. Where their parts have different sizes, the shape of each part by position of the rank.

    Raises InputMismatchError.
    """
    inputs = {rank: [tuple(row) for row in each["inputs"]] for rank, each in zip(ranks, found)}
    unknown = tuple({name for rows in inputs.values() for name, text in rows if text == UNKNOWN})
    if unknown:
        inputs = {rank: [row for row in rows if not row[0].startswith(unknown)] for rank, rows in inputs.items()}
    inputs = _without_unused_draws(inputs)
    if len({tuple(rows) for rows in inputs.values()}) > 1:
        difference = first_difference("what is given", inputs)
        raise InputMismatchError(_data_text(found[0]["site"], difference), difference.ranks)
    names = {tuple(part[0] for part in each["parts"]) for each in found}
    if len(names) > 1:
        rows = {r: [(part[0], "given") for part in e["parts"]] for r, e in zip(ranks, found)}
        difference = first_difference("what is given", rows)
        raise InputMismatchError(_data_text(found[0]["site"], difference), difference.ranks)
    for number, (name, _, _, axes) in enumerate(found[0]["parts"]):
        groups: dict[tuple[int, ...], dict[int, list[tuple[str, str]]]] = {}
        for rank, coordinate, each in zip(ranks, coordinates, found):
            key = tuple(coordinate[axis] for axis in axes)
            if (text := each["parts"][number][2]) != UNKNOWN:
                groups.setdefault(key, {})[rank] = [(name, text)]
        for group in groups.values():
            if len({tuple(rows) for rows in group.values()}) > 1:
                difference = first_difference("what is given", group)
                raise InputMismatchError(_data_text(found[0]["site"], difference, local=True), difference.ranks)
    shapes: list[Mapping[int, Any]] = [
        {index: tuple(each["parts"][number][1]) for index, each in enumerate(found)}
        for number in range(len(found[0]["parts"]))
    ]
    return shapes if any(len(set(each.values())) > 1 for each in shapes) else None


def _without_unused_draws(inputs: dict[int, list[tuple[str, str]]]) -> dict[int, list[tuple[str, str]]]:
    """Without the states of generators that ranks have drawn from, where all have computed the same all the same."""
    calls = {tuple(text for name, text in rows if name == USED) for rows in inputs.values()}
    left_out = {USED, *NUMBERS} if len(calls) == 1 and all(calls) else {USED}
    return {rank: [row for row in rows if row[0] not in left_out] for rank, rows in inputs.items()}


def uneven_text(found: Sequence[dict[str, Any]], ranks: Sequence[int]) -> str:
    first = {rank: {part[0]: part[1] for part in each["parts"]} for rank, each in zip(ranks, found)}
    return (
        f'the parts of inputs that are passed with given="local" have different sizes in {found[0]["site"]}: '
        f"{first}; ranks on devices take sizes for equal if they were so in the first forwards. Pass equal parts "
        "(drop_last=True), pass the global batch, or set VESCALE_CHECK=steps"
    )


def parts_text(site: str, found: str) -> str:
    """Of a state dict with parts that other ranks have written."""
    return (
        f"{site} got the {PARTS} that another rank has written: {found}. torch.save writes one rank's part of each "
        "tensor, so that a file has the parts of a single rank"
        ". Save with vescale.checkpoint.save on all ranks (the result loads on any mesh), or save whole values:"
        ' `state = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for '
        "name, x in "
        "model.state_dict().items()}` on all ranks, then torch.save(state, ...) on one"
    )


def _data_text(site: str, difference: Any, *, local: bool = False) -> str:
    name = f"the input {difference.name!r}" if difference.name else "an input"
    found = " and ".join(
        f"{text} on {f'rank {ranks[0]}' if len(ranks) == 1 else f'ranks {list(ranks)}'}"
        for text, ranks in difference.found
    )
    if difference.name.startswith(COMPUTED):
        return (
            f"ranks have computed different losses before {site}: {difference.name.removeprefix(COMPUTED)} is "
            f"{found}. The loss of a parallelized model is the global one, the same on every rank, as on one device: "
            "compute it by the same ops from the same numbers on every rank (no `if rank == 0:` around a term; no "
            "number that each rank counts for itself, such as the tokens of its own rows: count those of the global "
            "batch), and select the same rows. If numbers differ on purpose: `with vescale.unchecked():`"
        )
    if difference.name.startswith(WRITTEN_GATHERED):
        return (
            f"ranks have written different values to parameter {difference.name.removeprefix(WRITTEN_GATHERED)!r} in "
            f"the forward before {site}: it is {found}. A parameter that is gathered for a forward is the same on "
            "every rank, and whatever is written to it must be the same, too. Write values that depend on a rank's "
            "own data (nn.Embedding(max_norm=)) outside of the forward, from the values of all ranks; or leave the "
            "parameter out of the group (ignored_params)"
        )
    if difference.name.startswith(WRITTEN):
        return (
            f"ranks have changed the model differently before {site}: {difference.name.removeprefix(WRITTEN)} is "
            f"{found}. The script writes to a parameter, or calls zero_grad(), on some ranks only, where a single "
            "device would change the whole model: do the same on every rank (no `if rank == 0:` around it). If "
            "values differ on purpose: `with vescale.unchecked():`"
        )
    if difference.name.startswith(STEPPED):
        return (
            f"ranks have stepped optimizers differently before {site}: {difference.name.removeprefix(STEPPED)} is "
            f"{found}. Each rank updates its part of what one device would update: create the optimizer with the same "
            "hyperparameters and schedulers, and call step() the same number of times, with the same gradients, on "
            "every rank (no `if rank == 0:` around them). If hyperparameters differ on purpose: `with "
            "vescale.unchecked():`"
        )
    if difference.name == PARTS:
        return parts_text(site, found)
    if difference.name.startswith(STATE):
        return (
            f"ranks have different values of {difference.name.removeprefix(STATE)} before {site}, although they hold "
            f"the same part of it: it is {found}. The script has changed it on some ranks only: a write or an "
            "initialization under `if rank == 0:`, a different learning rate, requires_grad or hyperparameter. Do "
            "the same on every rank; to load values from one file or rank, call load_state_dict on all ranks. If "
            "values differ on purpose: `with vescale.unchecked():`"
        )
    if difference.name.startswith(DRAWN):
        return (
            f"ranks have drawn different random numbers before {site}: {difference.name.removeprefix(DRAWN)} is from "
            f"{found}. Each rank draws its part of what one device would draw, so that all ranks must start from the "
            "same seed and make the same draws in the same order: call torch.manual_seed with the same seed on every "
            "rank before an initialization (and seed every generator= in the same way), with no `if rank == 0:` "
            "around it. If they differ on purpose: `with vescale.unchecked():`"
        )
    if difference.name.startswith(MADE):
        return (
            f"ranks have created different values in the forward before {site}: {difference.name.removeprefix(MADE)} "
            f"is {found}. What a model creates from numbers, arrays or texts must be the same on every rank, as on one "
            "device: pass the same texts and arrays on all ranks, and seed random and numpy.random in the same way; "
            "or pass each rank's own part as an input of the plan, "
            'plan.shard("<in:name>", Shard(0), mesh="dp", given="local"). If values differ on purpose: '
            "`with vescale.unchecked():`"
        )
    if difference.name in NUMBERS:
        return (
            f"ranks have drawn different random numbers in the forward before {site}: the {difference.name} was "
            f"{found}, and the forward has drawn from it. Call random.seed and numpy.random.seed with the same seed "
            "on every rank, and draw numbers that differ by rank (augmentation) from separate generators, "
            "random.Random(seed) and numpy.random.default_rng(seed)"
        )
    if difference.name == SEED:
        return (
            f"ranks have drawn different random numbers in the forward before {site}: the {SEED} is {found}. Ops of "
            "the model draw from it as on one device: call torch.manual_seed with the same seed on every rank, and "
            "draw numbers that differ by rank (augmentation, a sample on rank 0) from a separate torch.Generator"
        )
    if GENERATING in site:
        return (
            f"ranks disagree about {name} of {site}: it is {found}. generate() takes the prompts of all ranks, even "
            'if the plan has given="local", and returns the tokens of all: pass the same prompts and options on '
            "every rank, and call torch.manual_seed with the same seed before it samples."
            " If prompts differ by rank, gather them first "
            "(torch.distributed.all_gather_object), and select this rank's rows of the result"
        )
    if local:
        return (
            f"ranks disagree about {name} of {site}, although they have the same part of it: {found}. Ranks that "
            "differ only on other axes must pass the same part: use vescale.ShardedBatchSampler(dataset, batch_size, "
            "mesh, axes), or name all axes over which the data differ in the plan's entry. If they differ on "
            "purpose: `with vescale.unchecked():`"
        )
    return (
        f"ranks disagree about {name} of {site}: it is {found}. A plain value is global: the same on every rank. If "
        "each rank has its own part of the batch (a DistributedSampler), write that in the plan, "
        'plan.shard("<in:name>", Shard(0), mesh="dp", given="local"), and draw the parts with '
        "vescale.ShardedBatchSampler; or seed the sampler in the same way on every rank"
        ". If values differ on purpose: `with vescale.unchecked():`"
    )
