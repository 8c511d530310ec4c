"""Training: the engine and what it stands on. It knows a mixer and a module, never a method."""

from alignmixup.train.distributed import Team, join_team
from alignmixup.train.engine import NonFiniteLoss, fit
from alignmixup.train.settings import TrainSettings
from alignmixup.train.summary import Summary, summarise

__all__ = ["NonFiniteLoss", "Summary", "Team", "TrainSettings", "fit", "join_team", "summarise"]
