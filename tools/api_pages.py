"""The API reference: a Markdown page for each topic, from signatures and docstrings.

A hook of mkdocs (``hooks`` in mkdocs.yml), which adds the pages to the site. ``python tools/api_pages.py DIR`` writes them
as files.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import itertools
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

__all__ = ["PAGES", "TOPICS", "described", "members", "on_files", "page", "parameters", "public"]

# Pages of the reference, by topic: file, title, and what programs import, in their order. These names are ``__all__`` of
# their packages; a package without ``__all__`` is private, and changes without notice.
TOPICS: dict[str, tuple[str, list[str]]] = {
    "plans": (
        "Plans and parallelize",
        [
            "vescale: parallelize Plan Phase init_mesh no_sync report lower Program new_plan shard_batch unchecked",
            "vescale: implicit_communication deferred_init materialize PlanError PlanMismatchError",
            "vescale: ImplicitCommunicationError ImplicitCommunicationWarning InputMismatchError StepMismatchError",
            "vescale: ReplacedParameterError",
            "vescale.plan_zoo: names load about About path_of",
            "vescale.plans: ATTENTION_METHODS PIPELINE_SCHEDULES placement_text parse_placement MissingMeshError",
            "vescale.plans: HfImportWarning",
            "vescale.ir: check coverage example_inputs Finding LoweringError",
            "vescale.runtime: preflight MissingValuesWarning",
        ],
    ),
    "fsdp": (
        "FSDP",
        [
            "vescale: fully_shard FSDPModule UnshardHandle register_fsdp_forward_method share_comm_ctx",
            "vescale.fsdp: MixedPrecisionPolicy CPUOffloadPolicy OffloadPolicy report ResidencyError",
        ],
    ),
    "optimizers": (
        "Optimizers and gradients",
        [
            "vescale.optim: clip_grad_norm_ clip_grads_with_norm_ get_total_norm AdamW8bit adamw8bit_layout EMA Muon",
            "vescale.optim: muon_groups muon_layout Shampoo SOAP report OptimizerReport ParameterReport",
            "vescale: GradientReducer",
            "vescale.runtime: gradient_reducer finish_gradients",
        ],
    ),
    "checkpoints": (
        "Checkpoints",
        [
            "vescale.checkpoint: Checkpointer save load load_hf export_hf verify open_stored read_tensors Stored",
            "vescale.checkpoint: CheckpointError CheckpointWarning",
        ],
    ),
    "data": (
        "Data and random numbers",
        [
            "vescale: ShardedBatchSampler",
            "vescale.rng: SampleSeeds enable disable is_enabled rand randn randint materialize_tensor is_deferred",
            "vescale.rng: DeferredValueError",
        ],
    ),
    "pipelines": (
        "Pipelines",
        ["vescale.pipeline: PipelineModule make_schedule measure_costs schedule_page partition Cut StagedProgram"],
    ),
    "static": (
        "Static mode",
        [
            "vescale.static: report StaticReport Fallback program RecordedProgram RecordedStep RecordedSite RecordedType",
        ],
    ),
    "debugging": (
        "Debugging",
        [
            "vescale.debug: monitor Monitor StepRecord flops_per_token comm_trace CommTrace assert_comms CommBudgetError",
            "vescale.debug: verify Verification hang_report on_exception dispatch_stats HostProfile profile_host",
            "vescale.debug: compare_estimate",
            "vescale: breakpoint",
        ],
    ),
    "estimate": (
        "Estimate, search and simulate",
        [
            "vescale: estimate search",
            "vescale.estimation: Estimate Device Efficiency Comparison RankMemory StepTime calibrate device_names",
            "vescale.estimation: zero_table page EstimateWarning predict Prediction",
            "vescale.plan_search: Search Proposal Choice Figures Rejected",
            "vescale.simulation: simulate Simulation Finding RankRecord Collective",
        ],
    ),
    "placements": (
        "Placements and buffers",
        [
            "vescale: RaggedShard StridedRaggedShard InterleavedShard",
            "vescale.placements: FlattenedShard distribute_tensor from_local to_local full_tensor redistribute",
            "vescale.placements: normalize_placements",
            "vescale: DBuffer Layout plan_layout",
            "vescale.buffer: TensorGroup PendingBuffer GranularityTable Rows Tile Elements FFN_WEIGHTS",
            "vescale.buffer: BufferMismatchError",
        ],
    ),
    "integrations": (
        "Other libraries' training loops",
        ["vescale.integrations: MeshTrainer MeshStrategy hide_ranks stay_on_device"],
    ),
    "advanced": (
        "Ops, collectives, changes of PyTorch",
        [
            "vescale.ops: register_rule Decision OpCall strict_placements PlacementFallbackError",
            "vescale.ops: PlacementFallbackWarning entries families",
            "vescale.comm: record_comms Ledger CommRecord join_axes",
            "vescale.compat: install uninstall patch_states self_check UnsupportedTorchError",
        ],
    ),
}


def listed(topic: str) -> Iterator[tuple[str, str]]:
    """(package, name) on one page, in its order."""
    for line in TOPICS[topic][1]:
        package, _, names = line.partition(": ")
        yield from ((package, name) for name in names.split())


# package -> names that have a place in the reference. ``vescale.checkpoint`` and others are pages of their own.
PAGES: dict[str, list[str]] = {}
for _topic in TOPICS:
    for _package, _name in listed(_topic):
        PAGES.setdefault(_package, []).append(_name)

# Classes whose objects programs are given, and do not make.
RESULTS = {
    "CommTrace",
    "Comparison",
    "Cut",
    "FSDPModule",
    "Layout",
    "Ledger",
    "Monitor",
    "OptimizerReport",
    "PendingBuffer",
}
RESULTS |= {"MeshTrainer", "Choice", "Figures", "Proposal", "Rejected", "Search"}
RESULTS |= {"PipelineModule", "Program", "StepRecord", "StepTime", "UnshardHandle", "Verification", "About", "OpCall"}
# Methods that vescale calls, and programs do not.
CALLED_INSIDE = {
    "cell",
    "decay",
    "ended",
    "gaps",
    "index",
    "loaded_state",
    "slices",
    "started",
    "waits",
    "resolve",
    "run",
}

_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields|Example|Examples):\s*$")
_ITEM = re.compile(r"^ {4}(\*{0,2}`{0,2}[\w. ,*`]+?`{0,2})(?: \([^)]*\))?: +(\S.*)$|^ {4}(\*{0,2}[\w, ]+):$")


def public() -> Iterator[tuple[str, str, Any]]:
    """(package, name, object) of everything that has a place in the reference."""
    for topic in TOPICS:
        for package, name in listed(topic):
            yield package, name, getattr(importlib.import_module(package), name)


def members(cls: type) -> Iterator[tuple[str, Callable[..., Any] | property]]:
    """Public methods and properties that a class of vescale defines, or inherits from another one of vescale."""
    met: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("vescale"):
            continue
        for name, value in vars(base).items():
            function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if name.startswith("_") or name in met | CALLED_INSIDE or getattr(function, "__isabstractmethod__", False):
                continue
            if inspect.isfunction(function) or isinstance(function, property):
                met.add(name)
                if not _same_in_torch(cls, name):
                    yield name, function


def _same_in_torch(cls: type, name: str) -> bool:
    """Methods that replace one of PyTorch's, which PyTorch documents: those of an optimizer, a module, FSDP2's modules."""
    return any(name in vars(base) for base in cls.__mro__ if base.__module__.startswith("torch."))


def parameters(value: Any) -> list[str]:
    """Names of what a call takes, without those of a private meaning."""
    if isinstance(value, type) and (value.__name__ in RESULTS or issubclass(value, enum.Enum | Warning | Exception)):
        return []
    try:
        found = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return []
    return [name for name in found if name not in ("self", "cls") and not name.startswith("_")]


def described(value: Any, owner: type | None = None) -> set[str]:
    """Names that the docstrings of ``value``, and of its class, explain: in a section, below a field, or quoted."""
    texts = [_doc(value)]
    if isinstance(value, type):
        texts += [_doc(value.__init__)]
    if owner is not None:
        texts += [_doc(owner)]
    found: set[str] = set()
    for text in texts:
        for line in text.splitlines():
            if item := _ITEM.match(line):
                found |= set(re.findall(r"\w+", item[1] or item[3] or ""))
        found |= {name for quoted in re.findall(r"``([^`]+)``", text) for name in re.findall(r"\w+", quoted)}
    if isinstance(value, type):
        found |= set(_field_docs(value))
    return found


def _doc(value: Any) -> str:
    text = inspect.getdoc(value) or ""
    # What Python and dataclasses write themselves explains nothing.
    return "" if text.startswith(("Initialize self", getattr(value, "__name__", "?") + "(")) else text


def _field_docs(cls: type) -> dict[str, str]:
    """The strings below the fields of a class."""
    found: dict[str, str] = {}
    for base in cls.__mro__[:-1]:
        try:
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, ValueError, SyntaxError):
            continue
        body = getattr(node, "body", [])
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found.setdefault(ast.unparse(field.target), inspect.cleandoc(str(text.value.value)))
    return found


def markdown(text: str) -> str:
    """A docstring's reStructuredText as Markdown."""
    lines: list[str] = []
    literal = table = in_items = False
    parts = re.split(r"(^```.*?^```$)", inspect.cleandoc(text), flags=re.DOTALL | re.MULTILINE)
    for index in range(0, len(parts), 2):  # outside of blocks
        parts[index] = re.sub(r"``([^`]+)``", lambda quoted: f"`{' '.join(quoted[1].split())}`", parts[index])
    text = "".join(parts)
    fenced = False
    for line in text.splitlines():
        if fenced or line.startswith("```"):
            fenced ^= line.startswith("```")
            lines.append(line)
            continue
        if re.fullmatch(r"=+( +=+)+", line):  # a table: as it stands
            if not table:
                lines += ["", "```text"]
                table = True
            lines.append(line)
            continue
        if table and not line.strip():
            lines += ["```", ""]
            table = False
        if table:
            lines.append(line)
            continue
        if literal and line.strip() and not line.startswith(" "):
            literal = False
        if section := _SECTION.match(line):
            lines += ["", f"**{section[1]}**", ""]
            in_items = section[1] in ("Args", "Attributes", "Raises")
            continue
        if not literal and in_items and (item := _ITEM.match(line)):
            names = (item[1] or item[3]).replace("`", "").replace("*", r"\*")
            lines.append(f"- `{names}`: {_inline(item[2] or '')}".replace(r"`\*", r"`*").replace(r"*\*", "**"))
            continue
        if line.rstrip().endswith("::"):
            literal = True
            line = line.rstrip()[:-1]
        lines.append(line if literal and line.startswith(" ") else _inline(line.strip() if not in_items else line))
    if table:
        lines += ["```"]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _inline(line: str) -> str:
    line = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", line)
    parts = re.split(r"(`[^`]+`)", re.sub(r"``([^`]+)``", r"`\1`", line))
    for index, part in enumerate(parts):
        if not part.startswith("`"):
            parts[index] = part.replace("<", "&lt;").replace("*", r"\*").replace("[", r"\[")
    return "".join(parts)


