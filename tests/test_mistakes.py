"""Common mistakes: each is an error or a warning that says what happened, where, and what to do."""

import asyncio
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import openai
import pytest
from pydantic import ValidationError
from support.registered import QUESTION, a_group, ask, better_and_worse, heard
from support.warm import warm_python

import art_nb as art
from art_nb.backends.options import KNOWN_OPTIONS, TRAIN_PARAMETERS
from art_nb.core.events import GradientStep, RolloutStarted, Warned
from art_nb.core.types import BackendMissing, JudgeError, RolloutError, ServeError, StoreError, TokenError, TrainError
from art_nb.learners.settings import StepConfig, check_step
from art_nb.pipeline.trainer import PipelineTrainer
from art_nb.rollouts.trajectories import lacks_prompt
from art_nb.training.doctor import doctor


@pytest.fixture(scope="module")
async def place(tiny_model_dir, tmp_path_factory):
    """A registered tiny model, its backend and a group, shared by the tests of this file."""
    model = art.TrainableModel(name="tiny", project="tests", base_model=str(tiny_model_dir))
    async with art.LocalBackend(path=tmp_path_factory.mktemp("runs"), verbose=False) as backend:
        await model.register(backend)
        yield model, backend, await a_group(model)


@pytest.fixture
def fresh(tiny_model_dir, tmp_path):
    """A model that is not registered, and a backend."""
    model = art.TrainableModel(name="fresh", project="tests", base_model=str(tiny_model_dir))
    return model, art.LocalBackend(path=tmp_path / "runs", verbose=False)


def assert_words(error, words):
    missing = [word for word in words if word not in str(error)]
    assert missing == [], str(error)


async def never(model, scenario):
    """A rollout that must not run."""
    raise AssertionError("a rollout was started")


async def play(model, scenario, **fields):
    """A rollout with a reply of one token."""
    choice = await ask(model, max_tokens=1)
    return art.Trajectory(messages_and_choices=[*QUESTION, choice], **{"reward": float(scenario)} | fields)


def begin(model, rollout=never, scenarios=(1, 2), **options):
    """A short run without a display."""
    return art.train(
        model,
        rollout,
        scenarios,
        **{"steps": 50, "groups_per_step": 1, "rollouts_per_group": 2, "show": False} | options,
    )


# options, in every entry point

WRONG = {
    "lr": ({"lr": 1e-3}, ["Unknown option `lr`", "'learning_rate'", "docs/options.md"]),
    "misspelled": ({"learing_rate": 3}, ["Unknown option `learing_rate`", "'learning_rate'"]),
    "negative": ({"learning_rate": -1e-4}, ["`learning_rate=-0.0001`", "at least 0"]),
    "text": ({"learning_rate": "1e-4"}, ["`learning_rate='1e-4'`", "quotes"]),
    "not a number": ({"learning_rate": float("nan")}, ["`learning_rate=nan`"]),
    "loss": ({"loss": "gprpo"}, ["`loss='gprpo'`", "'grpo'", "cispo"]),
    "loss in ART's name": ({"loss_fn": "gprpo"}, ["`loss_fn='gprpo'`", "'grpo'"]),
    "option of a loss": ({"loss_options": {"is_mx": 3}}, ["cispo", "'is_mx'", "'is_max'"]),
    "option passed on": ({"loss": "dapo", "loss_options": {"eps_hig": 3}}, ["'eps_high'"]),
    "KL": ({"beta": -1}, ["`beta=-1`", "at least 0"]),
    "epsilon": ({"epsilon": "0.2"}, ["`epsilon='0.2'`", "quotes"]),
    "balance": ({"advantage_balance": 3}, ["`advantage_balance=3`", "from -1 to 1"]),
    "rows": ({"rows_per_step": 2.5}, ["`rows_per_step=2.5`", "whole number"]),
    "constant": ({"reduction": "constant"}, ["max_tokens"]),
    "flag": ({"precalculate_logprobs": "no"}, ["`precalculate_logprobs='no'`", "True or False"]),
    "of the run": ({"group_per_step": 3}, ["Unknown option `group_per_step`"]),
}


