"""Training: the engine and what it stands on. It knows a mixer and a module, never a method."""

from alignmixup.training.distributed import Team, join_team
from alignmixup.training.settings import TrainSettings
from alignmixup.training.signals import Stopped
from alignmixup.training.summary import Summary, summarise
from alignmixup.training.trainer import NonFiniteLoss, fit

__all__ = [
    "NonFiniteLoss",
    "Stopped",
    "Summary",
    "Team",
    "TrainSettings",
    "fit",
    "join_team",
    "summarise",
]
