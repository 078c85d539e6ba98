"""An agent of OpenAI's client: it answers with a tool, or through an expert, which is a second agent."""

import json
import os

import openai

TOOLS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "ask_expert": {"type": "object", "properties": {"question": {"type": "string"}}, "required": ["question"]},
}
QUESTION = "How is the weather in Rome?"
EXPERT_QUESTION = "What does the expert say about Rome?"
SESSIONS = {"session-1": [QUESTION], "session-2": [EXPERT_QUESTION]}


def client():
    """Return a client of the model's session."""
    return openai.OpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])


def tool(name):
    """Return the schema of a tool."""
    return {"type": "function", "function": {"name": name, "parameters": TOOLS[name]}}


def answer(llm, question, system="You are a guide.", tools=("weather", "ask_expert")):
    """Answer a question with the tools."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    for _ in range(5):
        reply = llm.chat.completions.create(
            model=os.environ["OPENAI_MODEL"], messages=messages, tools=[tool(name) for name in tools]
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = "sunny" if call.function.name == "weather" else answer(llm, QUESTION, "You are an expert.")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{result} in Rome {len(arguments)}"})
    raise RuntimeError("The model did not answer.")
