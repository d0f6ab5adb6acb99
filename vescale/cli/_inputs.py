"""The inputs of commands: a plan (file or zoo name), a mesh, and a model built on the meta device."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vescale.cli._console import working
from vescale.cli._main import UsageError
from vescale.errors import kind_of

if TYPE_CHECKING:
    from torch import nn

    from vescale.plans import MeshAxes, Plan


# ``config_file``: the ``config.json`` that the text of ``--model`` names, a file, a folder or a repository of the Hub.


CONFIG_HELP = "a config.json of transformers or diffusers, the folder of one, or hf:OWNER/NAME on the Hugging Face Hub"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # OWNER/NAME


def config_file(text: str) -> Path | None:
    """The file that ``text`` names, or None if ``text`` is not a configuration of Hugging Face.

    ``hf:`` in front is needed for a repository of the Hub only. Its ``config.json`` is read from the local cache of
    ``huggingface_hub``, or downloaded (``HF_HUB_OFFLINE=1`` forbids it).

    Raises:
        UsageError: ``hf:`` is in front, and there is no such file, folder or repository.
    """
    name = text.removeprefix("hf:")
    path = Path(name)
    if path.is_dir() and (path / "config.json").is_file():
        return path / "config.json"
    if text == name:
        return path if path.suffix == ".json" and _is_configuration(path) else None
    if path.exists() and not path.is_dir():
        return path
    if path.is_dir():
        raise UsageError(f"{text}: the folder has no config.json; pass {CONFIG_HELP}")
    if _REPOSITORY.fullmatch(name) and path.suffix != ".json":
        return _of_hub(text, name)
    raise UsageError(f"{text}: no such file or directory; pass {CONFIG_HELP}")


def _is_configuration(path: Path) -> bool:
    """Whether a JSON file has what the configurations of transformers or of diffusers have."""
    try:
        data = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except ValueError:
        return False
    return isinstance(data, dict) and bool({"model_type", "_class_name"} & data.keys())


def _of_hub(text: str, name: str) -> Path:
    try:
        from transformers.utils import cached_file
    except ImportError:
        raise UsageError(
            f"{text}: loading a configuration from the Hub needs transformers; pip install 'vescale-plan[hf]'"
        ) from None
    try:
        found = cached_file(name, "config.json")
    except OSError as error:  # no such file here or on the Hub, no access, no network
        reason = " ".join(str(error).split())
        raise UsageError(f"{text}: the file was not found on the Hub: {reason}; pass {CONFIG_HELP}") from error
    assert found is not None  # a missing file raises by default
    return Path(found)


PLAN_HELP = "a YAML file, or the name of a plan of the zoo (see `vescale zoo`)"
MODEL_HELP = f"{CONFIG_HELP}; or pkg.module:factory (or file.py:factory), a class or function that returns a module"


def add_mesh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mesh", metavar="AXES", help="sizes of the mesh's axes, as dp=2,tp=4; default: the plan's own"
    )


def add_inputs(
    parser: argparse.ArgumentParser, batch: int | None = 8, seq: int | None = 128, default: str = "default: 8"
) -> None:
    """Add the options that :func:`inputs_of` and :func:`batch_of` read. ``batch``, ``seq``: where none is given; None: the
    command finds the batch, as the text ``default`` says, or asks for it."""
    parser.add_argument(
        "--batch", type=_positive, default=batch, metavar="N", help=f"rows of the global batch ({default})"
    )
    default = f"default: {seq}" if seq is not None else "needed for models that take input_ids"
    parser.add_argument("--seq", type=_positive, default=seq, metavar="N", help=f"length of a row ({default})")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=SHAPE[:DTYPE]",
        help="global shape and dtype of an input of the model, such as x=8x16:bfloat16, in place of --batch and "
        "--seq; may be repeated",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def parse_mesh(text: str | None) -> MeshAxes | None:
    """``dp=2,tp=4``, or None for the plan's own sizes."""
    from vescale.plans import MeshAxes

    try:
        return MeshAxes.parse(text) if text is not None else None
    except ValueError as error:
        raise UsageError(f"--mesh {text}: {error}") from None


