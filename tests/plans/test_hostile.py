"""Files and expressions that were made to hurt, or by mistake do: refused quickly, in little memory, with their place."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import regex
from torch import nn

from vescale.ir import lower
from vescale.plans import Path as PlanPath
from vescale.plans import Plan, PlanError

AXES = {"dp": 2, "tp": 2}


def entry(path: str) -> str:
    return f"shard:\n  ? '{path}'\n  : {{tp: R}}\n"


def nested(count: str, depth: int) -> str:
    return "(?:" * depth + "a" + f"{count})" * depth


HOSTILE: dict[str, str] = {
    "alias bomb": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(8)),
    "merge bomb": "a: &a {b: {tp: R}}\nshard:\n  <<: *a\n",
    "many anchors": "".join(f"- &a{i} x\n" for i in range(40_000)),
    "deep mappings": "shard:\n" + "  {a: " * 10_000 + "\n",
    "deep lists": "shard: " + "[" * 5000 + "\n",
    "deep blocks": "".join(" " * i + "a:\n" for i in range(900)),
    "dashes": "- " * 200_000 + "\n",
    "questions": "? " * 100_000 + "\n",
    "huge": "# x\n" + "x" * 2_000_000,
    "comments": "# x\n" * 120_000 + "a\n",
    "spaces": "shard:" + " " * 490_000 + "x\n",
    "many entries": "shard:\n" + "".join(f"  p{i}: {{tp: R}}\n" for i in range(20_000)),
    "as many as are read, none matches": "shard:\n" + "".join(f"  p{i}.weight: {{tp: R}}\n" for i in range(2_450)),
    "as many as are read, all wrong": "shard:\n" + "".join(f"  p{i}: [1, 2]\n" for i in range(2_300)),
    "many documents": "---\n" * 100_000,
    "long key": "x" * 450_000 + ": 1\n",
    "long value": "version: |\n" + " x\n" * 150_000,
    "long quoted text": '? "' + "\\x41" * 110_000 + '"\n: 1\n',
    "long number": "version: " + "9" * 450_000 + "\n",
    "number as long as is read": "version: " + "9" * 19_000 + "\n",
    "hexadecimal number": "version: 0x" + "f" * 19_000 + "\n",
    "number in base 60": "version: " + ":".join(["59"] * 6_000) + "\n",
    "fraction in base 60": "version: " + ":".join(["59"] * 6_000) + ".5\n",
    "infinite size": "mesh: {dp: .inf}\nshard: {}\n",
    "enormous size": f"mesh: {{dp: {10**30}}}\nshard: {{}}\n",
    "null character": "shard: {a: \0}\n",
    "control character": "shard: {a: \x1b[2J}\n",
    "python object": "shard: !!python/object/apply:os.system [echo]\n",
    "python name": "shard: !!python/name:os.system\n",
    "own tag": "%TAG ! tag:x,2000:\n---\nshard: !a {}\n",
    "binary": "version: !!binary aGVsbG8=\n",
    "set": "shard: !!set {a, b}\n",
    "list as key": "shard:\n  ? [a, b]\n  : {tp: R}\n",
    "variables in variables": "vars: {a: '" + "b" * 19_000 + "'}\nshard:\n  ? '" + "${a}" * 4_900 + "'\n  : {tp: R}\n",
    "open variables": entry("${" * 9_000),
    "long path": entry("a" * 19_000),
    "many alternatives": entry("|".join(f"a{i}" for i in range(3_000))),
    "groups in groups": entry("(" * 900 + "a" + ")" * 900),
    "counted groups in groups": entry(nested("{1000}", 3)),
    "counted far": entry("(?:a?){99999999}"),
    "counted after a class": entry("(?:[)]" * 4 + "a{99}" + "){99}" * 4),
    "counted after an escape": entry(r"(?:(?:\)a{99}){99}){99}"),
    "recursion": entry("(?R)?a(?R)?"),
    "comment that hides a group": entry("(?:(?#[)(?:a{999}){999}(?#]))"),
    "verbose text that hides a group": entry("(?x)(?:#[\\n(?:a{999}){999}#]\\n)"),
    "set in a set": entry("[[a](?:b{999}){999}]"),
    "bad escape": entry("\\\\"),
    "slow to match": entry("(l+a*)+(y+e*r*s*)+(.+)+x"),
    "slow to match, many": "shard:\n" + "".join(f"  '(.*)(.*)(.*)(.*)(.*){i}': {{tp: R}}\n" for i in range(500)),
    "back references": entry("(.*)(.*)(.*)(.*)\\1\\2\\3\\4x"),
    "fuzzy": entry("(?:layers.weight){e<30}"),
    "tuples in tuples": "shard:\n  a: {tp: '" + "Ragged" + "(" * 19_000 + "'}\n",
    "long dim": "shard:\n  a: {tp: 'S(" + "9" * 19_000 + ")'}\n",
    "many units": "shard:\n  layers.0.weight: {tp: 'Ragged(units=(" + "1," * 9_000 + "))'}\n",
    "enormous unit": "shard:\n  layers.0.weight: {tp: 'Ragged(units=(999999999999999999, 1))'}\n",
    "enormous number of chunks": "shard:\n  layers.0.weight: {tp: 'Interleaved(0, 999999999999999999)'}\n",
    "placement of spaces": "shard:\n  a: {tp: 'S(0)" + " " * 19_000 + "x'}\n",
    "placement of letters": "shard:\n  a: {tp: '" + "A" * 19_000 + "'}\n",
    "placement that is code": 'shard:\n  a: {tp: \'__import__("os").system("echo")\'}\n',
}


def model() -> nn.Module:
    module = nn.Module()
    module.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(30))
    module.forward = lambda input: input  # type: ignore[assignment]
    for _ in range(5):  # long names: what grows without bound grows with them
        outer = nn.Module()
        outer.add_module("layers", module)
        module = outer
        module.forward = lambda input: input  # type: ignore[assignment]
    return module


def refuse_in_time(text: str) -> PlanError:
    """The error, within 2 s (1 s is asked). A machine may be slower than any, or busy: the best of three attempts counts."""
    for _ in range(3):
        built, start = model(), time.process_time()
        error = refuse(text, built)
        spent = time.process_time() - start
        if spent < 2 or spent < 30 * time_of_reference_work():
            return error
    raise AssertionError(f"refusing took {spent:.1f} s of processor time")


def refuse(text: str, built: nn.Module) -> PlanError:
    with pytest.raises(PlanError) as caught:
        lower(Plan.from_yaml(text, AXES), built)
    return caught.value


def time_of_reference_work() -> float:
    """CPU seconds of a fixed loop of the interpreter: how fast this machine is at the moment."""
    start = time.process_time()
    total = 0
    for i in range(2_000_000):
        total += i % 7
    return time.process_time() - start


@pytest.mark.parametrize("name", HOSTILE)
def test_refused_with_its_place(name: str) -> None:
    error = refuse_in_time(HOSTILE[name])
    assert error.source is not None and error.source.file == "<yaml>"
    assert error.source.line >= 1 and (error.source.column or 0) >= 1
    assert len(str(error)) < 12_000 and "\x1b" not in str(error) and "\0" not in str(error)


def _measure() -> None:
    """Seconds and MiB that each case takes, one after the other, for the test below."""
    built = model()
    refuse(HOSTILE["own tag"], built)  # imports what is imported late

    def peak() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) // 1024

    for name, text in HOSTILE.items():
        Path("/proc/self/clear_refs").write_text("5")
        before, start = peak(), time.process_time()
        refuse(text, built)
        print(f"{time.process_time() - start:.3f}\t{peak() - before}\t{name}")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_memory_stays_small() -> None:
    code = "from tests.plans.test_hostile import _measure; _measure()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert [name for _, _, name in rows] == list(HOSTILE)
    assert not [row for row in rows if int(row[1]) >= 200]


def test_expressions_in_python_are_bounded_too() -> None:
    with pytest.raises(PlanError, match=r"repetitions, written out, have more than 20000 characters"):
        Plan(AXES).shard(nested("{1000}", 3), {})
    with pytest.raises(PlanError, match=r"has 30000 characters; at most 2000"):
        Plan(AXES).unit("a" * 30_000)


@pytest.mark.parametrize(
    "path",
    [
        r"model\.layers\.\d{1,3}\.self_attn\.(q|k|v)_proj\.weight",
        r"(?:encoder|decoder)\.block\.(?P<layer>[0-9]{1,2})\.layer\.[01]\..*",
        r"(?<!lm_)head\.weight|(?i:norm)\.weight|[]a-z]x|[^]]y|a\{3}|\p{L}{2}",
        r"blocks\.([1-9]|1[0-9]|2[0-3])\..*",
        "(?i)Model.Weight",
    ],
)
def test_what_paths_need_is_read(path: str) -> None:
    assert PlanPath.parse(path).pattern == path


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """A collection during a compilation would be measured as part of it."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
def test_accepted_expressions_compile_quickly() -> None:
    """Random expressions of the pieces that make programs large; those that pass the check must be cheap to compile."""
    source = random.Random(3)
    pieces = [
        "a",
        "(",
        ")",
        "(?:",
        "{9}",
        "{2,30}",
        "{,99}",
        "{999}",
        "[)]",
        "[(]",
        r"\(",
        r"\)",
        r"\[",
        "|",
        "*",
        "[^]]",
    ]
    compiled = 0
    for _ in range(3_000):
        text = "".join(source.choice(pieces) for _ in range(source.randint(1, 40)))
        text += ")" * (text.count("(") - text.count(")"))
        start = time.process_time()
        try:
            PlanPath.parse(text)
        except ValueError:
            pass
        else:
            compiled += 1
        assert time.process_time() - start < 0.5, text
    assert compiled > 100


