"""Runs a training script as some ranks of a job that does not exist: what each does, and where the job would stop."""

from vescale.simulation._simulate import Finding, Job, Simulation, simulate, simulate_jobs
from vescale.simulation._tracer import Collective, RankRecord

__all__ = ["Collective", "Finding", "RankRecord", "Simulation", "simulate"]