def load_plan(text: str, mesh: MeshAxes | None) -> Plan:
    """The plan in a file, or of that name in the zoo.

    Raises PlanError for an invalid plan, UsageError if there is no such plan.
    """
    from vescale import plan_zoo
    from vescale.plans import MissingMeshError, Plan, did_you_mean

    file = Path(text)
    if not file.is_file() and text in plan_zoo.names():
        file = plan_zoo.path_of(text)
    if file.is_file():
        try:
            return Plan.from_yaml(file, mesh)
        except MissingMeshError:
            raise UsageError(
                f"the plan {text} does not fix the sizes of its mesh; pass --mesh, such as dp=2,tp=4"
            ) from None
    if Path(text).suffix in (".yaml", ".yml") or os.sep in text:
        raise UsageError(f"there is no file {text!r}; pass a YAML file, or a plan of the zoo: {_zoo()}")
    raise UsageError(
        f"{text!r} is neither a file nor a plan of the zoo ({_zoo()}){did_you_mean(text, plan_zoo.names())}"
    )


def _zoo() -> str:
    from vescale import plan_zoo

    return ", ".join(plan_zoo.names())


def load_model(text: str, device: str = "meta") -> nn.Module:
    """Build the model that ``text`` names, by default on the meta device: names and shapes, no memory. Raises UsageError."""
    with working(f"building {text}"):
        import torch

        from vescale.cli._without_fills import WithoutFills

        with torch.device(device), WithoutFills():
            file = config_file(text)
            return _from_config(file) if file is not None else _from_factory(text)


def _from_config(file: Path) -> nn.Module:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--model {file}: {error.strerror}; pass the path of a config.json") from None
    except ValueError as error:
        raise UsageError(f"--model {file}: not JSON: {error}") from None
    if not isinstance(data, dict) or not {"model_type", "_class_name"} & data.keys():
        raise UsageError(
            f"--model {file}: it has neither the model_type of transformers nor the _class_name of diffusers; pass "
            "the config.json of a Hugging Face model"
        )
    return _of_transformers(file, data) if "model_type" in data else _of_diffusers(file, data)


def _of_diffusers(file: Path, data: dict[str, Any]) -> nn.Module:
    try:
        import diffusers
    except ImportError:
        raise UsageError(
            f"--model {file}: a configuration of diffusers needs diffusers; pip install 'vescale-plan[diffusers]'"
        ) from None
    known: Any = getattr(diffusers, str(data["_class_name"]), None)
    if known is None or not hasattr(known, "from_config"):
        raise UsageError(f"--model {file}: diffusers has no model {data['_class_name']}")
    try:
        model: nn.Module = known.from_config(data)
    except Exception as error:
        raise UsageError(f"--model {file}: {type(error).__name__}: {error}") from error
    return model


def _of_transformers(file: Path, data: dict[str, Any]) -> nn.Module:
    try:
        import transformers
    except ImportError:
        raise UsageError(
            f"--model {file}: a configuration of transformers needs transformers; pip install 'vescale-plan[hf]'"
        ) from None
    auto = transformers.models.auto
    kinds = auto.configuration_auto.CONFIG_MAPPING_NAMES
    if data["model_type"] not in kinds:
        close = difflib.get_close_matches(str(data["model_type"]), kinds, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UsageError(
            f"--model {file}: transformers {transformers.__version__} has no model_type {data['model_type']!r}{hint}"
        )
    settings = {key: value for key, value in data.items() if key not in ("auto_map", "quantization_config")}
    try:
        config = transformers.AutoConfig.for_model(**settings)
        names = config.architectures or []
        known: Any = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
        if known is not None:
            return known(config)
        is_causal = type(config) in auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
        return (transformers.AutoModelForCausalLM if is_causal else transformers.AutoModel).from_config(config)
    except Exception as error:  # whatever a constructor raises on sizes that do not go together
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"--model {file}: transformers cannot build this model: {reason}") from error


