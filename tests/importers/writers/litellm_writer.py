"""Standard logging payloads of LiteLLM: `python litellm_writer.py FILE`.

`model_map_information` has LiteLLM's 9 kB of facts about the model. It is left out.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import litellm
from agent import SESSIONS, answer
from litellm.integrations.custom_logger import CustomLogger

payloads, place = [], {}


class Collector(CustomLogger):
    """A logger that keeps the payload of each call."""

    def log_success_event(self, kwargs, response_obj, start_time, end_time):
        """Keep a payload."""
        payloads.append({**kwargs["standard_logging_object"], "model_map_information": None})


def create(model, messages, tools):
    """Send a request."""
    places = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    options = {"metadata": {**place, "tags": ["tests"]}, "litellm_session_id": place["session_id"]}
    return litellm.completion(f"openai/{model}", messages, tools=tools, **places, **options)


price = {"input_cost_per_token": 0.0, "output_cost_per_token": 0.0, "litellm_provider": "openai", "mode": "chat"}
litellm.register_model({os.environ["OPENAI_MODEL"]: price})
litellm.callbacks = [Collector()]
llm = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
for session, questions in SESSIONS.items():
    place["session_id"] = session
    for question in questions:
        answer(llm, question)
end = time.time() + 30
while len(payloads) < 6 and time.time() < end:
    time.sleep(0.1)
rows = sorted(payloads, key=lambda payload: payload["startTime"])
Path(sys.argv[1]).write_text("".join(json.dumps(row, default=str, sort_keys=True) + "\n" for row in rows))
