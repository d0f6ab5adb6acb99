"""``config_file``: the ``config.json`` that the text of ``--model`` names, a file, a folder or a repository of the Hub."""

from __future__ import annotations

import json
import re
from pathlib import Path

from vescale.cli._main import UsageError

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