@pytest.mark.parametrize(("options", "words"), WRONG.values(), ids=WRONG)
async def test_a_wrong_option_is_an_error_in_every_entry_point(place, options, words):
    model, backend, group = place
    events, step = heard(backend, RolloutStarted, GradientStep), await model.get_step()
    with pytest.raises(TrainError) as caught:
        begin(model, **options)
    assert_words(caught.value, words)
    with pytest.raises(TrainError) as caught:
        await backend.train(model, [group], **options)
    assert_words(caught.value, words)
    with pytest.raises(TrainError) as caught:
        await model.train([group], _config=options)
    assert_words(caught.value, words)
    with pytest.raises(TrainError) as caught:
        PipelineTrainer(model, backend, never, [1], None, **options)
    assert_words(caught.value, words)
    assert events == []
    assert await model.get_step() == step
    assert model.store.steps("train") == []


def test_a_remote_backend_checks_before_it_asks_its_server(fresh):
    backend = art.Backend(base_url="http://127.0.0.1:9", path=fresh[1].path)
    backend._registered["tests/fresh"] = None  # registered; nobody answers there
    for options, words in WRONG.values():
        with pytest.raises(TrainError) as caught:
            backend.check_options(fresh[0], options)
        assert_words(caught.value, words)


def test_a_misspelled_option_of_the_run_is_recognized(place):
    with pytest.raises(TrainError, match="Did you mean 'groups_per_step'"):
        begin(place[0], group_per_step=2)


async def test_unusual_values_print_a_warning_once(fresh, capsys):
    model, backend = fresh
    backend.verbose = True
    events = heard(backend, Warned)
    async with backend:
        await model.register(backend)
        for _ in range(2):
            backend.check_options(model, {"learning_rate": 10, "beta": 20})
        talk = art.Trajectory(messages_and_choices=[*QUESTION, {"role": "assistant", "content": "A1"}])
        await model.train_sft([talk], art.TrainSFTConfig(learning_rate=3.0))
    assert [event.message.partition(" is ")[0] for event in events] == [
        "`learning_rate=10`",
        "`beta=20`",
        "`learning_rate=3`",
    ]
    assert capsys.readouterr().out.count("unusually large") == 3


RUN = {
    "steps": -1,
    "groups_per_step": 0,
    "rollouts_per_group": "8",
    "max_exceptions": -1,
    "timeout_s": 0,
    "max_staleness": -1,
    "budget_s": "1h",
    "seed": "a",
    "after_each": "judge",
    "on_step": 3,
}


@pytest.mark.parametrize("name", RUN)
async def test_a_wrong_number_of_the_run_is_an_error(place, name):
    with pytest.raises(TrainError) as caught:
        begin(place[0], **{name: RUN[name]})
    assert_words(caught.value, [f"Invalid `{name}={RUN[name]!r}`", "expected"])


CONFIGS = {
    "name": (lambda: art.TrainConfig(lerning_rate=1), "Did you mean 'learning_rate'"),
    "sft name": (lambda: art.TrainSFTConfig(learnin_rate=1), "Did you mean 'learning_rate'"),
    "sft rate": (lambda: art.TrainSFTConfig(learning_rate=-1), "greater than or equal to 0"),
    "pipeline": (lambda: art.PipelineRuntimeConfig(min_batchsize=1), "Did you mean 'min_batch_size'"),
    "model": (lambda: art.TrainableModel(nam="a", project="b", base_model="c"), "Did you mean 'name'"),
}


@pytest.mark.parametrize(("make", "words"), CONFIGS.values(), ids=CONFIGS)
def test_a_configuration_suggests_the_closest_field(make, words):
    with pytest.raises(ValidationError, match=words):
        make()


def test_every_option_of_art_is_known():
    assert (
        art.dev.TrainConfig.__annotations__.keys() | art.TrainConfig.model_fields.keys() | TRAIN_PARAMETERS
    ) <= KNOWN_OPTIONS


# the kinds of arguments


