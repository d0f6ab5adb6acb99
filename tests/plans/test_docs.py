"""The examples in docs/plans.md run and print what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from vescale.plans import Plan
from vescale.plans._yaml_reader import plan_schema

TEXT = (Path(__file__).parent.parent.parent / "docs" / "plans.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def test_the_python_example_prints_the_program_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    exec(blocks("python")[0], {})
    printed = capsys.readouterr().out
    assert printed.strip() and f"```\n{printed.rstrip()}\n```" in TEXT


def test_the_yaml_example_is_a_plan() -> None:
    (text,) = blocks("yaml")
    sections = yaml.safe_load(text)
    plan = Plan.from_yaml(text, {"dp": 2, "tp": 2})
    others = {"version", "description", "include", "mesh", "vars", "pipeline"}
    entries = [name for name in plan_schema()["properties"] if name not in others]
    # `${layer}..*` has two phases and `lm_head.weight` two items.
    assert len(plan) == sum(len(sections[name]) for name in entries) + 2


def test_every_rule_that_lint_knows_is_described() -> None:
    sources = list((Path(__file__).parent.parent.parent / "vescale" / "ir").glob("*.py"))
    rules = set()
    for source in sources:
        rules |= set(re.findall(r'\.(?:error|warning)\(\s*"([a-z-]+)"', source.read_text()))
    assert len(rules) >= 15
    missing = {rule for rule in rules if f"`{rule}`" not in TEXT}
    assert not missing
