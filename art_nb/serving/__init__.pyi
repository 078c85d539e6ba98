# Written by tools/stubs.py. Do not edit.
from .endpoint import Endpoint as Endpoint
