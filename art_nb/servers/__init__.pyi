# Written by tools/stubs.py. Do not edit.
from .serverless_client import ServerlessBackend as ServerlessBackend
from .serverless_client import ServerlessTrainResult as ServerlessTrainResult
from .serverless_routes import ServerlessServer as ServerlessServer
from .tinker_server import TinkerServer as TinkerServer
