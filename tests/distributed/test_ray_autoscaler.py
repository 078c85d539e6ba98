"""Ray's own autoscaler starts nodes for the actors of a backend. Its nodes are processes of this machine."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from art_nb.distributed.placement import PORT_OPTIONS, free_ports, import_ray, set_token

CHILD = """
import asyncio, json, sys
import art_nb as art

async def main():
    options = {"device": "cpu", "sampler_options": {"resources": {"disk": 1}}, "wait_for_nodes_s": 180}
    backend = art.RayBackend(samplers=1, learners=1, path=sys.argv[2], address=sys.argv[1], **options)
    model = art.TrainableModel(name="scaled", project="tests", base_model=sys.argv[3])
    await model.register(backend)
    ray = backend._connection.ray
    await backend.scale(2)
    print(json.dumps([node["Resources"].get("disk", 0) for node in ray.nodes() if node["Alive"]]), flush=True)
    await backend.close()

asyncio.run(main())
"""
SAME_MACHINE = ("use_node_id_as_ip", "disable_node_updaters", "disable_launch_config_check")
COMMANDS = "initialization head_setup worker_setup setup head_start_ray worker_start_ray".split()


def config_of(address):
    """A cluster whose head can hold one actor. Each other node has one disk, which each replica needs."""
    node_types = {
        "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
        "disk": {"resources": {"CPU": 1, "disk": 1}, "node_config": {}, "min_workers": 0, "max_workers": 2},
    }
    return {
        "cluster_name": "fake",
        "max_workers": 2,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 10,
        "provider": {"type": "fake_multinode", "gcs_address": address, **dict.fromkeys(SAME_MACHINE, True)},
        "available_node_types": node_types,
        "head_node_type": "ray.head.default",
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        **{f"{name}_commands": [] for name in COMMANDS},
    }


def processes_with(mark):
    """The processes that have a text in their environment."""
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (directory / "environ").read_bytes():
                yield int(directory.name)


@pytest.fixture
def autoscaled(tmp_path):
    """The address and the environment of a cluster with an autoscaler."""
    set_token()  # before Ray is imported
    ray, mark, ports = import_ray(), uuid.uuid4().hex, free_ports(len(PORT_OPTIONS))
    address = f"{ray.util.get_node_ip_address()}:{ports[0]}"
    config = tmp_path / "autoscaler.json"
    directory = tempfile.mkdtemp(prefix="art-ray-", dir="/tmp")
    config.write_text(json.dumps(config_of(address)))
    options = [f"--{name}={port}" for name, port in zip(PORT_OPTIONS, ports, strict=True)]
    options += [
        f"--temp-dir={directory}",
        "--num-cpus=1",
        "--include-dashboard=false",
        "--disable-usage-stats",
        f"--autoscaling-config={config}",
    ]
    environment = os.environ | {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", "ART_TEST_MARK": mark}
    environment |= {"RAY_raylet_start_wait_time_s": "120"}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *options]
    with open(tmp_path / "ray.log", "wb") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    end = time.monotonic() + 240
    while "Ray runtime started" not in (tmp_path / "ray.log").read_text(errors="replace"):
        assert head.poll() is None and time.monotonic() < end
        time.sleep(0.2)
    yield address, environment
    head.terminate()
    head.wait()
    while pids := [*processes_with(mark)]:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nodes_are_started_for_the_actors(autoscaled, tmp_path, tiny_model_dir):
    address, environment = autoscaled
    command = [sys.executable, "-c", CHILD, address, str(tmp_path / "runs"), str(tiny_model_dir)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    disks = json.loads(next(line for line in child.stdout.splitlines() if line.startswith("[")))
    assert sorted(disks) == [0, 1, 1]
    assert "disk: 1 needed, 0 free" in child.stdout + child.stderr
