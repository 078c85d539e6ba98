"""The parameters of public functions, and of the methods of public classes, are documented."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "art_nb"
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
SECTION = re.compile(r"^(?:Parameters|Attributes)\n-+\n(.*?)(?=\n\n\w[\w ]*\n-{3,}|\Z)", re.DOTALL | re.MULTILINE)
# Classes that are not public names of a package, but that users subclass, pass or receive.
FURTHER = {
    "rewards.judges": ["CachedJudge", "Judgment", "JudgeCache", "Person", "PythonRule", "ReplayJudge"],
    "rewards.llm_judges": ["Judge", "ListwiseJudge", "PointwiseJudge"],
    "rewards.journal": ["Journal"],
    "rollouts.entries": ["History"],
    "samplers.base": ["QueuedSampler"],
    "training.run": ["AttachedRun"],
    "training.run_view": ["RunView"],
}


def public_names():
    """Return the public names of each module, as the packages list them."""
    names = {module: [*further] for module, further in FURTHER.items()}
    for init in ROOT.glob("*/__init__.py"):
        for node in ast.walk(ast.parse(init.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "submod_attrs":
                for module, listed in ast.literal_eval(node.value).items():
                    names.setdefault(f"{init.parent.name}.{module}", []).extend(listed)
    return names


def documented(node):
    """Return the parameters in the sections of a docstring."""
    lines = "\n".join(SECTION.findall(ast.get_docstring(node) or "")).splitlines()
    heads = [line.partition(" :")[0] for line in lines if line and not line[0].isspace()]
    return {name.strip(" *") for head in heads for name in head.split(",")}


def undocumented(function, lines, owner=None):
    """Return the parameters that neither a docstring nor a comment on their own line describes."""
    args = function.args
    extra = [parameter for parameter in (args.vararg, args.kwarg) if parameter]
    parameters = [*args.posonlyargs, *args.args, *args.kwonlyargs, *extra]
    known = documented(function) | ({"self", "cls"} if owner else set())
    known |= documented(owner) if owner and function.name == "__init__" else set()
    starts = [parameter.lineno for parameter in parameters]
    return [
        parameter.arg
        for parameter in parameters
        if parameter.arg not in known
        and not (starts.count(parameter.lineno) == 1 and "  # " in lines[parameter.end_lineno - 1])
    ]


def is_public(node):
    """Return whether a node is a method that users call."""
    decorators = {ast.unparse(decorator).partition("(")[0].split(".")[-1] for decorator in node.decorator_list}
    hidden = decorators & {"overload", "setter", "field_validator", "model_validator", "model_serializer"}
    return not hidden and (node.name == "__init__" or not node.name.startswith("_"))


@pytest.mark.parametrize(("module", "names"), sorted(public_names().items()))
def test_public_parameters_are_documented(module, names):
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    lines, missing, found = source.splitlines(), {}, set()
    for node in ast.parse(source).body:
        if getattr(node, "name", None) not in names:
            continue
        found.add(node.name)
        methods = [method for method in getattr(node, "body", []) if isinstance(method, FUNCTIONS)]
        for function in [node] if isinstance(node, FUNCTIONS) else filter(is_public, methods):
            owner = node if isinstance(node, ast.ClassDef) else None
            if faults := undocumented(function, lines, owner):
                missing[f"{node.name}.{function.name}"] = faults
    assert not missing
    assert all(hasattr(importlib.import_module(f"art_nb.{module}"), name) for name in names)
    assert {*FURTHER.get(module, [])} <= found