def test_the_estimate_is_not_below_the_program() -> None:
    """For groups and counts the number of characters in what the expression matches is the size of the program."""
    source = random.Random(4)

    def build(depth: int) -> tuple[str, int]:
        text, size = "", 0
        for _ in range(source.randint(1, 3)):
            inner, inner_size = build(depth - 1) if depth and source.random() < 0.6 else ("a", 1)
            times = source.choice([1, 1, 2, 7, 40])
            text += f"(?:{inner})" + (f"{{{times}}}" if times > 1 else "")
            size += inner_size * times
        return text, size

    refused = 0
    for _ in range(300):
        text, size = build(5)
        try:
            PlanPath.parse(text)
        except ValueError:
            refused += 1
            continue
        assert size <= 20_000
        assert regex.fullmatch(text, "a" * size)
    assert refused > 10


def test_includes_stay_in_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    (folder / "inner").mkdir(parents=True)
    (tmp_path / "secret.yaml").write_text("shard: {fc1.weight: {tp: R}}\n")
    (folder / "link.yaml").symlink_to(tmp_path / "secret.yaml")
    (folder / "linked").symlink_to(tmp_path)
    (folder / "loop.yaml").symlink_to(folder / "loop.yaml")
    os.mkfifo(folder / "pipe.yaml")
    for text, message in {
        "../secret.yaml": "is outside the folder",
        "inner/../../secret.yaml": "is outside the folder",
        str(tmp_path / "secret.yaml"): "is outside the folder",
        str(folder / "inner"): "is outside the folder",
        "link.yaml": "is outside the folder",
        "linked/secret.yaml": "is outside the folder",
        "/dev/zero": "is outside the folder",
        "loop.yaml": "cannot include|is not a file",
        "pipe.yaml": "is not a file",
        "inner": "is not a file",
        "missing.yaml": "is not a file",
        "x" * 5_000: "cannot include",
        '"a\\0b"': "cannot include",
        "plan.yaml": "includes itself",
    }.items():
        (folder / "plan.yaml").write_text(f"version: 1\ninclude:\n  - {text}\n")
        with pytest.raises(PlanError, match=message) as caught:
            Plan.from_yaml(folder / "plan.yaml", AXES)
        assert str(caught.value.source) == f"{folder / 'plan.yaml'}:3:5"


