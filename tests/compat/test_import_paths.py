"""Every path that a script of ART imports from resolves here; what cannot exist says so at its first use."""

import asyncio
import importlib
import inspect
import json
import pickle
import pydoc
import socket
import subprocess
import sys

import openai
import pytest
from art_nb.types import ArtError, BackendMissing, LocalServingUnavailableError, ServeError
from support.warm import warm_python

import art_nb as art
from art_nb.compat.import_paths import ART_PATHS, MOVED, sources, whole_modules
from art_nb.models import clients
from art_nb.models.model import Model, TrainableModel

LINES = [
    "from art_nb.local import LocalBackend",
    "from art_nb.local.backend import LocalBackend",
    "from art_nb.rewards import ruler, ruler_score_group",
    "from art_nb.rewards.ruler import ruler_score_group, TrajectoryScore, DEFAULT_RUBRIC",
    "from art_nb.utils import format_message, iterate_dataset, limit_concurrency, log_http_errors, retry",
    "from art_nb.utils import get_model_step",
    "from art_nb.utils.iterate_dataset import DatasetBatch, iterate_dataset",
    "from art_nb.utils.limit_concurrency import limit_concurrency",
    "from art_nb.utils.sft import create_lr_schedule, create_sft_dataset_iterator, iterate_file, train_sft_from_file",
    "from art_nb.utils.litellm import convert_litellm_choice_to_openai",
    "from art_nb.utils.strip_logprobs import strip_logprobs",
    "from art_nb.utils.record_provenance import record_provenance",
    "from art_nb.utils.benchmark_rollout import benchmark_rollout",
    "from art_nb.utils.get_repo_root_path import get_repo_root_path",
    "from art_nb.utils.output_dirs import get_default_art_path, get_model_dir, get_step_checkpoint_dir",
    "from art_nb.utils.benchmarking.load_trajectories import load_trajectories",
    "from art_nb.utils.benchmarking.types import BenchmarkModelKey",
    "from art_nb.utils.benchmarking.charts import percentage_comparison_bar_chart, training_progress_chart",
    "from art_nb.utils.benchmarking import load_aggregated_trajectories",
    "from art_nb.utils.deployment import deploy_model, TogetherDeploymentConfig",
    "from art_nb.types import Messages, MessagesAndChoices, Tools, TrainConfig, TrainSFTConfig, ServerlessTrainResult",
    "from art_nb.trajectories import Trajectory, TrajectoryGroup",
    "from art_nb.gather import gather_trajectory_groups",
    "from art_nb.model import Model, TrainableModel",
    "from art_nb.backend import Backend",
    "from art_nb.dev import EngineArgs, InitArgs, InternalModelConfig, OpenAIServerConfig",
    "from art_nb.dev import PeftArgs, ServerArgs, TrainConfig, TrainerArgs",
    "from art_nb.dev.model import InternalModelConfig, LoRAConfig",
    "from art_nb.mcp import GeneratedScenarioCollection, MCPResource, MCPTool, complete_task_tool, generate_scenarios",
    "from art_nb.mcp.generate_scenarios import preview_scenarios",
    "from art_nb.utils.logging import err, info, ok, step, warn",
    "from art_nb.errors import ARTError, LoRADeploymentError, LocalServingUnavailableError",
    "from art_nb.serverless.backend import ServerlessBackend",
    "from art_nb.tinker import TinkerBackend",
    "from art_nb.tinker_native import TinkerNativeBackend",
    "from art_nb.megatron import MegatronBackend",
    "from art_nb.skypilot import SkyPilotBackend",
    "from art_nb.trainer_rank import TrainerRank",
    "from art_nb.distributed import ArtRuntime, ClusterSpec, DistributedRolloutExecutor, GpuPlacement, HostSpec",
    "from art_nb.distributed import ReplicaManager",
]
TOP = (
    "dev LoRAConfig LocalServingUnavailableError LocalTrainResult MegatronRuntimeConfig MegatronTopologyConfig "
    "ServerlessBackend ServerlessTrainResult get_megatron_runtime_config init_megatron_runtime_config"
).split()
ORDERS = """
import inspect, json, sys
for line in json.loads(sys.argv[1]): exec(line)
import art_nb as art
print(json.dumps([inspect.isfunction(art.rewards.ruler), inspect.isfunction(art.utils.iterate_dataset),
                  inspect.isfunction(art.utils.retry), inspect.isfunction(art.backend), "torch" in sys.modules]))
"""


