"""CrewAI in a session. The scenario is on standard input, and the address in environment variables."""

import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor

os.environ |= {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "OTEL_SDK_DISABLED": "true",
}
os.environ["CREWAI_STORAGE_DIR"] = tempfile.mkdtemp()

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool
def weather(city: str) -> str:
    """Return the weather in a city."""
    return "sunny"


@tool
def ask_expert(question: str) -> str:
    """Ask the expert on the weather."""
    return answer(question, [weather])


def answer(question, tools, stream=False):
    llm = LLM(model=f"openai/{os.environ['OPENAI_MODEL']}", base_url=os.environ["OPENAI_BASE_URL"], stream=stream)
    agent = Agent(role="guide", goal="Answer questions.", backstory="You know the weather.", llm=llm, tools=tools)
    task = Task(description=question, expected_output="One sentence.", agent=agent)
    return Crew(agents=[agent], tasks=[task]).kickoff().raw


scenario = json.loads(input())
form = scenario["form"]
tools = [ask_expert if form == "two_agents" else weather]
with ThreadPoolExecutor(1) as pool:
    run = (lambda *args: pool.submit(answer, *args).result()) if form == "thread" else answer
    text = run(scenario["question"], tools, form == "stream")
print(json.dumps({"reward": float("sunny" in text)}))