def test_includes_end(tmp_path: Path) -> None:
    for index in range(30):
        (tmp_path / f"{index}.yaml").write_text(f"include: [{index + 1}.yaml]\n")
    with pytest.raises(PlanError, match="more than 20 files"):
        Plan.from_yaml(tmp_path / "0.yaml", AXES)
    (tmp_path / "30.yaml").write_text("shard: {}\n")
    for index in range(30):  # each twice: two to the power of 30 files
        (tmp_path / f"{index}.yaml").write_text(f"include: [{index + 1}.yaml, {index + 1}.yaml]\n")
    with pytest.raises(PlanError, match="more than 20 files"):
        Plan.from_yaml(tmp_path / "14.yaml", AXES)
    (tmp_path / "a.yaml").write_text("include: [b.yaml]\n")
    (tmp_path / "b.yaml").write_text("shard: {}\ninclude:\n  - a.yaml\n")
    with pytest.raises(PlanError, match=r"b.yaml:3:5: a.yaml includes itself"):
        Plan.from_yaml(tmp_path / "a.yaml", AXES)
    (tmp_path / "large.yaml").write_text("# x\n" * 100_000)
    (tmp_path / "a.yaml").write_text("include: [large.yaml, large.yaml]\n")
    with pytest.raises(PlanError, match="more than 500000 bytes"):
        Plan.from_yaml(tmp_path / "a.yaml", AXES)


def test_endless_files_are_not_read_to_their_end() -> None:
    with pytest.raises(PlanError, match="a pipe or device"):
        Plan.from_yaml("/dev/zero", AXES)
    with pytest.raises(PlanError, match=r"file is None, a NoneType; pass the path of a YAML file, or YAML text"):
        Plan.from_yaml(None, AXES)  # type: ignore[arg-type]