def fresh(source, *arguments, python=sys.executable):
    """What a program prints in a process of its own."""
    done = subprocess.run([python, "-c", source, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# paths


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_a_script_of_art_runs(line):
    names = {}
    exec(line, names)
    assert all(value is not None for value in names.values())


@pytest.mark.parametrize("path", ART_PATHS)
def test_every_name_of_the_table_is_there(path):
    module = importlib.import_module(f"art_nb.{path}")
    assert module.__name__ == f"art_nb.{path}"
    for name, home in sources(path).items():
        assert getattr(module, name) is getattr(importlib.import_module(f"art_nb.{home}"), name)
    for home in whole_modules(path):
        whole = importlib.import_module(f"art_nb.{home}")
        assert all(getattr(module, name) is getattr(whole, name) for name in whole.__all__)


@pytest.mark.parametrize("name", TOP)
def test_the_names_at_the_top(name):
    assert name in art.__all__
    assert getattr(art, name) is not None


def test_attributes_are_enough():
    assert art.local.LocalBackend is art.local.backend.LocalBackend is art.LocalBackend
    assert art.utils.sft.train_sft_from_file.__module__ == "art_nb.training.sft"
    assert art.dev.InternalModelConfig(init_args=art.dev.InitArgs(max_seq_length=8192)) == {
        "init_args": {"max_seq_length": 8192}
    }
    for asked in (art, art.utils, art.types):
        with pytest.raises(AttributeError, match=f"module '{asked.__name__}' has no attribute 'nothing'"):
            _ = asked.nothing
    with pytest.raises(AttributeError, match="No art_nb.rewards attribute nothing"):  # lazy_loader's words
        _ = art.rewards.nothing
    with pytest.raises(ModuleNotFoundError, match="art_nb.utils.nothing"):
        importlib.import_module("art_nb.utils.nothing")


def test_arts_dictionaries_configure_a_model():
    model = TrainableModel(
        name="a",
        project="p",
        base_model="b",
        lora_config=art.LoRAConfig(rank=4),
        _internal_config=art.dev.InternalModelConfig(peft_args=art.dev.PeftArgs(lora_alpha=8)),
    )
    assert model.lora_options() == {"rank": 4, "alpha": 8}
    model._internal_config = art.dev.InternalModelConfig(
        init_args=art.dev.InitArgs(max_seq_length=8192),
        trainer_args=art.dev.TrainerArgs(optim="sgd", anything=1),
        engine_args=art.dev.EngineArgs(enforce_eager=True, gpu_memory_utilization=0.8, num_scheduler_steps=1),
    )
    assert model._internal_config["trainer_args"] == {"optim": "sgd", "anything": 1}
    assert model.lora_options() == {"rank": 4}


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["import art_nb.rewards.ruler", "import art_nb.utils.iterate_dataset", "import art_nb.utils.retry"],
        ["from art_nb.utils.iterate_dataset import DatasetBatch", "from art_nb.utils import iterate_dataset"],
        ["import art_nb", "art_nb.rewards.ruler", "import art_nb.rewards.ruler", "from art_nb.utils import *"],
        ["import art_nb.backend"],
    ],
    ids=["none", "files first", "file then name", "name then file", "backend"],
)
def test_no_file_hides_the_function_of_its_name(lines):
    *functions, _ = fresh(ORDERS, json.dumps(lines), python=warm_python())
    assert functions == [True] * 4


def test_looking_around_loads_nothing_heavy():
    looked = [
        "import art_nb.local",
        "import art_nb.utils.sft",
        "dir(art_nb.local)",
        "import art_nb.dev",
        "from art_nb.utils import format_message",
        "from art_nb.utils.sft import iterate_file",
    ]
    *_, heavy = fresh(ORDERS.replace("art.backend", "None"), json.dumps(looked))
    assert not heavy


def test_a_path_is_a_module_like_others():
    module = importlib.import_module("art_nb.utils.sft")
    assert importlib.reload(module) is module
    assert "train_sft_from_file" in pydoc.render_doc(module)
    assert "iterate_file" in dir(module)
    assert pickle.loads(pickle.dumps(module.SFTChunk)) is art.utils.sft.SFTChunk
    rewards = importlib.import_module("art_nb.rewards")
    assert inspect.getsource(rewards).startswith('"""RULER, judges')
    ruler = importlib.import_module("art_nb.rewards.ruler")
    assert inspect.getmodule(rewards.ruler_score_group) is ruler
    assert ruler.ruler is rewards.ruler


