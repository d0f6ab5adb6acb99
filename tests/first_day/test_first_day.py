"""Mistakes of the first day end in an error that names the edit; scripts that look like them run without a word.

A new script needs no entry anywhere: each file of ``mistakes`` and ``correct`` is a case. A mistake that is not found yet
says so in its docstring (``open: why``), and its case must fail.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.first_day.jobs import Script, run

FOLDER = Path(__file__).parent
DAILY = [
    "a_buffer_written_on_rank_0",
    "a_ctc_loss_of_unequal_lengths",
    "a_dict_of_many_things",
    "a_loss_divided_by_local_tokens",
    "a_meta_model",
    "a_sample_that_is_logged_in_a_forward",
    "a_skipped_step",
    "an_earlier_end",
    "an_input_written_after_the_forward",
    "an_overflow_on_one_rank",
    "another_batch_on_each_rank",
    "another_batch_over_tp",
    "another_plan",
    "another_seed_for_the_model",
    "checkpointed_with_dropout",
    "clipping_old_parameters",
    "ddp_around",
    "different_data_under_fsdp",
    "evaluation_on_all_ranks",
    "evaluation_on_rank_0",
    "gradient_accumulation",
    "labels_of_local_rows",
    "local_batches",
    "loss_printed_on_rank_0",
    "nan_inputs",
    "one_rank_sleeps",
    "optimizer_before_parallelize",
    "rank_0_logs_and_saves",
    "ranks_own_seeds_for_augmentation",
    "saving_the_module",
]


def scripts(kind: str) -> list[object]:
    found: list[object] = []
    for path in sorted((FOLDER / kind).glob("*.py")):
        is_open = Script.read(path).open
        marks = [] if path.stem in DAILY else [pytest.mark.slow]
        marks += [pytest.mark.xfail(reason=is_open, strict=True)] if is_open else []
        found.append(pytest.param(path, id=path.stem, marks=marks))
    return found


def judge(path: Path, folder: Path) -> None:
    script = Script.read(path)
    result = run(script, folder)
    wrong = script.judge(result)
    assert not wrong, f"{script.title}\n" + "\n".join(wrong) + f"\n{result.text}"


@pytest.mark.parametrize("path", scripts("mistakes"))
def test_a_mistake_ends_in_an_error_that_names_the_edit(path: Path, tmp_path: Path) -> None:
    assert Script.read(path).errors, f"{path.name} must say which error it expects"
    judge(path, tmp_path)


@pytest.mark.parametrize("path", scripts("correct"))
def test_a_correct_script_runs_without_a_word(path: Path, tmp_path: Path) -> None:
    judge(path, tmp_path)
