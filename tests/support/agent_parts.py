"""Parts for the tests of agent frameworks: a tool, a sampler that calls it, and a model with its endpoint."""

import json
from contextlib import contextmanager

from support.server_parts import Scripted, endpoint

import art_nb as art
from art_nb.core.types import ServeError

NO_TELEMETRY = {
    "ANONYMIZED_TELEMETRY": "False",
    "AUTOGEN_DISABLE_RUNTIME_TRACING": "true",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
FINAL_CALL = '<tool_call>{"name": "final_answer", "arguments": {"answer": "It is sunny."}}</tool_call>'
ASK = '<tool_call>{"name": "ask_expert", "arguments": {"question": "How is the weather in Rome?"}}</tool_call>'
SUBMIT = '<tool_call>{"name": "submit", "arguments": {"answer": "It is sunny."}}</tool_call>'
QUESTION = "How is the weather in Rome?"
EXPERT_QUESTION = "What does the expert say about Rome?"
RETRIED_QUESTION = "How is the weather in Rome after a retry?"
REASONED_QUESTION = "How is the weather in Rome, and why?"
THOUGHT = "The tool knows it."
ANSWER = "It is sunny."
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Script(Scripted):
    """A sampler that calls a tool, and answers when the prompt has its result.

    `EXPERT_QUESTION` gets a call of `ask_expert`. `RETRIED_QUESTION` fails when a prompt is sent for the first time.
    `REASONED_QUESTION` gets replies with reasoning.
    """

    def __init__(self):
        super().__init__()
        self.failed = set()

    async def generate(self, prompt_ids, params, adapter):
        prompt = bytes(prompt_ids)
        if RETRIED_QUESTION.encode() in prompt and prompt not in self.failed:
            self.failed.add(prompt)
            raise ServeError("The sampler is overloaded.", status=503)
        thought = f"<think>{THOUGHT}</think>" if REASONED_QUESTION.encode() in prompt else ""
        self.words = thought + self.reply(prompt)
        async for token in super().generate(prompt_ids, params, adapter):
            yield token

    def reply(self, prompt):
        """Return the reply to a prompt."""
        if b"`submit`" in prompt:  # the last call of DSPy's agent with tool calls
            return SUBMIT if b"sunny" in prompt else CALL
        if b"[[ ## " in prompt:
            return dspy_reply(prompt)
        call = ASK if EXPERT_QUESTION.encode() in prompt else CALL
        if prompt.endswith(b'{"name": "'):  # a required call, which the prompt begins
            return (FINAL_CALL if b"sunny" in prompt else call).partition('"name": "')[2]
        return ANSWER if b"sunny" in prompt else call


def dspy_reply(prompt):
    """Return the reply in the text format of DSPy: the fields that the prompt requests."""
    if b"[[ ## next_tool_name ## ]]" not in prompt:
        fields = {"reasoning": "The tool said so.", "answer": ANSWER}
    elif b"sunny" in prompt:
        fields = {"next_thought": "I know it.", "next_tool_name": "finish", "next_tool_args": "{}"}
    elif EXPERT_QUESTION.encode() in prompt:
        fields = {"next_thought": "I ask.", "next_tool_name": "ask_expert"}
        fields["next_tool_args"] = json.dumps({"question": QUESTION})
    else:
        fields = {"next_thought": "I look.", "next_tool_name": "weather", "next_tool_args": '{"city": "Rome"}'}
    return "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in fields.items()) + "[[ ## completed ## ]]"


@contextmanager
def served_model(script):
    """Yield a model whose endpoint has the sampler `script`."""
    served = endpoint(script)
    served.start()
    try:
        yield art.Model(
            name="guide",
            project="tests",
            inference_base_url=served.base_url,
            inference_api_key=served.api_key,
            inference_model_name="ttt@3",
        )
    finally:
        served.stop()
