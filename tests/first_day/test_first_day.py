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
    "a_loss_divided_by_local_tokens",
    "a_meta_model",
    "a_skipped_step",
    "an_earlier_end",
    "an_input_written_after_the_forward",
    "another_batch_on_each_rank",
    "another_batch_over_tp",
    "another_plan",
    "another_seed_for_the_model",
    "clipping_old_parameters",
    "ddp_around",
    "evaluation_on_rank_0",
    "labels_of_local_rows",
    "optimizer_before_parallelize",
    "saving_the_module",
]


NIGHTLY = [
    "a_file_for_each_rank",
    "a_frozen_batch_norm",
    "a_generator_and_a_discriminator",
    "a_learning_rate_in_a_tensor",
    "a_schedule_of_rates_and_momenta",
    "an_average_in_a_copy_from_before",
    "an_input_buffer_that_is_used_again",
    "an_old_optimizer_of_another_model",
    "an_optimizer_state_of_one_device",
    "an_unused_branch",
    "arrays_texts_and_dataclasses",
    "autocast_on_all_ranks",
    "draws_on_rank_0_of_a_model_that_draws_none",
    "functional_calls_and_gradients",
    "gradient_hooks_after_parallelize",
    "gradient_penalties",
    "gradients_kept_over_steps",
    "initialization_and_noise",
    "lbfgs",
    "local_batches_of_other_sizes",
    "local_parts_looked_at_on_rank_0",
    "losses_of_local_rows_with_own_numbers",
    "losses_of_many_forms",
    "metrics_of_sharded_outputs",
    "numbers_drawn_alike_in_a_forward",
    "numbers_of_the_loss_on_rank_0",
    "numpy_of_sharded_outputs",
    "optimizer_of_some_parameters",
    "outer_loss_printed_on_rank_0",
    "parts_given_as_dtensors",
    "plain_data",
    "plain_tensors_outside",
    "pruned_afterwards",
    "python_scalars_that_change",
    "scaled_and_clipped",
    "scheduler_and_clipping",
    "several_forwards",
    "sharded_batch_sampler",
    "spectral_norm_before",
    "ties_made_afterwards",
    "two_models",
    "values_read_in_a_forward",
]
"""Of the correct ones."""


def scripts(kind: str) -> list[object]:
    found: list[object] = []
    for path in sorted((FOLDER / kind).glob("*.py")):
        is_open = Script.read(path).open
        is_daily = path.stem in DAILY if kind == "mistakes" else path.stem not in NIGHTLY
        marks = [] if is_daily else [pytest.mark.slow]
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
