"""The kinds of mistakes: their codes, and the edit that repairs a mistake of each. docs/errors.md is made of them."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """What mistakes have in common that end with one code."""

    title: str
    edit: str


KINDS: dict[str, Kind] = {
    "VS0001": Kind(
        "An argument, an environment variable or a missing package",
        "Pass a value or type that the message lists, set the variable to one of them or unset it, or install the "
        "package.",
    ),
    "VS0100": Kind(
        "An entry of a plan",
        "Correct the line with which the message begins: an axis of the mesh, a phase (`INIT`, `FWD`, `BWD`, `RUN`, "
        "`ALL`), or arguments that exclude each other. The axes of a mesh have names and sizes, as in `dp=2,tp=2`.",
    ),
    "VS0101": Kind(
        "A path of a plan",
        "Use a name from `model.named_parameters()`, or a regular expression without nested repetitions that "
        "matches such names, followed by `<in>`, `<in:name>`, `<out>` or `.grad` if the entry is not for the "
        "parameter itself.",
    ),
    "VS0120": Kind(
        "A plan in a file",
        "Correct the file at the line and column in the message. Plans have no duplicate keys, tags or aliases; "
        "files that they include are in their folder. `vescale zoo show llama` prints an example. Lower a program in "
        "JSON again.",
    ),
    "VS0130": Kind(
        "A plan that is derived from a model",
        "Use a plan that `vescale zoo` lists, `vescale plan new` with inputs on which the forward runs (`--input "
        "x=8x16`), or write the entries that the message names.",
    ),
    "VS0200": Kind(
        "A plan that does not fit the model",
        "Correct the entries in the message. `vescale lint PLAN --model MODEL` shows all mistakes with their "
        "[rules](plans.md#errors-and-warnings).",
    ),
    "VS0201": Kind(
        "Ranks with different models, plans or buffers",
        "Build the same model (seed, parameters, dtypes, `requires_grad`) and plan, and call the same functions, "
        "on every rank.",
    ),
    "VS0202": Kind(
        "Communication that no entry of the plan asks for",
        "Add the entry that the message proposes, or leave out `strict=True`.",
    ),
    "VS0204": Kind(
        "A call of parallelize, or of a function for parallelized models",
        "Parallelize a new model once, on the mesh of the plan, and pass the model that `parallelize` returned. If "
        "you pass an optimizer, it must hold parameters of the model, with states of their shapes.",
    ),
    "VS0207": Kind(
        "Parameters or buffers without values",
        "Build the model under `vescale.deferred_init()`, load it with `vescale.checkpoint.load_hf`, or call "
        "`to_empty` and initialize it.",
    ),
    "VS0209": Kind(
        "Another library's tool on a parallelized model",
        "Use the alternative that the message names, such as `model.state_dict()`, `vescale.checkpoint` or "
        "`torch.autograd.functional`.",
    ),
    "VS0212": Kind(
        "A rank that has failed, ended or not arrived",
        "Find the error of that rank: in the message, or in the output of the rank. Call the function in the message "
        "on all ranks. With `torchrun --max-restarts`, set `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` on every host.",
    ),
    "VS0222": Kind(
        "The recomputation of a checkpointed module",
        "Modify a copy of the input (`x = x.clone()`), keep state in attributes of the module, or exclude the "
        "module from the plan's `checkpoint` entries.",
    ),
    "VS0223": Kind(
        "Parameters that were replaced, or added too late",
        "Create the optimizer, hooks and new modules after `parallelize` or `fully_shard`, or pass the optimizer: "
        "`parallelize(model, plan, optimizer=optimizer)`. To change values, use `load_state_dict`.",
    ),
    "VS0301": Kind(
        "Ranks at different steps",
        "Make the same calls in the same order on all ranks.",
    ),
    "VS0302": Kind(
        "Ranks with different values",
        'Pass the same values on all ranks. If each rank has its own part of the batch, write `given="local"` in '
        "the plan, and use `ShardedBatchSampler`; if every rank has the global batch, leave it out.",
    ),
    "VS0401": Kind(
        "A placement that does not fit the tensor or the mesh",
        "Pass one placement for each axis of the mesh, with dims that the tensor has; the message has the shape and "
        "the possible numbers. Write `R`, `S(0)`, `P(sum)` or `Ragged(...)` in text. Convert partial values, and "
        "values on another mesh, to `R` or by `full_tensor()` first.",
    ),
    "VS0407": Kind(
        "A value of one rank used as the whole",
        "Save with `vescale.checkpoint.save` on all ranks; read a value by `x.full_tensor()` or `x.item()` on all "
        "ranks; or add `<out>: R` to the plan.",
    ),
    "VS0502": Kind(
        "Layouts and buffers",
        "Compute sizes and offsets with `plan_layout`, reserve all buffers before `allocate()`, and gather, reduce "
        "or shard a buffer on the axes in the message first. A block size needs as many dims as its tensor.",
    ),
    "VS0603": Kind(
        "A call of fully_shard, or of a module that it has sharded",
        "Pass each module once, modules that share a parameter together, and ordinary parameters with a shape. "
        "Call methods in the order that the message states. For a parallelized model, shard the parameters by the "
        "plan.",
    ),
    "VS0703": Kind(
        "The reduction of gradients",
        "Reach the same parameters on all ranks, with dense gradients; run one backward of a model at a time; "
        "register hooks between steps; use several reducers in the same order on all ranks.",
    ),
    "VS0802": Kind(
        "An option or a state of an optimizer",
        "Use an option that the message lists, floating-point parameters with values, gradients on all ranks, and "
        "states of the same optimizer. Leave `ema.swap()` before `update()`.",
    ),
    "VS0804": Kind(
        "Blocks or matrices that rank boundaries divide",
        "Use `orig_param_policy=adamw8bit_layout()` or `muon_layout(model)`, `RaggedShard(block=...)` in a plan, "
        "or a group with a smaller `block_size`.",
    ),
    "VS0900": Kind(
        "A checkpoint",
        "The message names the file or tensor. `vescale ckpt ls` lists complete steps; `vescale ckpt verify` checks "
        "all files.",
    ),
    "VS0904": Kind(
        "A file that is damaged, unsafe or of an unknown format",
        "Use another step or copy, or the version that wrote it. If you trust a pickle, load it with "
        "`torch.load(weights_only=False)` in a separate process, and save it as safetensors.",
    ),
    "VS0908": Kind(
        "A checkpoint that does not fit what it is loaded into",
        "Build the same model and optimizer as were saved, or pass `strict=False` and check what was not loaded.",
    ),
    "VS0914": Kind(
        "A save that did not succeed",
        "Correct the cause in the message: space, permissions, a value that cannot be saved, another job that saves "
        "to the folder, ranks that did not call `save`. Earlier complete steps are unchanged.",
    ),
    "VS1001": Kind(
        "A model, a loss or a schedule that cannot run in stages",
        "Begin stages at modules that the forward calls in order, such as decoder blocks. Pass labels to `.step()`, "
        "or a function `loss=f(out, batch) -> (sum, count)`. Use the numbers of stages, ranks and micro-batches in "
        "the message.",
    ),
    "VS1006": Kind(
        "A call of a model with stages",
        "Call `.step(**batch)` or `.evaluate(**batch)`, with tensors whose dim 0 is divisible by the number of "
        "micro-batches.",
    ),
    "VS1008": Kind(
        "Rows of a micro-batch that depend on each other",
        "Compute what the message names before the step, and pass the result in the batch; or use `microbatches=1` "
        "with GPipe, "
        '`rows="microbatch"`, or a normalization of individual rows.',
    ),
    "VS1101": Kind(
        "A step of static mode",
        'Let the first step do what later steps do, with the same outputs in the loss; or use `mode="eager"`.',
    ),
    "VS1104": Kind(
        "C++ helpers that are missing",
        "Run the command in the message, unset the variable that it names, or continue without the helpers "
        "(`VESCALE_NO_NATIVE=1`; static mode needs them).",
    ),
    "VS1201": Kind(
        "Deferred initialization",
        "Read values, and register hooks, after `materialize()`; pass a mesh together with placements.",
    ),
    "VS1202": Kind(
        "Random numbers and samplers",
        "Use an [op that is supported](rng.md#ops), on a tensor that is not partial, with a `torch.Generator` of its "
        "device. A sampler needs axes of the mesh, and a batch with at least one row for each rank.",
    ),
    "VS1401": Kind(
        "More communication than a test allows",
        "Change the entry that the message names, or the allowed number.",
    ),
    "VS1502": Kind(
        "Estimates, searches, simulations and verify",
        "Pass a model that has not been parallelized, shapes on which its forward runs on one device, and names that "
        "the message lists.",
    ),
    "VS1601": Kind(
        "An op without a rule for these placements",
        "Redistribute the operand before the call.",
    ),
    "VS1603": Kind(
        "A rule for an op",
        "Register a function of an `OpCall` for op overloads, which returns a `Decision` with one placement for "
        "each mesh axis.",
    ),
    "VS1604": Kind(
        "An op that is not possible with these placements",
        "Redistribute the operand that the message names, or use the op that it proposes. `parameter.data` takes a "
        "global tensor or a DTensor.",
    ),
    "VS1605": Kind(
        "Labels or indices out of bounds",
        "Check the tokenizer and the size of the vocabulary, or the labels and the number of classes (`ignore_index`).",
    ),
    "VS1607": Kind(
        "Ordinary tensors together with DTensors",
        "Use the parameter inside the module's forward, or write `x.detach()`. Convert labels of this rank with the "
        "line in the message.",
    ),
    "VS1701": Kind(
        "The installed PyTorch or CUDA",
        "Install a version in the range of the message. `VESCALE_ALLOW_TORCH=1` continues with another version, "
        "untested. If a kernel is refused, report it with the output of `vescale env`.",
    ),
}