def test_swapped_and_missing_arguments(place):
    model = place[0]
    calls = {
        "swapped": (lambda: art.train(never, model, [1]), ["`model`", "swapped", "art.train(model, rollout,"]),
        "called": (lambda: begin(model, never(model, 1)), ["`rollout`", "without calling it"]),
        "text": (lambda: begin(model, never, "abc"), ["`scenarios`", "list", "str", "[scenario]"]),
        "number": (lambda: begin(model, never, 5), ["`scenarios`", "received int", "range(5)"]),
        "generator": (lambda: begin(model, never, (i for i in range(3))), ["`scenarios`", "list(…)"]),
        "empty": (lambda: begin(model, never, []), ["no scenarios"]),
        "prompted": (lambda: begin(art.Model(name="a", project="b")), ["no weights", "art.TrainableModel"]),
    }
    for make, words in calls.values():
        with pytest.raises(TrainError) as caught:
            make()
        assert_words(caught.value, words)


async def test_a_rollout_that_is_not_async(place):
    for plain, kind in ((lambda model, scenario: 3, "int"), (lambda model, scenario: art.Trajectory(), "Trajectory")):
        with pytest.raises(RolloutError) as caught:
            await begin(place[0], plain)
        assert_words(caught.value, ["not async", kind, "async def"])


async def test_groups_that_are_none(place):
    model, backend, group = place
    pending = art.TrajectoryGroup([play(model, 1), play(model, 2)])
    assert repr(pending) == "PendingGroup(2 rollouts that have not started. Await it, or gather it.)"
    for groups, words in (
        (art.gather_trajectory_groups([]), ["coroutine", "await"]),
        ([pending], ["not finished", "gather"]),
        (group.trajectories, ["Trajectory", "art.TrajectoryGroup(trajectories)"]),
        (3, ["list", "int"]),
    ):
        with pytest.raises(TypeError) as caught:
            await backend.train(model, groups)
        assert_words(caught.value, words)
    with pytest.raises(TypeError, match=r"art\.TrajectoryGroup\(trajectories\)"):
        await model.train(group.trajectories)
    with pytest.raises(TypeError, match="received a coroutine"):
        await model.log(art.gather_trajectory_groups([]))
    assert (await backend.train(model, group, learning_rate=0.0)).metrics["data/step_num_groups_submitted"] == 1


async def test_gathering_what_is_no_list_of_groups(place):
    model = place[0]
    with pytest.raises(TypeError, match=r"takes a list of groups; it received one TrajectoryGroup.*\[\.\.\.\]"):
        await art.gather_trajectory_groups(art.TrajectoryGroup([play(model, 1)]), pbar_desc=None)
    with pytest.raises(RolloutError, match="takes groups; it received a Trajectory.*art.TrajectoryGroup"):
        await art.gather_trajectory_groups([play(model, 1)], pbar_desc=None)
    with pytest.raises(TypeError, match="received a coroutine instead of a list"):
        await art.gather_trajectories(play(model, 1), pbar_desc=None)
    with pytest.raises(TypeError, match="It received int.*async def"):
        art.TrajectoryGroup([1, 2])
    with pytest.raises(TypeError, match="not both.*coroutine"):
        art.TrajectoryGroup([play(model, 1), art.Trajectory()])


async def test_supervised_training_on_what_is_no_list(place):
    model = place[0]
    with pytest.raises(TypeError, match="takes a list of trajectories; it received one Trajectory"):
        await model.train_sft(art.Trajectory())
    with pytest.raises(TokenError, match=r"Conversation 0 is a dict: make it an art\.Trajectory"):
        await model.train_sft([{"messages": []}])
    with pytest.raises(TrainError, match=r"expected an art\.TrainSFTConfig, received a dict"):
        await model.train_sft([], {"learning_rate": 1e-4})


# models and places


@pytest.mark.parametrize(
    ("name", "words"), [("smolm2-135m", "Did you mean 'smollm2-135m'"), ("nowhere/at/all", "no base model")]
)
async def test_a_base_model_that_does_not_exist(fresh, name, words):
    with pytest.raises(StoreError, match=words):
        await fresh[0].model_copy(update={"base_model": name}).register(fresh[1])


