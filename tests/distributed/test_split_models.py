"""A base model that is split over several GPUs is refused when the backend is created. Ray is not needed."""

import pytest

import art_nb as art
from art_nb.core.types import BackendMissing


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"gpus_per_sampler": 2}, "gpus_per_sampler=2"),
        ({"gpus_per_learner": 8}, "gpus_per_learner=8"),
        ({"sampler_options": {"num_gpus": 4}}, "sampler_options={'num_gpus': 4}"),
        ({"learner_options": {"num_gpus": 1.5}}, "learner_options={'num_gpus': 1.5}"),
        ({"engine_args": {"tensor_parallel_size": 2}}, "engine_args={'tensor_parallel_size': 2}"),
        ({"engine_args": {"pipeline_parallel_size": 2}}, "engine_args={'pipeline_parallel_size': 2}"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"fsdp": True}, "fsdp=True"),
    ],
)
def test_a_split_model_is_refused_with_what_to_do(tmp_path, options, name):
    with pytest.raises(BackendMissing) as refused:
        art.RayBackend(path=tmp_path, **options)
    message = str(refused.value)
    assert f"`{name}`" in message
    assert "To use more GPUs, increase `samplers` or `learners`" in message


@pytest.mark.parametrize(
    "options",
    [
        {"gpus_per_sampler": 1, "gpus_per_learner": 0.5},
        {"engine_args": {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.8}},
        {"sampler_options": {"num_gpus": 1, "label_selector": {"market": "spot"}}},
    ],
)
def test_one_gpu_for_each_actor_is_accepted(tmp_path, options):
    assert art.RayBackend(path=tmp_path, **options).layout.samplers == 2
