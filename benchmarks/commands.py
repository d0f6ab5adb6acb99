"""What the commands and `import vescale` cost: seconds of processor time (user and system), the median of several runs.

python benchmarks/commands.py [--runs 3] [--only TEXT]

Each run is a process of its own, with its children. The cost of `import vescale` is that beyond `import torch`. The model is
a Llama of 4 layers with hidden size 512, on 16 devices.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
MODEL = ["--model", "config.json"]
_CLOCK = "time.process_time()"
# what is measured -> arguments of Python, goal in seconds
COMMANDS: dict[str, tuple[list[str], float]] = {
    "import vescale": (["-c", f"import time, torch; s = {_CLOCK}; import vescale; print({_CLOCK} - s)"], 0.1),
    "--help": (["-m", "vescale", "--help"], 0.3),
    "zoo": (["-m", "vescale", "zoo"], 0.3),
    "lint": (["-m", "vescale", "lint", "llama_zero3", *MODEL, "--mesh", "dp=8,tp=2"], 4),
    "explain": (["-m", "vescale", "explain", "llama_zero3", *MODEL, "--mesh", "dp=8,tp=2"], 4),
    "search": (["-m", "vescale", "search", *MODEL, "--devices", "16", "--batch", "16", "--seq", "512"], 15),
}


def seconds(arguments: list[str], folder: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    path = os.pathsep.join([str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{arguments}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    if arguments[0] == "-c":
        return float(done.stdout)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        for name, (arguments, goal) in COMMANDS.items():
            if options.only not in name:
                continue
            seconds(arguments, folder)  # writes bytecode
            found = [seconds(arguments, folder) for _ in range(options.runs)]
            print(f"{name:16} {statistics.median(found):6.2f} s (goal: {goal} s)", flush=True)


if __name__ == "__main__":
    main()