async def test_a_hub_that_cannot_be_reached_is_asked_once(fresh, monkeypatch):
    from huggingface_hub import constants

    asked, server = [], socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{server.getsockname()[1]}"
    server.close()  # nobody listens there any more
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr("art_nb.backends.loading.load_policy", lambda *_, **__: asked.append(1))
    with pytest.raises(StoreError) as caught:
        await fresh[0].model_copy(update={"base_model": "org/name"}).register(fresh[1])
    assert_words(caught.value, ["'org/name'", address, "cannot be reached", "Check the network", "directory"])
    assert asked == []


async def test_a_model_that_is_not_registered(fresh):
    line = r"Call `await model\.register\(art\.LocalBackend\(\)\)` first"
    with pytest.raises(art.NotRegisteredError, match=rf"fresh has no backend yet\. {line}"):
        begin(fresh[0])
    forgotten = fresh[0].register(fresh[1])
    forgotten.close()
    with pytest.raises(ValueError, match=f"no backend yet. {line}"):  # the class of earlier versions
        begin(fresh[0])
    with pytest.raises(art.NotRegisteredError, match=rf"fresh has no endpoint yet\. {line}"):
        fresh[0].openai_client()
    with pytest.raises(art.NotRegisteredError, match="Give it inference_base_url and inference_api_key"):
        art.Model(name="judge", project="tests").openai_client()
    with pytest.raises(TrainError, match="takes a backend such as art.LocalBackend"):
        await fresh[0].register(art.LocalBackend)


def test_wrong_options_of_a_backend():
    with pytest.raises(TypeError, match="pth"):
        art.LocalBackend(pth=".art")


@pytest.mark.parametrize(
    ("sampler", "kind", "words"), [("vlm", art.ArtError, "vllm"), ("vllm", ImportError, "pip install")]
)
async def test_a_sampler_that_is_not_there(fresh, tmp_path, sampler, kind, words):
    if sampler == "vllm":
        try:
            from importlib.metadata import version

            version("vllm")
            pytest.skip("vLLM is installed")
        except PackageNotFoundError:
            pass
    with pytest.raises(kind, match=words):
        await fresh[0].register(art.LocalBackend(path=tmp_path, sampler=sampler))


async def test_another_base_model_under_the_same_name(place):
    model = place[0].model_copy(update={"base_model": "smollm2-135m"})
    with pytest.raises(StoreError, match="not smollm2-135m. Give the model another `name`"):
        await model.register(place[1])


async def test_a_directory_that_cannot_be_one(fresh, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError) as caught:
        await fresh[0].register(art.LocalBackend(path=tmp_path / "file", verbose=False))
    assert_words(caught.value, ["`path=", "it is a file", "directory"])


async def test_registering_again_and_elsewhere_is_announced(fresh, tmp_path, capsys):
    model, backend = fresh
    backend.verbose = True
    async with backend, art.LocalBackend(path=tmp_path / "other", verbose=False) as other:
        await model.register(backend)
        await model.register(backend)
        assert "loaded again" in capsys.readouterr().out
        with pytest.warns(UserWarning, match="another backend.*await backend.close"):
            await model.register(other)


async def test_training_after_the_backend_was_closed(fresh):
    model, backend = fresh
    async with backend:
        await model.register(backend)
    for call in (lambda: begin(model), lambda: backend.runtime(model)):
        with pytest.raises(ServeError) as caught:
            call()
        assert_words(caught.value, ["its backend was closed", "Make a new backend", "last checkpoint"])


async def test_training_one_model_twice_at_once(place):
    model = place[0]
    run = begin(model, play, steps=9, start=False)
    run.start()
    try:
        with pytest.raises(TrainError, match="is being trained already.*stop that run first"):
            begin(model, play, steps=9)
    finally:
        run.stop()


def test_looking_at_what_is_not_there(tmp_path):
    with pytest.raises(StoreError, match="There is no .*nowhere"):
        art.view(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="holds no rollouts. Pass a run directory"):
        art.view(tmp_path)
    (tmp_path / ".art").mkdir()
    with pytest.raises(StoreError, match=r"holds no rollouts. The runs are in .*\.art\."):
        art.view(tmp_path)


# rollouts and rewards


@pytest.mark.parametrize("reward", [None, "good"])
def test_a_reward_that_is_no_number(reward):
    with pytest.raises(ValidationError) as caught:
        art.Trajectory(reward=reward)
    assert_words(caught.value, [f"`reward={reward!r}`", "expected a number", "reward function"])


