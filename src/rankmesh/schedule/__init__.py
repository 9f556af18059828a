"""Pipeline schedules as data: who does what in which order, made by pure functions.

No torch and no process: an executor elsewhere runs what a schedule says.
"""

from rankmesh.schedule.actions import Action, Kind, Schedule
from rankmesh.schedule.check import check_schedule
from rankmesh.schedule.one_f_one_b import one_f_one_b

__all__ = ["Action", "Kind", "Schedule", "check_schedule", "one_f_one_b"]
from rankmesh.schedule.stub import build_schedule, stage_ranks, with_communication
