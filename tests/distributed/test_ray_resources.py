"""Without free resources, nothing waits for ever, and an actor that fails gives its resources back."""

import asyncio
import threading
import time

import pytest

import art_nb as art
from art_nb.backends.loading import LoadSettings
from art_nb.distributed import learner_group
from art_nb.distributed.learner_group import LearnerGroup
from art_nb.distributed.placement import check_resources
from art_nb.distributed.replicas import ModelSpec, Replicas


@pytest.fixture
def make_replicas(cluster):
    """A maker of replicas with options of their actors. They end with the test."""
    made = []

    def make(weights, **options):
        spec = ModelSpec(name="few", weights=str(weights), base_model="tiny", settings=LoadSettings(device="cpu"))
        made.append(Replicas(spec, options, lambda key, message: None))
        return made[-1]

    yield make
    for replicas in made:
        replicas.close()


def test_scale_says_what_is_missing(make_replicas, tmp_path):
    replicas = make_replicas(tmp_path, num_cpus=100, resources={"disk": 1})
    with pytest.raises(art.ServeError, match=r"CPU: 400 needed, \d+ free; disk: 4 needed, 0 free"):
        replicas.scale(4, wait_s=0)
    assert replicas.size == 0 and not replicas._places


def test_a_replica_that_is_removed_before_it_serves_ends_the_wait_for_it(make_replicas, tmp_path):
    replicas = make_replicas(tmp_path, num_cpus=100)
    waiting = asyncio.run_coroutine_threadsafe(replicas._scale(2), replicas.loop)
    replicas.run(asyncio.sleep(0.1))
    assert len(replicas._places) == 2 and not waiting.done()
    replicas.run(replicas._leave(1))
    with pytest.raises(art.ServeError, match="Replica 1 of few was removed before it served"):
        waiting.result(timeout=30)


def has_ended(ray, actor):
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=30)
    except ray.exceptions.RayActorError:
        return True
    return False


def test_a_replica_that_cannot_load_the_model_ends(cluster, make_replicas, tmp_path):
    replicas = make_replicas(tmp_path, num_cpus=1)
    with pytest.raises(art.ArtError):
        replicas.scale(1)
    (actor,) = replicas.actors
    deadline = time.monotonic() + 30  # Ray ends the process a moment later
    while not has_ended(cluster.ray, actor):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_ranks_without_a_node_raise_an_error(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(learner_group, "PROCESS_START_S", 0.0)
    spec = ModelSpec(name="few", weights=str(tmp_path), base_model="tiny", settings=LoadSettings(device="cpu"))
    group = LearnerGroup(spec, 2, {"num_cpus": 100}, lambda key, message: None, wait_s=0.5)
    with pytest.raises(art.TrainError, match=r"2 of 2 ranks .* \(CPU: 200 needed, \d+ free\)"):
        group.open()
    assert group.actors == []


async def test_scale_checks_its_number_before_register(make_backend):
    backend = make_backend()
    with pytest.raises(ValueError, match="samplers=0"):
        await backend.scale(0)
    assert backend.layout.samplers == 2
    await backend.close()


def reservations(state):
    """The bundles of the placement groups in a state."""
    from ray.util import placement_group_table

    groups = [group for group in placement_group_table().values() if group["state"] == state]
    return [[*group["bundles"].values()] for group in groups]


def test_missing_resources_are_requested_from_an_autoscaler(cluster):
    told, errors = [], []

    def check():
        try:
            check_resources(cluster.ray, [{"num_cpus": 90, "resources": {"disk": 1}}] * 2, 4.0, told.append)
        except art.ServeError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=check)
    waiting.start()
    seen = []
    while waiting.is_alive():
        seen += reservations("PENDING")
        time.sleep(0.05)
    assert [{"CPU": 90, "disk": 1}] * 2 in seen
    assert reservations("PENDING") == [] and reservations("CREATED") == []
    assert len(told) == 1 and "CPU: 180 needed" in told[0]
    assert "disk: 2 needed, 0 free" in errors[0]


def test_the_wait_ends_when_resources_become_free(cluster):
    ray, told = cluster.ray, []
    everything = ray.cluster_resources()["CPU"]

    @ray.remote(num_cpus=everything)
    class Holder:
        def ready(self):
            return True

    holder = Holder.remote()
    assert ray.get(holder.ready.remote(), timeout=120)

    def tell(text):
        told.append(text)
        ray.kill(holder)

    check_resources(ray, [{"num_cpus": everything}], 120, tell)
    assert len(told) == 1
