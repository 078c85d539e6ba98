"""Write the files in `data` with the tools themselves: `python tests/importers/make_data.py [NAME ...]`.

`make import-data` installs the tools first. The requests of the tools go to an endpoint of art_nb, whose sampler
follows a script. Their sessions end with the same answers on every machine. A file that differs from the one in `data`
only in times, durations, sizes and IDs is not replaced.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.agent_parts import NO_TELEMETRY, Script, served_model  # noqa: E402

HERE = Path(__file__).parent
WRITERS, DATA = HERE / "writers", HERE / "data"
NPM = Path(os.environ.get("ART_NB_CLIS", ROOT / "tests/importers/node/node_modules"))
TOOLS = "openinference genai langfuse litellm weave mlflow phoenix trl openpipe camel claude codex".split()
SPAWN, READ = "Ask a sub-agent what weather.txt says.", "What does weather.txt say?"
AGENT = {"description": "read a file", "prompt": READ, "subagent_type": "general-purpose"}
PROVIDER = 'model_providers.art={{name="art",base_url="{}",env_key="OPENAI_API_KEY",wire_api="responses"}}'


def call(name, **arguments):
    """Return a tool call as text."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class ToolScript(Script):
    """The script of the agents, and calls of the tools of Claude Code and Codex."""

    max_model_len = 1_000_000

    def reply(self, prompt):
        """Return the reply to a prompt."""
        if b"sunny" in prompt or (SPAWN.encode() not in prompt and READ.encode() not in prompt):
            return super().reply(prompt)
        if SPAWN.encode() in prompt:
            return call("Agent", **AGENT)
        if b"Codex CLI" in prompt or b"<environment_context>" in prompt:
            return call("exec_command", cmd="cat weather.txt")
        return call("Bash", command="cat weather.txt", description="read")


def writer(environment, name, *arguments):
    """Return the command of a script in `writers`."""
    return [str(ROOT / f".venv-import-{environment}/bin/python"), str(WRITERS / f"{name}_writer.py"), *arguments]


def cli(pattern):
    """Return the path of a program that npm has installed."""
    program = next(NPM.glob(pattern), None)
    if program is None:
        raise SystemExit(f"There is no {pattern} in {NPM}. Run `make import-data`, which installs it.")
    return str(program)


def claude(question):
    """Return a command of Claude Code."""
    tools = ["--tools", "Bash,Agent", "--allowedTools", "Bash,Agent"]
    return [
        cli("@anthropic-ai/claude-code-*/claude"),
        "-p",
        question,
        "--model",
        "{model}",
        "--system-prompt",
        "You are a helper.",
        *tools,
    ]


def codex(question):
    """Return a command of Codex."""
    instructions = 'model_instructions_file="instructions.md"'
    features = [f"--disable={name}" for name in ("plugins", "apps", "skill_search", "image_generation")]
    settings = ["-c", 'model_provider="art"', "-c", "{provider}", "-c", instructions, "-c", 'web_search="disabled"']
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "{model}"]
    return [cli("@openai/codex-*/vendor/*/bin/codex"), "exec", *flags, *settings, *features, question]


def command_of(name, out):
    """Return the command of a tool. It writes to the folder `out`, or to the folder of its settings."""
    match name:
        case "openinference" | "genai":
            return writer("sdks", "otlp", name, f"{out}/otlp_{name}.jsonl")
        case "langfuse":
            return writer("sdks", name, f"{out}/otlp_langfuse.jsonl", f"{out}/langfuse.jsonl")
        case "litellm" | "weave":
            return writer("sdks", name, f"{out}/{name}.jsonl")
        case "mlflow":
            return writer(name, name, f"{out}/{name}.jsonl")
        case "phoenix":
            return writer(name, name, f"{out}/{name}.jsonl", f"{out}/openai_chat.jsonl")
        case "trl":
            return writer("trl", "trl", str(out))
        case "openpipe":
            return writer("datasets", "datasets", str(out))
        case "camel":
            return writer("camel", "camel", f"{out}/sharegpt.jsonl")
        case "claude":
            return claude(SPAWN)
        case "codex":
            return codex(READ)
    raise SystemExit(f"Unknown tool {name!r}: choose one of {', '.join(TOOLS)}.")


