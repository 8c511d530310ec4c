"""Training: the trainer and its parts. It knows a mixer and a module, never a method by name."""

from alignmixup.training.distributed import Team, join_team
from alignmixup.training.losses import NonFiniteLoss
from alignmixup.training.settings import TrainSettings
from alignmixup.training.signals import Stopped
from alignmixup.training.summary import Summary, summarize
from alignmixup.training.trainer import fit
from alignmixup.training.watch import RankLost

__all__ = [
    "NonFiniteLoss",
    "RankLost",
    "Stopped",
    "Summary",
    "Team",
    "TrainSettings",
    "fit",
    "join_team",
    "summarize",
]
