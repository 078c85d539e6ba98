# Written by tools/stubs.py. Do not edit.
from .serverless_routes import ServerlessServer as ServerlessServer
from .tinker_server import TinkerServer as TinkerServer
