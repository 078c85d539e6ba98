# Written by tools/stubs.py. Do not edit.
from .rows import TokenRow as TokenRow
from .rows import group_rows as group_rows
from .rows import trajectory_rows as trajectory_rows
from .advantages import advantages as advantages
from .advantages import group_advantages as group_advantages
from .advantages import signal_report as signal_report
from .advantages import weigh_rows as weigh_rows
from .chat import ChatFormat as ChatFormat
from .tokenized import TokenFlag as TokenFlag
from .tokenized import TokenizedHistory as TokenizedHistory
from .tokenized import TokenizedMultiHistoryTrajectory as TokenizedMultiHistoryTrajectory
from .tokenized import TokenizedTrajectory as TokenizedTrajectory
from .tokenized import TokenizedTrajectoryGroup as TokenizedTrajectoryGroup
from .tokenized import get_tokenizer as get_tokenizer
from .tokenized import tensorize as tensorize
from .tokenized import tokenize as tokenize
