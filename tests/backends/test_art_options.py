"""What code for ART asks of a model and a backend: heard where it means something here, and else named once."""

import importlib

import openai
import pytest
from support.registered import QUESTION, a_group, heard

import art_nb as art
from art_nb.core.events import Bus, Warned
from art_nb.models.gguf import CHATML_TURNS
from art_nb.tokens.learner_records import read_record


def left_out(events, what):
    """The one message that names settings without a meaning here."""
    (message,) = [event.message for event in events if what in event.message]
    return message


async def test_the_trainers_settings_reach_the_step(named, local):
    said = heard(local, Warned)
    settings = art.dev.TrainerArgs(
        max_grad_norm=0.05,
        weight_decay=0.2,
        adam_beta1=0.5,
        adam_epsilon=1e-6,
        learning_rate=1.0,
        optim="paged_adamw_8bit",
        lr_scheduler_type="constant",
    )
    model = named(_internal_config=art.dev.InternalModelConfig(trainer_args=settings))
    await model.register(local)
    group = await a_group(model)
    asked = [{}, {"max_grad_norm": None, "weight_decay": 0.0}, {"max_grad_norm": 0.5}]
    taken, configs = [], []
    for options in asked:
        result = await local.train(model, [group], learning_rate=1e-3, **options)
        optimizer = local.runtime(model).learner.optimizer.param_groups[0]
        taken.append((optimizer["betas"], optimizer["eps"], optimizer["weight_decay"], optimizer["lr"]))
        configs.append(read_record(model.store, result.step).config)
    assert taken == [((0.5, 0.99), 1e-6, decay, 1e-3) for decay in (0.2, 0.0, 0.2)]
    assert [config["max_grad_norm"] for config in configs] == [0.05, 0.05, 0.5]
    assert "learning_rate, lr_scheduler_type, optim." in left_out(said, "trainer_args")


async def test_without_settings_the_defaults_are_ours(named, local):
    model = named()
    await model.register(local)
    result = await local.train(model, [await a_group(model)])
    optimizer = local.runtime(model).learner.optimizer.param_groups[0]
    assert (optimizer["betas"], optimizer["eps"], optimizer["weight_decay"]) == ((0.9, 0.99), 1e-8, 0.0)
    assert read_record(model.store, result.step).config["max_grad_norm"] == 1.0


async def test_a_request_may_switch_thinking_off(named, local):
    closed = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    thinks = CHATML_TURNS + closed
    model = named(_internal_config={"chat_template": thinks})
    await model.register(local)
    ask = {"model": model.get_inference_name(), "messages": QUESTION, "max_tokens": 2}
    texts = []
    for more in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        answer = await model.openai_client().chat.completions.create(
            **ask, extra_body={"chat_template_kwargs": more, "return_token_ids": True}
        )
        ids = answer.model_extra["prompt_token_ids"]
        assert ids == answer.choices[0].model_extra["prompt_token_ids"]
        texts.append(local.runtime(model).policy.tokenizer.decode(ids))
    assert texts[0] == texts[2]
    assert texts[1] == texts[0] + "<think>\n\n</think>\n\n"
    with pytest.raises(openai.BadRequestError) as caught:
        await model.openai_client().chat.completions.create(**ask, extra_body={"chat_template_kwargs": {"tools": []}})
    assert caught.value.param == "messages"


async def test_what_a_registration_asks_for_in_vain_is_named(named, local):
    said = heard(local, Warned)
    config = art.dev.OpenAIServerConfig(
        log_file="vllm.log",
        engine_args=art.dev.EngineArgs(max_num_seqs=4),
        server_args=art.dev.ServerArgs(tool_call_parser="llama3_json", port=8000, api_key=None),
    )
    model = named()
    await model.register(local, _openai_client_config=config)
    assert left_out(said, "_openai_client_config").endswith("no effect here: engine_args, log_file, server_args.port.")
    assert local.runtime(model).chat.calls.before_arguments == ', "parameters": '
    said.clear()
    await named("quiet").register(local, _openai_client_config={"server_args": {"tool_call_parser": "hermes"}})
    await named("quieter").register(local)
    assert not [event for event in said if "_openai_client_config" in event.message]


async def test_expert_replay_is_accepted_and_does_nothing(tmp_path):
    for asked, told in ((None, 0), (True, 1), (False, 1)):
        bus, said = Bus(), []
        bus.subscribe(said.append, Warned)
        async with art.LocalBackend(path=tmp_path, enable_expert_replay=asked, bus=bus, verbose=False):
            assert sum("no mixture of experts" in event.message for event in said) == told


async def test_a_fork_finds_a_run_whose_name_cannot_be_a_directory(named, local):
    source = named("a/b: c")
    await source.register(local)
    await local.train(source, [await a_group(source)], learning_rate=1e-3)
    fork, elsewhere = named("fork"), named("elsewhere", project="other: one")
    await local._experimental_fork_checkpoint(fork, from_model="a/b: c")
    assert fork.store.steps_saved() == [1]
    await local._experimental_fork_checkpoint(
        elsewhere, from_model="a/b: c", from_project=source.project, not_after_step=0
    )
    assert elsewhere.store.steps_saved() == [0]
    again = named("again")
    await local._experimental_fork_checkpoint(again, from_model="elsewhere", from_project="other: one")
    assert (again.project, again.run_name, again.store.steps_saved()) == (source.project, "again", [0])


# names


def test_results_are_made_as_arts_are():
    assert art.TrainResult(3) == art.TrainResult(step=3, metrics={})
    assert art.TrainResult(3, {"loss/train": 1}).metrics == {"loss/train": 1.0}
    assert art.TrainResult(3).metrics is not art.TrainResult(3).metrics
    local = art.LocalTrainResult(4, {}, "checkpoints/0004")
    assert (local.step, local.checkpoint_path, local.checkpoint_ready) == (4, "checkpoints/0004", None)
    assert isinstance(local, art.TrainResult)
    with pytest.raises(ValueError, match="step"):
        art.TrainResult(step="many")


def test_a_further_history_has_both_names():
    from art_nb.trajectories import History, LegacyHistory

    assert LegacyHistory is History is art.trajectories.LegacyHistory
    messages = [{"role": "user", "content": "hi"}]
    trajectory = art.Trajectory(additional_histories=[LegacyHistory(messages_and_choices=messages)])
    assert trajectory.additional_histories[0].messages() == messages


def test_a_star_gives_the_dictionaries_too():
    names = {}
    exec("from art_nb import *", names)
    assert names["dev"].InternalModelConfig(engine_args={"max_num_seqs": 4}) == {"engine_args": {"max_num_seqs": 4}}
    assert names["TrainableModel"] is art.TrainableModel


@pytest.mark.parametrize(
    ("made", "status"),
    [
        (lambda: art.StoreError("full"), 500),
        (lambda: art.ServeError("full", status=429), 429),
        (lambda: art.LocalServingUnavailableError("full"), 503),
        (lambda: art.BackendMissing("full"), 500),
        (lambda: errors().ForbiddenBucketCreationError("full"), 403),
        (lambda: errors().LoRADeploymentError("full"), 400),
        (lambda: errors().UnsupportedLoRADeploymentProviderError("full"), 400),
        (lambda: errors().LoRADeploymentTimedOutError("full"), 504),
    ],
)
def test_an_error_has_arts_fields(made, status):
    error = made()
    assert isinstance(error, errors().ARTError)
    assert (error.detail, error.status_code) == ("full", status)


def errors():
    """ART's module of errors."""
    return importlib.import_module("art_nb.errors")
