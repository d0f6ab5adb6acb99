"""Pipelines: a model in stages, which ranks along one axis of the mesh run, by a schedule of
``torch.distributed.pipelining``. See docs/pipeline.md."""

from vescale.pipeline._balance import partition, state_bytes
from vescale.pipeline._cut import Cut
from vescale.pipeline._gates import current_run
from vescale.pipeline._install import PipelineModule, install_stages
from vescale.pipeline._measured_costs import measure_costs
from vescale.pipeline._runner import Runner
from vescale.pipeline._schedule import Action, Schedule, make_schedule, schedule_page
from vescale.pipeline._staged_program import StagedProgram, check_stages, program_of_stages, without_guesses

__all__ = ["Cut", "PipelineModule", "StagedProgram", "make_schedule", "measure_costs", "partition", "schedule_page"]
