"""What `docs/internals/upstream.md` says of PyTorch without vescale is true of the installed version."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "upstream.md"

_RUN = """
import datetime, json, os, sys, warnings

warnings.simplefilter("ignore")
given = json.load(open(sys.argv[1]))
os.environ.update(RANK=sys.argv[2], WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=sys.argv[3])
names = {}
exec(given["first"], names)
outcomes = {}
for title, program in given["programs"].items():
    own = dict(names)
    try:
        exec(program, own)
        outcomes[title] = "" if own["torch"].allclose(own["found"], own["expected"]) else "wrong"
    except Exception as error:
        outcomes[title] = f"raises {type(error).__name__}: {error}"[:200]
print(json.dumps(outcomes))
os._exit(0)
"""


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port


def test_the_page_is_true_of_this_version(tmp_path: Path) -> None:
    first, *sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    programs = {section.partition("\n")[0]: _block(section) for section in sections}
    (tmp_path / "given").write_text(json.dumps({"first": _block(first), "programs": programs}))
    (tmp_path / "run.py").write_text(_RUN)
    port = str(_free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "run.py"), str(tmp_path / "given"), str(rank), port],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    outcomes = [json.loads(rank.communicate(timeout=300)[0].splitlines()[-1]) for rank in ranks]
    version = ".".join(torch.__version__.split(".")[:2])
    for section in sections:
        title = section.partition("\n")[0]
        listed = re.search(r"^In ([\d., ]*\d)\. ", section + " ", re.MULTILINE)
        assert listed is not None, f"{title!r} does not say in which versions"
        is_wrong = any(outcome[title] for outcome in outcomes)
        assert is_wrong == (version in listed[1].split(", ")), (title, [outcome[title] for outcome in outcomes])


def _block(text: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
