"""The table in docs/how-to/frameworks.md names the versions that the tests of the agent frameworks install."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "frameworks.md").read_text(encoding="utf-8")
PEERS = ROOT / "benchmarks" / "peers"
PACKAGES = {  # the file with the pinned version, and the package; of Node: package.json
    "curl": None,
    "Vercel AI SDK": ("node", "ai"),
    "Anthropic SDK": ("agents", "anthropic"),
    "OpenAI Agents SDK": ("agents", "openai-agents"),
    "LangChain": ("agents", "langchain"),
    "LangGraph": ("agents", "langgraph"),
    "LiteLLM": ("agents", "litellm"),
    "pydantic-ai": ("agents", "pydantic-ai-slim"),
    "smolagents": ("agents", "smolagents"),
    "AG2": ("agents", "ag2"),
    "DSPy": ("agents", "dspy"),
    "AutoGen": ("agents/autogen", "autogen-agentchat"),
    "CrewAI": ("agents/crewai", "crewai"),
    "Google ADK": ("agents/google-adk", "google-adk"),
    "LlamaIndex": ("agents/llama-index", "llama-index-core"),
}


def rows(heading):
    """Return the cells of the table that has a heading with these first two cells."""
    table = PAGE.partition(f"| {heading} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def pinned_version(file, package):
    if file == "node":
        text = (ROOT / "tests/agents/programs/node/package.json").read_text(encoding="utf-8")
        return json.loads(text)["dependencies"][package]
    return re.search(rf"^{package}==(\S+)", (PEERS / f"{file}.txt").read_text(encoding="utf-8"), re.MULTILINE)[1]


def test_the_versions_are_those_of_the_tests():
    found = {}
    for name, version, *_ in rows("Framework | Version"):
        framework = re.match(r"`?([\w -]*\w)", name)[1]
        found.setdefault(next(known for known in PACKAGES if framework.startswith(known)), set()).add(version)
    assert found == {name: {pinned_version(*pin) if pin else "any"} for name, pin in PACKAGES.items()}


def test_every_environment_is_listed():
    listed = [name.strip("`") for name, *_ in rows("Environment | Size")]
    assert listed == [f".venv-agent-{path.stem}" for path in sorted((PEERS / "agents").glob("*.txt"))]


def test_every_missing_cell_has_a_reason():
    cells = [cell for row in rows("Framework | Version") for cell in row[2:]]
    assert {cell.partition(" ")[0] for cell in cells} == {"✓", "–"}
    notes = {cell.partition(" ")[2].strip("()") for cell in cells if " " in cell}
    assert notes == {*re.findall(r"^(\d)\. ", PAGE, re.MULTILINE)}
    assert all(" (" in cell for cell in cells if cell.startswith("–"))
