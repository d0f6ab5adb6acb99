"""The model of config.yaml, for `vescale lint`, `explain`, `plan new` and `verify`."""

from pathlib import Path

import yaml
from model import Decoder


def build() -> Decoder:
    return Decoder(**yaml.safe_load((Path(__file__).parent / "config.yaml").read_text())["model"])
