"""Conversations in ShareGPT's format: `python camel_writer.py FILE`."""

import json
import sys
from pathlib import Path

from camel.messages import BaseMessage, FunctionCallingMessage
from camel.messages.conversion import ShareGPTConversation
from camel.types import RoleType

ASK, REPLY = BaseMessage.make_user_message("user", "2 + 2?"), BaseMessage.make_assistant_message("assistant", "4")
SYSTEM = BaseMessage.make_user_message("system", "You add.")
call = {"role_name": "assistant", "role_type": RoleType.ASSISTANT, "meta_dict": None, "content": "", "func_name": "add"}
with_tool = [FunctionCallingMessage(**call, args={"a": 2, "b": 2}), FunctionCallingMessage(**call, result=4)]
rows = []
for messages in [ASK, REPLY], [SYSTEM, ASK, *with_tool, REPLY]:
    conversation = ShareGPTConversation([message.to_sharegpt() for message in messages])
    rows.append({"conversations": [message.model_dump(by_alias=True) for message in conversation]})
Path(sys.argv[1]).write_text("".join(json.dumps(row) + "\n" for row in rows))