async def test_a_reward_that_is_not_finite_and_a_rollout_that_returns_nothing(place):
    with pytest.raises(RolloutError, match="reward is nan"):
        await begin(place[0], lambda model, scenario: play(model, scenario, reward=float("nan")))

    async def nothing(model, scenario):
        await play(model, scenario)

    with pytest.raises(RolloutError, match="returned NoneType.*art.Trajectory"):
        await begin(place[0], nothing)


async def learn(place, groups, capsys):
    """What a step that learns nothing prints."""
    model, backend, _ = place
    backend.runtime(model).verbose = True
    result = await backend.train(model, groups)
    assert result.metrics["data/step_num_gradient_steps"] == 0
    printed = capsys.readouterr().out
    assert f"Nothing is learned in step {result.step}: " in printed
    return printed


async def test_steps_that_teach_nothing_say_why(place, capsys):
    replies = [entry for t in place[2] for entry in t.messages_and_choices if not isinstance(entry, dict)]
    flat = better_and_worse(replies[:2], [0.0, 0.0])
    printed = await learn(place, [flat, better_and_worse(replies[2:4], [0.0, 0.0])], capsys)
    assert_words(printed, ["all rewards of the step are 0", "check that the rollout computes the reward"])
    printed = await learn(place, [flat, better_and_worse(replies[2:4], [1.0, 1.0])], capsys)
    assert_words(printed, ["in each of 2 groups", "partial credit"])
    printed = await learn(place, [better_and_worse(replies[:1], [0.0]), better_and_worse(replies[1:2], [1.0])], capsys)
    assert_words(printed, ["one trajectory", "rollouts_per_group to 2 or more"])
    texts = [
        art.Trajectory(messages_and_choices=[*QUESTION, {"role": "assistant", "content": "A1"}], reward=i)
        for i in range(2)
    ]
    assert_words(await learn(place, [art.TrajectoryGroup(texts)], capsys), ["no choice", "response.choices[0]"])


def test_one_rollout_a_group_is_named_before_the_first(place, capsys):
    run = begin(place[0], rollouts_per_group=1, start=False)
    assert run.status == "ready"
    assert_words(capsys.readouterr().out, ["`rollouts_per_group=1`", "nothing to compare", "2 or more"])


async def test_a_choice_before_its_prompt_is_reported(place):
    model, backend, _ = place
    choice, user, system = await ask(model), QUESTION[0], {"role": "system", "content": "Play."}
    assert [
        lacks_prompt(entries)
        for entries in (
            [user, choice],
            [system, user, choice, user],
            [system, choice],
            [],
            [user],
            [choice, user],
            [choice],
            [system, choice, user],
        )
    ] == [False] * 5 + [True] * 3
    said = heard(backend, Warned)
    group = art.TrajectoryGroup([art.Trajectory(messages_and_choices=[choice, user], reward=i) for i in range(2)])
    await backend.train(model, [group], learning_rate=0.0)
    message = next(event.message for event in said if "before the message" in event.message)
    assert_words(message, ["2 trajectories", "Append the messages of the request first"])

    async def reversed_order(model, scenario):
        return art.Trajectory(messages_and_choices=[await ask(model), user], reward=scenario)

    found = await doctor(model, reversed_order, [1, 2], groups=1, rollouts_per_group=2)
    assert (found["choices"].verdict, "before the message" in found["choices"].finding) == ("warn", True)


# requests

TOOL = {
    "type": "function",
    "function": {"name": "move", "parameters": {"type": "object", "properties": {"to": {"type": "strin"}}}},
}
REQUESTS = {
    "role": ({"messages": [{"role": "systm", "content": "hi"}]}, ["messages[0].role", "'system'"]),
    "max_tokens": ({"max_tokens": 0}, ["max_tokens", "greater than or equal to 1"]),
    "tool without a type": ({"tools": [{"function": {"name": "a"}}]}, ["tools[0].type", "required"]),
    "objekt": (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "objekt"}}}]},
        ["tools[0].function.parameters", "'objekt'", "Did you mean 'object'"],
    ),
    "a type further in": ({"tools": [TOOL]}, ["tools[0].function.parameters", "to: 'strin'", "Did you mean 'string'"]),
    "kind of tool": ({"tools": [{"type": "objekt", "function": {"name": "a"}}]}, ["tools[0].type", "'function'"]),
}


