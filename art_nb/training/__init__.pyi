# Written by tools/stubs.py. Do not edit.
from .run import Run as Run
from .run import train as train
from .notifications import notify as notify
from .evaluation import Evaluation as Evaluation
from .evaluation import evaluate as evaluate
from .evaluation import evaluate_steps as evaluate_steps
from .doctor import doctor as doctor
from .sft import create_lr_schedule as create_lr_schedule
from .sft import train_sft_from_file as train_sft_from_file
