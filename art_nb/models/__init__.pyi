# Written by tools/stubs.py. Do not edit.
from .model import Model as Model
from .model import TrainableModel as TrainableModel
from .weights import fetch as fetch
from .clients import at_step as at_step
from .clients import served_name as served_name
