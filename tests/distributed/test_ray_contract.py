"""`RayBackend` meets the contract of backends, and names what is missing."""

import pytest

import art_nb as art


@pytest.mark.slow
async def test_the_contract_with_two_replicas_and_one_rank(make_backend, make_model):
    result = await art.check_backend(make_backend(samplers=2, learners=1), make_model("contract"), learning_rate=1e-2)
    assert result["step"] == 1
    assert result["rise"] > 0.1
    assert result["drift"] < 1e-4  # fp32 on one program


async def test_a_cluster_without_room_says_what_is_missing(make_backend, make_model):
    backend = make_backend(cpus_per_actor=100, wait_for_nodes_s=0.5)
    with pytest.raises(art.ServeError, match=r"CPU: 300 needed, \d+ free"):
        await make_model("no-room").register(backend)
    await backend.close()


@pytest.mark.slow
async def test_an_actor_that_cannot_load_the_model_raises_its_error(make_backend, tmp_path):
    model = art.TrainableModel(name="broken", project="tests", base_model=str(tmp_path))
    backend = make_backend(samplers=1)
    with pytest.raises(art.ArtError):
        await model.register(backend)
    await backend.close()
