"""Without free resources, nothing waits for ever, and an actor that fails gives its resources back."""

import asyncio

import pytest

import art_nb as art
from art_nb.backends.loading import LoadSettings
from art_nb.distributed import learner_group
from art_nb.distributed.learner_group import LearnerGroup
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


def test_a_replica_that_cannot_load_the_model_ends(cluster, make_replicas, tmp_path):
    replicas = make_replicas(tmp_path, num_cpus=1)
    with pytest.raises(art.ArtError):
        replicas.scale(1)
    (actor,) = replicas.actors
    with pytest.raises(cluster.ray.exceptions.RayActorError):
        cluster.ray.get(actor.__ray_ready__.remote(), timeout=30)


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
