# Written by tools/stubs.py. Do not edit.
from .local import BACKENDS as BACKENDS
from .local import LocalBackend as LocalBackend
from .local import backend as backend
from .remote_client import Backend as Backend
from .contract import check_backend as check_backend
