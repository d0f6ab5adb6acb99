"""The API reference: every public argument has a sentence, the names that pages use are there."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

ROOT = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location("api_pages", ROOT / "tools" / "api_pages.py")
assert _spec is not None and _spec.loader is not None
api = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(api)


def unexplained(value: Any, owner: type | None = None) -> list[str]:
    known = api.described(value, owner)
    return [name for name in api.parameters(value) if name not in known]


def findings(value: Any, name: str) -> list[str]:
    """Of a function, or a class with its methods: those without a docstring, and arguments without a sentence."""
    if not callable(value):
        return []
    found = [] if api.described(value) or value.__doc__ else [f"{name}: no docstring"]
    found += [f"{name}: {argument}" for argument in unexplained(value)]
    if isinstance(value, type):
        fields = [field for field in getattr(value, "__dataclass_fields__", ()) if not field.startswith("_")]
        found += [f"{name}: field {field}" for field in fields if field not in api.described(value)]
        for inner, method in api.members(value):
            if not inspect.getdoc(method):  # its own, or that of a base
                found.append(f"{name}.{inner}: no docstring")
            if not isinstance(method, property):
                found += [f"{name}.{inner}: {argument}" for argument in unexplained(method, value)]
    return found


def test_every_argument_has_a_sentence() -> None:
    wrong = [text for package, name, value in api.public() for text in findings(value, f"{package}.{name}")]
    assert not wrong, "write what these are, in `Args:` or as ``name`` in a sentence:\n" + "\n".join(wrong)


def test_missing_sentences_are_seen() -> None:
    def silent(first: int, second: int) -> None:
        """Uses ``first``."""

    class Silent:
        """A class.

        Args:
            first: the first.
        """

        def __init__(self, first: int, second: int) -> None: ...

    @dataclass
    class Result:
        """What was found."""

        field: int

        def bare(self) -> None: ...

        @property
        def empty(self) -> bool:
            return True

    Silent.__module__ = Result.__module__ = "vescale.silent"
    assert findings(silent, "silent") == ["silent: second"]
    assert findings(Silent, "Silent") == ["Silent: second"]
    expected = {"Result: field field", "Result.bare: no docstring", "Result.empty: no docstring"}
    assert expected <= set(findings(Result, "Result"))


def names_in_pages() -> set[tuple[str, str]]:
    """(package, name) of what guides and examples import from vescale, or write with all its dots."""
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "examples").rglob("*.py")]
    found = set()
    for text in (page.read_text() for page in pages):
        for package, names in re.findall(r"from (vescale(?:\.\w+)?) import ([^\n(]+|\([^)]*\))", text):
            found |= {(package, name) for name in re.findall(r"\w+", names.partition("#")[0])}
        found |= {(f"vescale.{first}", second) for first, second in re.findall(r"\bvescale\.(\w+)\.(\w+)", text)}
    return found


def test_names_that_the_pages_use_are_in_the_reference() -> None:
    listed = {(package, name) for package, names in api.PAGES.items() for name in names}
    everywhere = {name for _, name in listed if (("vescale", name) in listed)}
    missing = []
    for package, name in sorted(names_in_pages()):
        if not package.removeprefix("vescale.").islower() or package not in {"vescale", *api.PAGES}:
            continue
        value = getattr(importlib.import_module(package), name, None)
        if callable(value) and not isinstance(value, types.ModuleType) and name not in everywhere:
            missing += [] if (package, name) in listed else [f"{package}.{name}"]
    assert not missing, f"add these to PAGES of tools/api_pages.py: {missing}"


def test_every_public_name_of_vescale_is_in_the_reference() -> None:
    import vescale

    constants = {"ALL", "BWD", "FWD", "INIT", "RUN"}  # members of Phase
    modules = {name for name in vescale.__all__ if isinstance(getattr(vescale, name), types.ModuleType)}
    assert set(api.PAGES["vescale"]) == set(vescale.__all__) - constants - modules - {"__version__"}
    assert {f"vescale.{name}" for name in modules} <= set(api.PAGES)
    assert list(api.listed("plans"))[:2] == [("vescale", "parallelize"), ("vescale", "Plan")]


def test_public_names_are_those_of_the_pages() -> None:
    """``__all__`` of each package: what a page of the reference lists, there or at the top. Other packages have none."""
    import vescale

    errors = set(re.findall(r"^- `(\w+)`", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE))
    wrong = []
    for file in sorted((ROOT / "vescale").rglob("__init__.py")):
        package = ".".join(file.parent.relative_to(ROOT).parts)
        if package == "vescale":
            continue
        top = {name for name, home in vescale._PUBLIC.items() if home == package and f"vescale.{name}" != package}
        listed = set(api.PAGES.get(package, ())) | top
        if package == "vescale.errors":
            listed = {name for name in errors if hasattr(importlib.import_module(package), name)}
        elif package not in api.PAGES:
            listed = set()
        published = set(getattr(importlib.import_module(package), "__all__", ()))
        if published != listed:
            wrong.append(f"{package}: {sorted(published ^ listed)}")
    assert not wrong, "in __all__ and on no page, or on a page and not in __all__:\n" + "\n".join(wrong)


def test_errors_are_found_where_their_page_says() -> None:
    """In ``vescale.errors``, or in a package that the reference lists; the commands' own reaches no program."""
    errors = importlib.import_module("vescale.errors")
    text = (ROOT / "docs" / "errors.md").read_text()
    everywhere = {name for names in api.PAGES.values() for name in names} | set(errors.__all__)
    assert set(re.findall(r"^- `(\w+)`", text, re.MULTILINE)) - everywhere == {"UsageError"}


@pytest.mark.parametrize("topic", list(api.TOPICS))
def test_pages_are_whole(topic: str) -> None:
    text = api.page(topic)
    assert text.count("```") % 2 == 0
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert not re.findall(r"::$|:(?:func|class|meth):|``", outside, re.MULTILINE), "reStructuredText is left"
    assert " at 0x" not in text, "the page would be another one in each build"
    for _, name in api.listed(topic):
        assert f"## `{name}`" in text


def test_docstrings_become_markdown() -> None:
    text = api.markdown(
        "Runs ``f`` of :class:`~vescale.Plan` on <in>.\n\nArgs:\n    one, two: the first.\n        And more.\n\n"
        "Returns:\n    a *b*."
    )
    assert text.splitlines()[0] == "Runs `f` of `Plan` on &lt;in>."
    assert "- `one, two`: the first." in text and "**Returns**" in text
    block = "Runs:\n\n```python\nwith a ``quoted`` <in>:\n    ...\n```"
    assert api.markdown(block) == block


def test_signatures_are_those_of_the_source() -> None:
    def shown(x: Literal["a", "b"] = "a", *rest: int, key: float | None = None, made: Any = Path) -> bool: ...

    text = "shown(x: Literal['a', 'b'] = 'a', *rest: int, key: float | None = None, made: Any = ...) -> bool"
    assert api.signature_text("shown", shown) == text
