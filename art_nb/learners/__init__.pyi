# Written by tools/stubs.py. Do not edit.
from .losses import LOSSES as LOSSES
from .losses import TokenTensors as TokenTensors
from .settings import StepConfig as StepConfig
from .base import Learner as Learner
from .base import optimizer_steps as optimizer_steps