async def run(name, out):
    """Run the command of a tool in a session of the model."""
    home = out / "home"
    project = home / "project"
    project.mkdir(parents=True)
    (project / "weather.txt").write_text("It is sunny in Rome.\n")
    (project / "instructions.md").write_text("You are a helper.\n")
    with served_model(ToolScript()) as model:
        async with model.session() as session:
            fields = {"{model}": session.model_name, "{provider}": PROVIDER.format(session.base_url)}
            command = [fields.get(part, part) for part in command_of(name, out)]
            settings = {"HOME": str(home), "PATH": os.environ["PATH"], "TOKENIZERS_PARALLELISM": "false"}
            settings["PYTHONHASHSEED"] = "0"
            environment = settings | NO_TELEMETRY | {"OTEL_SDK_DISABLED": "false"} | session.env
            process = await asyncio.create_subprocess_exec(
                *command, env=environment, cwd=project, stdin=subprocess.DEVNULL, stdout=sys.stderr
            )
            try:
                code = await asyncio.wait_for(process.wait(), 600)
            finally:
                if process.returncode is None:
                    process.kill()
    if code:
        raise SystemExit(f"{name} ended with {code}: {' '.join(command)}")


VARIABLE = re.compile(
    r"\d{4}-\d\d-\d\d[T ][\d:.]+(?:Z|[+-]\d\d:\d\d)?"  # times
    r"|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{16,}"  # IDs
    r"|(?<=\")(?:[\w+/]{11}=|[\w+/]{22}==)(?=\")"
    r"|127\.0\.0\.1:\d+|\d+\.\d+(?:e-?\d+)?|\d{4,}"  # addresses, durations, sizes and process IDs
    r"|(?<=duration_ms)\W+\d+|(?<=DurationMs)\W+\d+"
)


def is_equal(new, old):
    """Return whether two files differ only in times, durations, sizes and IDs."""
    if new == old or b"PAR1" in (new[:4], old[:4]):
        return new == old
    texts = [content.decode(errors="replace") for content in (new, old)]
    return VARIABLE.sub("…", texts[0]) == VARIABLE.sub("…", texts[1])


def collect(name, out):
    """Copy what a tool wrote into `data`, with neutral names and without the folders of this machine."""
    home = out / "home"
    files = {path: path.name for path in out.glob("*.jsonl")} | {path: path.name for path in out.glob("*.parquet")}
    if (out / "trl_saved").exists():
        files |= {path: str(path.relative_to(out)) for path in (out / "trl_saved").rglob("*") if path.is_file()}
    for path in home.glob(".claude/projects/*/*.jsonl"):
        files[path] = "claude_code.jsonl"
        parts = path.with_suffix("").glob("subagents/*.jsonl")
        files |= {part: f"claude_code/subagents/agent-{i}.jsonl" for i, part in enumerate(sorted(parts), 1)}
    files |= {path: "codex.jsonl" for path in home.glob(".codex/sessions/**/rollout-*.jsonl")}
    changed = []
    for path, target in files.items():
        (DATA / target).parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes()
        if path.suffix == ".jsonl":
            places = {out / "home": "/home/user", out: "/tmp", ROOT: "/home/user/art_nb", sys.base_prefix: "/usr"}
            for place, name_there in places.items():
                content = content.replace(str(place).encode(), name_there.encode())
        if not (DATA / target).exists() or not is_equal(content, (DATA / target).read_bytes()):
            (DATA / target).write_bytes(content)
            changed.append(target)
    print(f"{name}: {', '.join(sorted(files.values()))} (changed: {', '.join(sorted(changed)) or 'none'})")


PACKAGES = {
    "openinference": ("sdks", "openinference-instrumentation-openai"),
    "genai": ("sdks", "opentelemetry-instrumentation-genai-openai"),
    "langfuse": ("sdks", "langfuse"),
    "litellm": ("sdks", "litellm"),
    "weave": ("sdks", "weave"),
    "mlflow": ("mlflow", "mlflow"),
    "phoenix": ("phoenix", "arize-phoenix"),
    "trl": ("trl", "trl"),
    "openpipe": ("datasets", "openpipe"),
    "together": ("datasets", "together"),
    "camel": ("camel", "camel-ai"),
}


def version_of(name):
    """Return the version of a tool."""
    if name not in PACKAGES:
        command = [command_of(name, HERE)[0], "--version"]
    else:
        environment, package = PACKAGES[name]
        program = f"from importlib.metadata import version; print(version({package!r}))"
        command = [str(ROOT / f".venv-import-{environment}/bin/python"), "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main(names):
    """Write the files of the tools `names`, or of all."""
    versions = DATA / "versions.json"
    known = json.loads(versions.read_text()) if versions.exists() else {}
    for name in names or TOOLS:
        out = Path(tempfile.mkdtemp())
        try:
            asyncio.run(run(name, out))
            collect(name, out)
        finally:
            shutil.rmtree(out, ignore_errors=True)
        known |= {tool: version_of(tool) for tool in (name, *(["together"] if name == "openpipe" else []))}
    versions.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
