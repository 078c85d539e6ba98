# Written by tools/stubs.py. Do not edit.
from .sessions import Session as Session
from .programs import ProgramOutput as ProgramOutput
from .programs import rollout_from as rollout_from
from .langgraph import init_chat_model as init_chat_model
from .langgraph import wrap_rollout as wrap_rollout
from .mcp_servers import MCPResource as MCPResource
from .mcp_servers import MCPResult as MCPResult
from .mcp_servers import MCPSession as MCPSession
from .mcp_servers import MCPTool as MCPTool
from .mcp_servers import complete_task_tool as complete_task_tool
from .mcp_servers import connect as connect
from .mcp_scenarios import GeneratedScenario as GeneratedScenario
from .mcp_scenarios import GeneratedScenarioCollection as GeneratedScenarioCollection
from .mcp_scenarios import generate_scenarios as generate_scenarios
from .mcp_scenarios import preview_scenarios as preview_scenarios
from .mcp_rollouts import mcp_rollout as mcp_rollout
from .mcp_rollouts import valid_call_share as valid_call_share