@pytest.mark.parametrize("old", MOVED)
def test_a_module_that_has_moved_is_the_same_under_its_old_path(old):
    sys.modules.pop(f"art_nb.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"art_nb.{old} has moved to art_nb.{MOVED[old]}"):
        module = importlib.import_module(f"art_nb.{old}")
    assert module is importlib.import_module(f"art_nb.{MOVED[old]}")


# what cannot exist


@pytest.mark.parametrize(
    "name",
    [
        "ServerlessBackend",
        "MegatronBackend",
        "MegatronRuntimeConfig",
        "MegatronTopologyConfig",
        "init_megatron_runtime_config",
        "get_megatron_runtime_config",
    ],
)
def test_what_cannot_exist_names_the_way_out(name):
    with pytest.raises(BackendMissing, match="art.LocalBackend"):
        getattr(art, name)(api_key="key")


@pytest.mark.parametrize(
    ("path", "name", "instead"),
    [
        ("skypilot", "SkyPilotBackend", "art.LocalBackend"),
        ("tinker", "TinkerBackend", "art.LocalBackend"),
        ("tinker_native", "TinkerNativeBackend", "art.LocalBackend"),
        ("trainer_rank", "TrainerRank", "loss_fn="),
        ("utils.deployment", "TogetherDeploymentConfig", "PEFT directory"),
        ("utils.deployment", "WandbDeploymentConfig", "--lora-modules"),
        ("utils.benchmarking.pull_model_trajectories", "pull_model_trajectories", "aws s3 sync"),
        *(
            ("distributed", name, "art.RayBackend")
            for name in "ArtRuntime ClusterSpec DistributedRolloutExecutor GpuPlacement HostSpec ReplicaManager".split()
        ),
    ],
)
async def test_what_has_a_path_of_its_own_names_the_way_out_too(path, name, instead):
    use = getattr(importlib.import_module(f"art_nb.{path}"), name)
    with pytest.raises(BackendMissing, match=instead) as told:
        await use(api_key="key")
    assert str(told.value).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("ForbiddenBucketCreationError", "ARTError"),
        ("LoRADeploymentError", "ARTError"),
        ("UnsupportedLoRADeploymentProviderError", "LoRADeploymentError"),
        ("UnsupportedBaseModelDeploymentError", "LoRADeploymentError"),
    ],
)
def test_an_error_of_art_is_caught_as_in_art(name, family):
    with pytest.raises(getattr(art.errors, family), match="no such provider"):
        raise getattr(art.errors, name)("no such provider")


async def test_nothing_is_deployed_and_nothing_goes_to_s3(tmp_path):
    from art_nb.errors import ARTError
    from art_nb.utils.deployment import deploy_model
    from art_nb.utils.s3 import pull_model_from_s3

    with pytest.raises(ARTError, match="checkpoints/0008"):
        await deploy_model(model=None, checkpoint_path="checkpoints/0008", step=8, provider="together", verbose=True)
    with pytest.raises(ARTError, match="S3"):
        await pull_model_from_s3(model_name="003", project="2048")
    backend = art.LocalBackend(path=tmp_path, verbose=False)
    model = TrainableModel(name="a", project="p", base_model="b")
    for call in (backend._experimental_push_to_s3, backend._experimental_pull_from_s3):
        with pytest.raises(ARTError, match="S3"):
            await call(model, s3_bucket="bucket", prefix="p", verbose=True)
    with pytest.raises(ARTError, match="S3"):
        await backend._experimental_fork_checkpoint(model, from_model="b", from_s3_bucket="bucket", prefix="p")
    assert not isinstance(backend, art.ServerlessBackend)


# an endpoint that does not answer


@pytest.fixture
def closed():
    """An address where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/v1"


def asking(client):
    return client.with_options(max_retries=0).chat.completions.create(
        model="m", messages=[{"role": "user", "content": "?"}]
    )


async def test_a_trained_models_silent_endpoint_is_named(closed):
    address = {"inference_base_url": closed, "inference_api_key": "key"}
    trained = TrainableModel(name="a", project="p", base_model="b", **address)
    with pytest.raises(LocalServingUnavailableError, match="Register the model again") as told:
        await asking(trained.openai_client())
    assert closed in str(told.value)
    assert isinstance(told.value, openai.APIConnectionError) and isinstance(told.value, ServeError)
    assert isinstance(told.value, ArtError) and isinstance(told.value.request, clients.httpx.Request)
    assert str(pickle.loads(pickle.dumps(told.value))) == str(told.value)
    with pytest.raises(openai.APIConnectionError) as plain:
        await asking(Model(name="a", project="p", **address).openai_client())
    assert not isinstance(plain.value, ArtError)


async def test_a_slow_endpoint_is_not_a_silent_one():
    over = asyncio.Event()

    async def never(reader, writer):
        await over.wait()

    server = await asyncio.start_server(never, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    model = TrainableModel(name="a", project="p", base_model="b", inference_base_url=url, inference_api_key="key")
    with pytest.raises(openai.APITimeoutError):
        await asking(model.openai_client().with_options(timeout=0.1))
    over.set()
    server.close()


# what a tracker is told


def test_a_noted_setting_cannot_change():
    model = Model(name="a", project="p")
    model.update_wandb_config({"games": 3, "seed": 1})
    model.update_wandb_config({"games": 3, "rubric": "short"})
    copy = model.model_copy(deep=True)
    with pytest.raises(ValueError, match="seed"):
        model.update_wandb_config({"seed": 2, "other": 1})
    assert model._wandb_config == {"games": 3, "seed": 1, "rubric": "short"}
    copy.update_wandb_config({"mine": 1})
    assert "mine" not in model._wandb_config