def signature_text(name: str, value: Any) -> str:
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    shown = []
    for parameter in found.parameters.values():
        if parameter.name in ("self", "cls") or parameter.name.startswith("_"):
            continue
        text = str(parameter.replace(annotation=inspect.Parameter.empty, default=inspect.Parameter.empty))
        if parameter.annotation is not inspect.Parameter.empty:
            text += f": {_type_text(parameter.annotation)}"
        if parameter.default is not inspect.Parameter.empty:
            text += f" = {parameter.default!r}"
        text = re.sub(r"<.*? at 0x[0-9a-f]+>|<(class|function) '?[^>]*>", "...", text)
        shown.append((parameter.kind, text))
    texts = []
    starred = False
    for kind, text in shown:
        if kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            texts.append("*")
            starred = True
        starred |= kind is inspect.Parameter.VAR_POSITIONAL
        texts.append(text)
    ending = found.return_annotation
    after = "" if ending is inspect.Signature.empty or isinstance(value, type) else f" -> {_type_text(ending)}"
    one = f"{name}({', '.join(texts)}){after}"
    if len(one) <= 100:
        return one
    return f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + f"){after}"


def _type_text(annotation: Any) -> str:
    return annotation.strip("'") if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _entry(name: str, value: Any, level: int, owner: type | None = None) -> str:
    full = f"{owner.__name__}.{name}" if owner else name
    parts = [f"{'#' * level} `{full}`"]
    if isinstance(value, property):
        return "\n\n".join([*parts, markdown(_doc(value))])
    if not callable(value):
        shown = ", ".join(map(str, value)) if isinstance(value, list | tuple | set | frozenset | dict) else repr(value)
        kind = type(value).__name__
        return "\n\n".join([*parts, f"A `{kind}`: `{shown}`" if len(shown) < 400 else f"A `{kind}`."])
    is_shown = not isinstance(value, type) or bool(parameters(value))
    if is_shown:
        parts.append(f"```python\n{signature_text(full, value)}\n```")
    parts.append(markdown(_doc(value)))
    if isinstance(value, type):
        if value.__init__ is not object.__init__ and not issubclass(value, BaseException):
            parts.append(markdown(_doc(value.__init__)))
        fields = {field: text for field, text in _field_docs(value).items() if not field.startswith("_")}
        parts.append("\n".join(f"- `{field}`: {_inline(' '.join(text.split()))}" for field, text in fields.items()))
        parts += [_entry(inner, member, level + 1, value) for inner, member in members(value)]
    return "\n\n".join(part for part in parts if part)


def page(topic: str) -> str:
    """The reference of one topic; headings say from where names are imported, if not from vescale."""
    parts = [f"# {TOPICS[topic][0]}"]
    last = ""
    for package, name in listed(topic):
        if package != last:
            parts += [f"Import from `{package}`:"]
            last = package
        parts.append(_entry(name, getattr(importlib.import_module(package), name), 2))
    return "\n\n".join(parts) + "\n"


def on_config(config: Any) -> Any:
    """mkdocs asks for its settings: the addresses that pyproject.toml has."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    config["repo_url"], config["site_url"] = urls["Source"], urls["Documentation"]
    config["repo_name"] = urls["Source"].rpartition("/")[2]
    return config


def on_files(files: Any, config: Any) -> Any:
    """mkdocs asks for the pages of the site."""
    from mkdocs.structure.files import File

    for topic in TOPICS:
        files.append(File.generated(config, f"api/{topic}.md", content=page(topic)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """mkdocs has read a page: those for contributors are not searched."""
    if page.file.src_uri.startswith("internals/"):
        page.meta["search"] = {"exclude": True}
    return markdown


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python tools/api_pages.py FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for topic in TOPICS:
        (folder / f"{topic}.md").write_text(page(topic))
