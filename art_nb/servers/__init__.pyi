# Written by tools/stubs.py. Do not edit.
from .tinker_server import TinkerServer as TinkerServer
