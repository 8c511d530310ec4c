"""Training: the engine and what it stands on. It knows a mixer and a module, never a method."""

from alignmixup.train.distributed import Team, join_team
from alignmixup.train.engine import NonFiniteLoss, Summary, fit, summarise
from alignmixup.train.settings import TrainSettings

__all__ = ["NonFiniteLoss", "Summary", "Team", "TrainSettings", "fit", "join_team", "summarise"]
