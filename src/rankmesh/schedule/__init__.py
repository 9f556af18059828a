"""Pipeline schedules as data: who does what in which order, made by pure functions.

No torch and no process: an executor elsewhere runs what a schedule says.
"""

from rankmesh.schedule.actions import Action, Costs, Kind, Schedule
from rankmesh.schedule.build import CHUNKS, build_schedule, stage_ranks
from rankmesh.schedule.check import check_schedule
from rankmesh.schedule.communicate import partner, with_communication
from rankmesh.schedule.draw import IDLE, draw_svg, draw_text
from rankmesh.schedule.read import read_schedule, schedule_text
from rankmesh.schedule.timeline import Span, Timeline, simulate

__all__ = [
    "CHUNKS",
    "IDLE",
    "Action",
    "Costs",
    "Kind",
    "Schedule",
    "Span",
    "Timeline",
    "build_schedule",
    "check_schedule",
    "draw_svg",
    "draw_text",
    "partner",
    "read_schedule",
    "schedule_text",
    "simulate",
    "stage_ranks",
    "with_communication",
]