def _from_factory(text: str) -> nn.Module:
    from torch import nn

    module_name, colon, name = text.partition(":")
    if not colon or not module_name or not name:
        raise UsageError(f"--model {text}: expected {MODEL_HELP}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory: Any = _from_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    except FileNotFoundError:
        raise UsageError(f"--model {text}: there is no file {module_name!r}") from None
    except ModuleNotFoundError as error:
        raise UsageError(f"--model {text}: {error}; modules are also searched for in {os.getcwd()}") from None
    except Exception as error:
        raise UsageError(f"--model {text}: importing {module_name} raised {type(error).__name__}: {error}") from error
    for part in name.split("."):
        if not hasattr(factory, part):
            raise UsageError(f"--model {text}: {module_name} has no {name}")
        factory = getattr(factory, part)
    if not callable(factory) or isinstance(factory, nn.Module):
        raise UsageError(f"--model {text}: {name} is {kind_of(factory)}; pass the name of a class or a function")
    try:
        model = factory()
    except Exception as error:
        raise UsageError(f"--model {text}: calling {name}() raised {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {text}: {name}() returned {kind_of(model)}, not a torch.nn.Module")
    return model


def _from_file(file: str) -> Any:
    """The module in a Python file, with the file's folder among those that modules are looked for in."""
    path = Path(file).resolve()
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    spec = importlib.util.spec_from_file_location(path.stem if known is None else f"_{path.stem}_of_user", path)
    assert spec is not None and spec.loader is not None
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inputs_of(model: nn.Module, args: argparse.Namespace) -> dict[str, Any]:
    """Meta tensors with which the forward is traced: those of ``--input``, or those that a model of transformers takes."""
    import inspect

    import torch

    from vescale.ir import hf_inputs

    names = inspect.signature(model.forward).parameters
    found = given_inputs(args)
    if not found and hasattr(model, "config"):
        found = hf_inputs(model, args.batch, args.seq)
    elif not found and "input_ids" in names:
        tokens = torch.empty(args.batch, args.seq, dtype=torch.int64, device="meta")
        found = {name: tokens for name in ("input_ids", "labels") if name in names}
    if found and "use_cache" in names:
        found["use_cache"] = False
    return found


def batch_of(model: nn.Module, args: argparse.Namespace) -> dict[str, Any]:
    """The batch of an estimate, of a size that the command was given."""
    import inspect

    if args.input:
        return given_inputs(args)
    has_tokens = "input_ids" in inspect.signature(model.forward).parameters
    if args.batch is None or (has_tokens and args.seq is None):
        raise UsageError(
            "the size of the batch is missing; pass --batch 8 --seq 4096, or shapes, such as --input x=8x16"
        )
    if has_tokens:
        return {"input_ids": (args.batch, args.seq)}
    args.seq = args.seq or 128
    found = inputs_of(model, args)
    if not found:
        raise UsageError("the model takes no input_ids; pass the shapes of its inputs, such as --input x=8x16")
    return found


def given_inputs(args: argparse.Namespace) -> dict[str, Any]:
    """Meta tensors of ``--input``."""
    return dict(_parse_input(text) for text in args.input)


def _parse_input(text: str) -> tuple[str, Any]:
    import torch

    from vescale.ir import dtype_of_input

    name, _, rest = text.partition("=")
    shape, _, dtype_name = rest.partition(":")
    sizes = shape.split("x")
    if not name.isidentifier() or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise UsageError(f"--input {text}: write NAME=SHAPE[:DTYPE], such as input_ids=8x4096 or x=8x16:bfloat16")
    dtype = parse_dtype(dtype_name) if dtype_name else dtype_of_input(name)
    return name, torch.empty([int(size) for size in sizes], dtype=dtype, device="meta")


def parse_dtype(name: str) -> Any:
    """A dtype by its name in torch."""
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"{name!r} is not a dtype; write bfloat16, float32 or int64")
    return found


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number; write shapes as --input NAME=SHAPE")
    return int(text)
