"""The recipes of docs/how-to/clusters.md: what can be checked without their platforms."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from art_nb.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "clusters.md").read_text(encoding="utf-8")
SCHEMA = json.loads((Path(__file__).parent / "data" / "raycluster-schema.json").read_text(encoding="utf-8"))


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


KUBERAY, SKYPILOT = map(yaml.safe_load, blocks("yaml"))
SCRIPTS = blocks("bash")
(SLURM,) = [script for script in SCRIPTS if "SBATCH" in script]


def test_the_output_of_the_plan(capsys):
    command, *lines = next(block for block in blocks("") if block.startswith("$ ")).splitlines()
    assert main(shlex.split(command)[2:]) == 0
    assert capsys.readouterr().out.startswith("\n".join(lines))


@pytest.mark.parametrize("script", SCRIPTS, ids=range(len(SCRIPTS)))
def test_the_syntax_of_scripts(script):
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_manifest_has_kuberay_s_schema():
    jsonschema.validate(KUBERAY, SCHEMA)


def test_the_manifest_with_an_autoscaler_has_kuberay_s_schema():
    manifest = json.loads(json.dumps(KUBERAY))
    manifest["spec"]["enableInTreeAutoscaling"] = True
    for group in manifest["spec"]["workerGroupSpecs"]:
        group |= {"minReplicas": 0, "replicas": 0}
    jsonschema.validate(manifest, SCHEMA)
    assert "`enableInTreeAutoscaling: true`" in PAGE and "`minReplicas: 0`" in PAGE


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec.pop("headGroupSpec"),
        lambda spec: spec["workerGroupSpecs"][0].pop("groupName"),
        lambda spec: spec["workerGroupSpecs"][0].update(replica=1),
        lambda spec: spec["workerGroupSpecs"][0].update(maxReplicas="7"),
        lambda spec: spec["workerGroupSpecs"][0]["template"]["spec"]["containers"][0].pop("name"),
        lambda spec: spec["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
        lambda spec: spec["headGroupSpec"]["template"]["spec"].update(nodeselector={}),
        lambda spec: spec["authOptions"].update(mode="key"),
    ],
)
def test_the_schema_rejects_errors(change):
    manifest = json.loads(json.dumps(KUBERAY))
    change(manifest["spec"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, SCHEMA)


def test_the_manifest_fits_the_backend():
    """Each selected label has as many nodes as the backend has actors, and each node has one GPU."""
    groups = {group["groupName"]: group for group in KUBERAY["spec"]["workerGroupSpecs"]}
    assert (groups["samplers"]["replicas"], groups["learners"]["replicas"]) == (7, 1)
    for group in groups.values():
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert f'"market": "{group["labels"]["market"]}"' in PAGE
    head = KUBERAY["spec"]["headGroupSpec"]["template"]["spec"]
    assert {mount["name"] for mount in head["containers"][0]["volumeMounts"]} == {v["name"] for v in head["volumes"]}
    assert f"rayproject/ray:{KUBERAY['spec']['rayVersion']}-" in PAGE


def test_the_file_of_skypilot():
    assert SKYPILOT["num_nodes"] == 2
    assert "start_cluster" in SKYPILOT["run"]
    for script in (SKYPILOT["setup"], SKYPILOT["run"]):
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    sky = pytest.importorskip("sky", reason="SkyPilot is not installed")
    task = sky.Task.from_yaml_config(SKYPILOT, secrets_overrides=[("RAY_AUTH_TOKEN", "x")])
    assert (task.num_nodes, {*task.resources}.pop().accelerators) == (2, {"H100": 8})


def ray_options(command):
    from ray.scripts.scripts import cli

    return {option for parameter in cli.commands[command].params for option in parameter.opts}


def test_options_of_ray():
    pytest.importorskip("ray", reason="Ray is not installed")
    commands = [line for script in SCRIPTS for line in script.splitlines() if line.startswith("ray start")]
    commands += re.findall(r"`(ray start [^`]*)`", PAGE)
    assert len(commands) >= 3
    for command in commands:
        used = {word.partition("=")[0] for word in shlex.split(command) if word.startswith("--")}
        assert used <= ray_options("start"), command
    (run,) = [line for line in SLURM.splitlines() if "symmetric-run" in line]
    used = {word for word in shlex.split(run.partition(" -- ")[0])[3:] if word.startswith("--")}
    assert {word.partition("=")[0] for word in used} <= ray_options("symmetric-run") | ray_options("start")


def test_the_slurm_script_runs_one_ray_per_node(tmp_path):
    """With stand-ins for Slurm's commands and for Ray, each node gets the same address."""
    bin_directory = tmp_path / "bin"
    bin_directory.mkdir()
    programs = {
        "scontrol": 'printf "node1\\nnode2\\n"',
        "srun": 'case "$*" in *hostname*) echo "10.0.0.1 fe80::1";; *) for n in 1 2; do "$@"; done;; esac',
        "ray": 'echo "ray $* $RAY_ADDRESS $RAY_AUTH_MODE ${#RAY_AUTH_TOKEN}"',
    }
    for name, text in programs.items():
        program = bin_directory / name
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)
    environment = {"PATH": f"{bin_directory}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2"}
    script = SLURM.replace("python -c", f"{shlex.quote(sys.executable)} -c")
    done = subprocess.run(["bash"], input=script, env=environment, text=True, capture_output=True, check=False)
    line = "ray symmetric-run --address 10.0.0.1:6379 --min-nodes 2 --include-dashboard=false -- python train.py"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"{line} 10.0.0.1:6379 token 64"] * 2