@pytest.mark.parametrize(("request_", "words"), REQUESTS.values(), ids=REQUESTS)
async def test_a_wrong_request_names_its_field(place, request_, words):
    model = place[0]
    with pytest.raises(openai.BadRequestError) as caught:
        await (
            model.openai_client()
            .with_options(max_retries=0)
            .chat.completions.create(**{"model": model.get_inference_name(), "messages": QUESTION} | request_)
        )
    assert_words(caught.value, words)


def test_a_client_of_the_whole_program_works_on_every_event_loop(place):
    model = place[0]
    client = openai.AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key, max_retries=0)

    async def requests():
        create = client.chat.completions.create
        replies = (create(model=model.get_inference_name(), messages=QUESTION, max_tokens=2) for _ in range(4))
        stream = await create(model=model.get_inference_name(), messages=QUESTION, max_tokens=2, stream=True)
        return [len(reply.choices) for reply in await asyncio.gather(*replies)], len([chunk async for chunk in stream])

    assert [asyncio.run(requests())[0] for _ in range(3)] == [[1] * 4] * 3


async def test_a_client_of_another_server_and_of_another_event_loop(place):
    async def rollout(model, scenario):
        raise RuntimeError("Event loop is closed")

    with pytest.raises(RuntimeError, match="Event loop is closed") as caught:
        await begin(place[0], rollout)
    assert "Create it inside the rollout" in caught.value.__notes__[-1]


# judges


def test_a_misspelled_judge():
    with pytest.raises(JudgeError) as caught:
        art.as_judge("locl")
    assert_words(caught.value, ["no judge 'locl'", "Did you mean 'local'", "openai/o3"])


async def test_a_judge_that_litellm_does_not_know_or_has_no_key_for(place, monkeypatch):
    pytest.importorskip("litellm", reason="the extra `judge` is not installed")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for name, words in (
        ("nonsense-7", ["does not know the judge 'nonsense-7'", "provider/model"]),
        ("openai/gpt-4.1-mini", ["needs a key", "OPENAI_API_KEY"]),
    ):
        with pytest.raises(JudgeError) as caught:
            await art.ruler_score_group(place[2], judge_model=name)
        assert_words(caught.value, words)


async def test_a_judge_that_needs_litellm(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "litellm", None)
    with pytest.raises(BackendMissing, match="need litellm.*pip install"):
        await art.ruler_score_group(place[2], judge_model="anthropic/claude")


# programs

PROGRAM = """
import asyncio, sys
import art_nb as art

async def rollout(model, scenario):
    await asyncio.sleep(60)

async def main():
    model = art.TrainableModel(name="tiny", project="tests", base_model=sys.argv[1])
    await model.register(art.LocalBackend(path=sys.argv[2], verbose=False))
    return model

model = asyncio.run(main())
art.train(model, rollout, [1], steps=3, show=False)
{end}
"""


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [("", 0, "before step 1 of 3 of tiny. Wait for the run"), ("raise SystemError('other')", 1, "SystemError: other")],
)
def test_a_script_that_ends_before_its_run_says_so(tiny_model_dir, tmp_path, end, status, words):
    command = [warm_python(), "-c", PROGRAM.format(end=end), str(tiny_model_dir), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, words in done.stderr) == (status, True), done.stderr
    assert "run.join()" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"learning_rate": float("inf")}, "learning_rate=inf"),
        ({"kl_coef": 10**400}, "kl_coef="),
        ({"rows_per_step": 10**400}, "rows_per_step="),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
    ],
)
def test_numbers_that_are_too_large_for_a_float(options, words):
    config = StepConfig(**options)
    with pytest.raises(TrainError, match=words):
        check_step(config)


def test_options_that_a_loss_has_of_its_own_are_possible():
    check_step(StepConfig(loss="dppo", loss_options={"kl_coef": 1e-3}))
    check_step(StepConfig(max_grad_norm=float("inf")))
