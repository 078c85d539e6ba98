"""Datasets, helpers, files of conversations, benchmarks, leases: each name with the arguments that ART documents."""

import asyncio
import json
import math
import random
import sys
import tracemalloc

import httpx
import pytest
from art_nb.utils import (
    benchmark_rollout,
    format_message,
    get_model_step,
    iterate_dataset,
    limit_concurrency,
    log_http_errors,
    retry,
    strip_logprobs,
)
from art_nb.utils.litellm import convert_litellm_choice_to_openai
from art_nb.utils.output_dirs import get_model_dir, get_step_checkpoint_dir
from art_nb.utils.record_provenance import record_provenance
from art_nb.utils.sft import create_lr_schedule, create_sft_dataset_iterator, iterate_file, train_sft_from_file
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel, ConfigDict, ValidationError
from support.registered import QUESTION, a_group, ask, saved_adapter

import art_nb as art
from art_nb.core.events import GradientStep
from art_nb.core.types import BackendMissing, ServeError, StoreError, TokenError, TrainError, TrainSFTConfig
from art_nb.models.model import Model, TrainableModel
from art_nb.policy import adapter_files
from art_nb.rollouts.trajectories import Trajectory, TrajectoryGroup


def talk(answer="the move is B2", *more):
    return Trajectory(messages_and_choices=[*QUESTION, {"role": "assistant", "content": answer}, *more])


def answers(trajectories):
    return [trajectory.messages()[-1]["content"] for trajectory in trajectories]


# datasets


def test_the_order_is_that_of_art_and_the_global_random_numbers_are_left_alone():
    random.seed(3)
    before = random.getstate()
    found = list(iterate_dataset(range(7), groups_per_step=3, num_epochs=2, use_tqdm=False))
    assert random.getstate() == before
    for epoch in range(2):
        order = list(range(7))
        random.Random(epoch).shuffle(order)
        assert [batch.items for batch in found if batch.epoch == epoch] == [order[:3], order[3:6], order[6:]]
    assert [(batch.step, batch.epoch, batch.epoch_step) for batch in found] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 0, 2),
        (3, 1, 0),
        (4, 1, 1),
        (5, 1, 2),
    ]


def test_the_loops_of_both_generations():
    old = [
        (step, epoch, epoch_step, items)
        for items, epoch, step, epoch_step in iterate_dataset("abc", groups_per_step=2, num_epochs=2)
    ]
    new = [
        (batch.step, batch.epoch, batch.epoch_step, batch.items)
        for batch in iterate_dataset("abc", groups_per_step=2, num_epochs=2)
    ]
    assert old == new


@pytest.mark.parametrize("initial_step", [0, 1, 2, 3, 5, 6, 99])
def test_a_run_resumes(initial_step):
    options = {"groups_per_step": 2, "num_epochs": 2, "use_tqdm": False}
    whole = list(iterate_dataset("abcde", **options))
    assert list(iterate_dataset("abcde", initial_step=initial_step, **options)) == whole[initial_step:]


def test_no_items_and_no_groups():
    assert list(iterate_dataset([], num_epochs=3)) == []
    with pytest.raises(ValueError, match="groups_per_step"):
        iterate_dataset("abc", groups_per_step=0)


# helpers


@pytest.mark.parametrize("exceptions", [(ValueError), (ValueError,), [ValueError, KeyError]], ids=str)
def test_retry_takes_one_class_without_its_comma(exceptions):
    told, left = [], [ValueError("first"), ValueError("second")]

    @retry(
        max_attempts=3,
        delay=0,
        backoff_factor=2.0,
        exceptions=exceptions,
        on_retry=lambda error, attempt: told.append((str(error), attempt)),
    )
    def flaky():
        if left:
            raise left.pop(0)
        return "done"

    assert flaky() == "done"
    assert told == [("first", 1), ("second", 2)]
    assert art.retry is retry


async def test_limit_concurrency_counts_by_key():
    running, peaks = {"a": 0, "b": 0}, {"a": 0, "b": 0}

    @limit_concurrency(2, derive_key=lambda name: name)
    async def ask(name):
        running[name] += 1
        peaks[name] = max(peaks[name], running[name])
        await asyncio.sleep(0)
        running[name] -= 1

    await asyncio.gather(*(ask(name) for name in "ab" * 5))
    assert peaks == {"a": 2, "b": 2}


def sampled(text="yes", **more):
    token = {"token": "yes", "bytes": None, "logprob": -0.1, "top_logprobs": []}
    message = {"role": "assistant", "content": text}
    return Choice.model_validate(
        {
            "index": 0,
            "finish_reason": "stop",
            "message": message,
            "token_ids": [7],
            "logprobs": {"content": [token], "refusal": None},
        }
        | more
    )


def test_messages_are_formatted():
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    choice = sampled(None, message={"role": "assistant", "content": None, "tool_calls": [call]})
    assert format_message({"role": "system", "content": "be brief"}) == "system: be brief"
    assert format_message(choice) == "assistant: look({})"
    parts = [{"type": "text", "text": "sun"}]
    assert format_message({"role": "tool", "tool_call_id": "1", "content": parts}) == "tool: sun"


def test_logprobs_are_stripped_from_a_copy():
    trajectory = Trajectory(
        messages_and_choices=[*QUESTION, sampled()],
        metadata={"logprobs": [1], "kept": (1,)},
        additional_histories=[{"messages_and_choices": [sampled()]}],
    )
    group = strip_logprobs([TrajectoryGroup([trajectory])])[0]
    bare = group.trajectories[0]
    assert bare.messages_and_choices[1].logprobs is None
    assert bare.additional_histories[0].messages_and_choices[0].logprobs is None
    assert bare.messages_and_choices[1].token_ids == [7]
    assert bare.metadata == {"kept": (1,)}
    assert trajectory.messages_and_choices[1].logprobs.content[0].logprob == -0.1
    assert "logprob" not in json.dumps(bare.model_dump(mode="json", exclude_none=True)).replace("logprobs", "")


class LiteMessage(BaseModel):
    """The fields of LiteLLM's `Message`."""

    model_config = ConfigDict(extra="allow")
    content: str | None
    role: str = "assistant"
    tool_calls: list | None = None
    function_call: None = None
    provider_specific_fields: dict | None = None


class LiteChoice(BaseModel):
    """The fields of LiteLLM's `Choices`."""

    finish_reason: str
    index: int
    message: LiteMessage
    logprobs: dict | None = None
    provider_specific_fields: dict | None = None


def test_litellms_choice_can_be_trained():
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    theirs = LiteChoice(
        finish_reason="tool_calls",
        index=0,
        message=LiteMessage(content=None, tool_calls=[call]),
        logprobs=sampled().logprobs.model_dump(),
        provider_specific_fields={"token_ids": [1, 2]},
    )
    ours = convert_litellm_choice_to_openai(theirs)
    assert isinstance(ours, Choice)
    assert ours.message.tool_calls[0].function.name == "look"
    assert ours.logprobs.content[0].logprob == -0.1
    assert ours.token_ids == [1, 2]
    assert Trajectory(messages_and_choices=[ours]).messages()[0]["content"] == ""
    with pytest.raises(ValueError, match="user"):
        convert_litellm_choice_to_openai(
            LiteChoice(finish_reason="stop", index=0, message=LiteMessage(content="a", role="user"))
        )


async def test_a_server_that_refuses_is_heard():
    request = httpx.Request("POST", "http://game/move")

    @log_http_errors
    async def move(**reply):
        httpx.Response(422, request=request, **reply).raise_for_status()

    replies = {"no board": {"json": {"detail": "no board"}}, "<b>": {"text": "<b>"}, r"\[1\]": {"json": [1]}}
    for said, reply in replies.items():
        with pytest.raises(httpx.HTTPStatusError, match=rf"\[HTTP 422\] http://game/move {said}") as told:
            await move(**reply)
        assert told.value.response.status_code == 422


async def test_a_rollout_is_benchmarked(capsys):
    async def rollout(model, number):
        return [Trajectory(reward=number), Trajectory(reward=number + 1)]

    assert await benchmark_rollout(Model(name="coin", project="p"), 4, rollout) == 2.0
    assert "coin: mean reward 2.000 of 8 rollouts" in capsys.readouterr().out


def test_directories_are_where_the_store_has_them(tmp_path):
    model = Model(name="org/model", project="p", base_path=str(tmp_path))
    place = model.store.checkpoint_dir(4)
    assert get_model_dir(model=model, art_path=str(tmp_path)) == str(model.store.path)
    assert get_step_checkpoint_dir(str(model.store.path), 4) == str(place)
    assert get_model_step(model, str(tmp_path)) == 0
    place.mkdir(parents=True)
    (place / "adapter_config.json").write_text("{}")
    (place / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert get_model_step(model, str(tmp_path)) == 4


def test_provenance_needs_wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(BackendMissing, match=r'pip install "art_nb\[wandb\]"'):
        record_provenance(None, "local-rl")


# schedules


def test_schedules():
    assert create_lr_schedule(4, 1.0, "constant") == [1.0] * 4
    assert create_lr_schedule(5, 1.0, "linear", min_lr=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert create_lr_schedule(6, 3.0, method="linear", warmup_steps=3) == pytest.approx([1, 2, 3, 3, 1.5, 0])
    cosine = create_lr_schedule(5, 2.0, "cosine", min_lr=1.0)
    assert cosine == pytest.approx([1.5 + 0.5 * math.cos(math.pi * i / 4) for i in range(5)])
    assert create_lr_schedule(0, 1.0) == create_lr_schedule(-1, 1.0) == []
    assert create_lr_schedule(2, 1.0, warmup_steps=4) == pytest.approx([0.25, 0.5])
    assert create_lr_schedule(1, 1.0) == [1.0]


@pytest.mark.parametrize("initial_step", range(9))
def test_chunks_resume_at_any_batch(initial_step):
    talks = [talk(str(i)) for i in range(7)]
    options = {
        "chunk_size": 3,
        "epochs": 2,
        "batch_size": 2,
        "peak_lr": 1.0,
        "schedule_type": "linear",
        "warmup_ratio": 0.5,
        "shuffle": True,
        "seed": 42,
        "show_progress": False,
    }

    def batches(**more):
        for chunk in create_sft_dataset_iterator(talks, **options, **more):
            size, rates = chunk.config.batch_size, chunk.config.learning_rate
            parts = [chunk.trajectories[i : i + size] for i in range(0, len(chunk.trajectories), size)]
            for i, (part, rate) in enumerate(zip(parts, rates, strict=True)):
                yield chunk.step + i, chunk.epoch, chunk.epoch_step + i, answers(part), rate

    whole = list(batches())
    assert list(batches(initial_step=initial_step)) == whole[initial_step:]
    assert [step for step, *_ in whole] == list(range(8))
    assert [rate for *_, rate in whole] == create_lr_schedule(8, 1.0, "linear", 4)
    for epoch in range(2):
        assert sorted(a for _, e, _, part, _ in whole if e == epoch for a in part) == [str(i) for i in range(7)]
    with pytest.raises(ValueError, match="chunk_size"):
        create_sft_dataset_iterator(talks, chunk_size=0)


# files


@pytest.fixture
def written(tmp_path):
    """Writes conversations to a file."""

    def write(talks, name="talks.jsonl", end=""):
        path = tmp_path / name
        rows = [{"messages": one.messages(), "tools": one.tools} for one in talks]
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows) + end)
        return path

    return write


def test_a_file_is_read_in_a_window(written):
    path = written([talk(str(i)) for i in range(20)])
    assert answers(iterate_file(str(path), shuffle_buffer_size=1)) == [str(i) for i in range(20)]
    near = answers(iterate_file(path, shuffle_buffer_size=3))
    assert sorted(near, key=int) == [str(i) for i in range(20)] != near
    assert all(place >= int(answer) - 2 for place, answer in enumerate(near))
    first, second = (answers(iterate_file(path, seed=seed)) for seed in (5, 6))
    assert answers(iterate_file(path, epochs=2, seed=5)) == first + second
    assert first != second
    assert answers(iterate_file(path, epochs=2, seed=5, initial_skip=23)) == (first + second)[23:]


def test_a_file_is_never_held_whole(written):
    path = written([talk(f"{i} " + "x" * 10_000) for i in range(500)])
    tracemalloc.start()
    count = sum(1 for _ in iterate_file(path, epochs=2, shuffle_buffer_size=8))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 1000
    assert peak < path.stat().st_size / 4


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("{broken", "one JSON object"),
        ("[]", "messages"),
        ('{"prompt": "a"}', "messages"),
        ('{"messages": ["hello"]}', "role"),
        ('{"messages": [{"content": "a"}]}', "role"),
    ],
    ids=str,
)
async def test_a_broken_line_says_its_number_before_anything_is_trained(written, end, said):
    path = written([talk()] * 3, end=end)
    with pytest.raises(TokenError, match=f"line 7.*{said}"):
        list(iterate_file(path))
    model = TrainableModel(name="a", project="p", base_model="b")  # has no backend: training would say so
    with pytest.raises(TokenError, match="line 7"):
        await train_sft_from_file(model, str(path))
    assert isinstance(TokenError(""), ValueError)


@pytest.mark.parametrize("size", [0, -2])
async def test_a_batch_has_at_least_one_conversation(written, size):
    with pytest.raises(ValidationError, match="batch_size(.|\n)*greater than or equal to 1"):
        TrainSFTConfig(batch_size=size)
    model = TrainableModel(name="a", project="p", base_model="b")
    with pytest.raises(ValueError, match=f"batch_size is {size}: give .* 1 or more"):
        await train_sft_from_file(model, str(written([talk()])), batch_size=size)


async def test_a_file_trains_like_the_list_it_holds(named, local, written):
    talks = [talk(f"the move is {place}") for place in ("A1", "B2", "C3", "A2", "B1")]
    path, events = written(talks), []
    local.bus.subscribe(events.append, GradientStep)
    by_list, by_file = named("list"), named("file")
    for model in (by_list, by_file):
        await model.register(local)
    rates = create_lr_schedule(5, 1e-2, "cosine", warmup_steps=1)
    await by_list.train_sft(talks * 2, TrainSFTConfig(learning_rate=rates, batch_size=2))
    result = await train_sft_from_file(
        model=by_file,
        file_path=str(path),
        epochs=2,
        batch_size=2,
        peak_lr=1e-2,
        schedule_type="cosine",
        warmup_ratio=0.2,
        initial_step=0,
        final_step=None,
        _config=None,
        verbose=True,
        shuffle_buffer_size=1,
        log_metrics=True,
        assistant_turns="all",
    )
    assert result.step == await by_file.get_step() == 1
    assert saved_adapter(by_file, 1) == saved_adapter(by_list, 1) != saved_adapter(by_list, 0)
    assert by_file.store.history()[-1]["sft/loss"] == by_list.store.history()[-1]["sft/loss"]
    assert [(e.micro_batch, e.micro_batches) for e in events if e.run == "file"] == [(i, 5) for i in range(1, 6)]


async def test_segments_see_what_the_whole_sees(named, local, written, capsys):
    path, events = written([talk("x" * i) for i in range(1, 8)]), []
    local.bus.subscribe(events.append, GradientStep)
    model = named()
    await model.register(local)
    options = {"epochs": 2, "batch_size": 3, "peak_lr": 1e-3}
    await train_sft_from_file(model, path, **options)
    whole, events[:] = [e.tokens for e in events], []
    await train_sft_from_file(model, path, final_step=2, **options)
    await train_sft_from_file(model, path, initial_step=2, final_step=99, log_metrics=False, **options)
    assert [e.tokens for e in events] == whole
    assert len(whole) == 5
    assert await model.get_step() == 3
    assert len(model.store.history()) == 2
    assert await train_sft_from_file(model, path, initial_step=5, **options) is None
    assert "0 of them" in capsys.readouterr().out
    assert await model.get_step() == 3


async def test_only_the_last_turn_is_learnt_where_asked(named, local, written):
    path, events = written([talk("the move is B2", *QUESTION, {"role": "assistant", "content": "A1"})] * 2), []
    local.bus.subscribe(events.append, GradientStep)
    model = named()
    await model.register(local)
    for turns in ("all", "last"):
        await train_sft_from_file(model, path, assistant_turns=turns)
    both, last = (event.tokens for event in events)
    assert 0 < last < both


async def test_a_stream_that_does_not_fit_its_rates_changes_nothing(named, local):
    model = named()
    await model.register(local)
    for count in (3, 7, 0):
        with pytest.raises(TrainError, match="learning rates"):
            await model.train_sft(
                (talk() for _ in range(count)),
                TrainSFTConfig(learning_rate=[1e-2] * 2, batch_size=2)
                if count != 3
                else TrainSFTConfig(learning_rate=[1e-2] * 3, batch_size=2),
            )
    assert await model.get_step() == 0
    await model.train_sft([talk()], TrainSFTConfig(learning_rate=0.0))
    assert saved_adapter(model, 1) == saved_adapter(model, 0)


def test_a_batch_is_of_conversations_though_one_becomes_several_rows():
    from art_nb.learners.sft_rows import sft_batches
    from art_nb.models.tiny import tiny_tokenizer
    from art_nb.tokens.chat import ChatFormat

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (  # forgets what was said before the last message of a user
        "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}"
        "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    two = talk("A1", *QUESTION, {"role": "assistant", "content": "B2"})
    batches, rates = sft_batches(ChatFormat(tokenizer), [two] * 3, TrainSFTConfig(learning_rate=[1e-3] * 2))
    assert [len(batch) for batch in batches] == [4, 2]
    assert len(rates) == 2


# benchmarks


@pytest.fixture
def project(tmp_path):
    """Two models of one project: one trained for three steps, one asked once."""
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said = Choice.model_validate(
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": None, "tool_calls": [call]}}
    )
    rows = [{"role": "user", "content": [{"type": "text", "text": "?"}]}, said]

    def group(rewards, **more):
        return TrajectoryGroup(
            [
                Trajectory(
                    messages_and_choices=rows,
                    reward=r,
                    metrics={"win": r > 0, **more},
                    metadata={"city": "Oslo", "seed": 3},
                    logs=["a"],
                )
                for r in rewards
            ],
            metadata={"season": "autumn"},
            metrics={"hard": 2},
        )

    agent, gpt = (Model(name=name, project="weather", base_path=str(tmp_path)).store for name in ("agent", "gpt"))
    for step, rewards in enumerate(([0, 0, 0, 1], [0, 1], [1, 1])):
        agent.write_groups("train", step, [group(rewards), group([1.0])])
        agent.append_history({"step": step, "recorded_at": f"day {step}"})
    agent.write_groups("val", 0, [group([0.0])])
    gpt.write_groups("val", 0, [group([0, 1], cost=0.5)])
    return tmp_path


async def test_tables_of_trajectories(project):
    pl = pytest.importorskip("polars")
    from art_nb.utils.benchmarking import load_aggregated_trajectories, load_trajectories

    df = await load_trajectories("weather", models=None, debug=True, art_path=str(project))
    assert isinstance(df, pl.DataFrame)
    assert df.columns[:7] == ["model", "split", "step", "reward", "group_number", "messages", "logs"]
    assert {"metric_win", "metric_cost", "metadata_city"} <= set(df.columns)
    assert {"group_metric_hard", "group_metadata_season"} <= set(df.columns)
    assert df.shape[0] == 14
    assert df["group_number"].n_unique() == 8
    assert df.schema["metric_win"] == pl.Float64 and df.schema["metadata_seed"] == pl.String
    told = df["messages"][0].to_list()
    assert [message["trainable"] for message in told] == [False, True]
    assert told[1]["tool_calls"] == [{"function": {"name": "look", "arguments": "{}"}}]
    assert json.loads(told[0]["content"]) == [{"type": "text", "text": "?"}]
    assert (await load_trajectories("weather", models=["gpt"], art_path=str(project))).shape[0] == 2
    empty = await load_trajectories("nowhere", art_path=str(project))
    assert empty.is_empty() and empty.columns == df.columns[:7] and empty.filter(pl.col("model") == "gpt").is_empty()
    means = await load_aggregated_trajectories("nowhere", art_path=str(project), include_history=True)
    assert means.columns == ["model", "split", "step", "reward", "reward_std_dev", "recorded_at"]
    means = await load_aggregated_trajectories(
        "weather", ["agent"], metrics=["win"], art_path=str(project), include_history=True
    )
    train = means.filter(pl.col("split") == "train")
    assert train["step"].to_list() == [0, 1, 2]
    assert train["metric_win"].to_list() == [(0.25 + 1) / 2, (0.5 + 1) / 2, 1.0]
    assert train["reward_std_dev"].to_list() == pytest.approx([math.sqrt(3) / 8, 0.25, 0.0])
    assert train["recorded_at"].to_list() == ["day 0", "day 1", "day 2"]
    assert "metric_cost" not in means.columns


async def test_a_broken_file_is_announced_and_left_out(project):
    pytest.importorskip("polars")
    from art_nb.utils.benchmarking.load_trajectories import load_trajectories

    (project / "weather" / "models" / "agent" / "trajectories" / "val" / "0000.parquet").write_bytes(b"half")
    with pytest.warns(UserWarning, match="0000.parquet"):
        df = await load_trajectories("weather", art_path=str(project))
    assert df.shape[0] == 13


async def test_tables_need_polars(project, monkeypatch):
    from art_nb.utils.benchmarking import load_trajectories

    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(BackendMissing, match=r"art_nb\[benchmarking\]"):
        await load_trajectories("weather", art_path=str(project))


@pytest.fixture
def pyplot():
    """matplotlib, whose figures are closed at the end."""
    yield pytest.importorskip("matplotlib.pyplot")
    sys.modules["matplotlib.pyplot"].close("all")


async def test_the_charts_of_arts_notebooks(project, pyplot, tmp_path):
    pytest.importorskip("polars")
    from art_nb.utils.benchmarking.charts import percentage_comparison_bar_chart, training_progress_chart
    from art_nb.utils.benchmarking.load_trajectories import load_trajectories
    from art_nb.utils.benchmarking.types import BenchmarkModelKey

    df = await load_trajectories("weather", art_path=str(project))
    models = [BenchmarkModelKey("agent", "ours", "train"), BenchmarkModelKey("gpt", "GPT")]
    line = training_progress_chart(
        df,
        metric_name="win",
        models=models,
        title="Win rate over time",
        x_label="Steps",
        y_label="Win rate",
        perfect_score=1.0,
        legend_loc="lower right",
    )
    line.savefig(tmp_path / "line.svg")
    (axes,) = line.axes
    drawn = {one.get_label(): list(one.get_ydata()) for one in axes.get_lines()}
    assert drawn["ours"] == pytest.approx([0.4, 2 / 3, 1.0])
    assert drawn["GPT"] == [0.5, 0.5] and drawn["_nolegend_"] == [1.0, 1.0]
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("Win rate over time", "Steps", "Win rate")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["ours", "GPT"]
    bars = percentage_comparison_bar_chart(
        df, metric_name="win", models=models, title="Games won", perfect_score=1.0, num_decimals=1
    )
    bars.savefig(tmp_path / "bars.svg")
    (axes,) = bars.axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["ours", "GPT"]
    assert [text.get_text() for text in axes.texts] == ["RL +60.0%", "100.0%", "50.0%", "Perfect score"]
    assert [one.get_label() for one in training_progress_chart(df, "reward").axes[0].get_lines()] == ["agent", "gpt"]
    for chart in (training_progress_chart, percentage_comparison_bar_chart):
        with pytest.raises(ValueError, match="metric_won"):
            chart(df, "won")
        with pytest.raises(ValueError, match="agent/train"):
            chart(df, "win", ["nobody"])


# leases and copies


async def test_a_leased_adapter_stays(named, local, monkeypatch):
    monkeypatch.setattr("art_nb.backends.runtime.KEEP_ADAPTER_S", -1)
    model = named()
    await model.register(local)
    group, loaded = await a_group(model, size=3), local.runtime(model).sampler.loaded
    async with local.adapter_lease(model, 0), local.exact_adapter_lease(model, step=0):
        assert model.get_inference_name() == "ttt@0"
        assert model.get_inference_name(step=1) == "ttt@1"
        for _ in range(2):
            await local.train(model, [group], learning_rate=1e-3)
        assert "ttt@0" in loaded() and "ttt@1" not in loaded()
        assert (await ask(model)).model_extra["policy_version"] == 0
    assert model.get_inference_name() == "ttt"
    await local.train(model, [group], learning_rate=1e-3)
    assert "ttt@0" not in loaded()
    with pytest.raises(ServeError, match="ttt@9"):
        async with local.adapter_lease(model, 9):
            pass
    assert not +local.runtime(model).holders


async def test_adapters_of_other_steps_can_be_let_go(named, local, monkeypatch):
    monkeypatch.setattr("art_nb.backends.runtime.KEEP_ADAPTER_S", 600)
    model = named()
    await local.prune_model_adapters(model, retain_steps=set())  # not registered: there are none
    await model.register(local)
    group, loaded = await a_group(model, size=3), local.runtime(model).sampler.loaded
    for step in range(3):
        await ask(model, f"ttt@{step}")
        await local.train(model, [group], learning_rate=1e-3)
    async with local.adapter_lease(model, 0):
        await local.prune_model_adapters(model, retain_steps={1})
        assert sorted(loaded()) == ["ttt@0", "ttt@1", "ttt@3"]
    await local.prune_model_adapters(model, retain_steps=[3])
    assert loaded() == ["ttt@3"]
    assert (await ask(model, "ttt@2")).model_extra["policy_version"] == 2


async def test_a_checkpoint_is_taken_away(named, local, tmp_path, capsys):
    model = named()
    await model.register(local)
    await local.train(model, [await a_group(model, size=3)], learning_rate=1e-2)
    newest = model.store.checkpoint_dir(1)
    pull = local._experimental_pull_model_checkpoint
    assert await pull(model) == await pull(model, step="latest", verbose=True) == str(newest)
    assert str(newest) in capsys.readouterr().out
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    assert await pull(model, step=0, local_path=str(mine), s3_bucket=None, prefix=None) == str(mine)
    assert (mine / "notes.txt").read_text() == "mine"
    taken, kept = adapter_files.read_adapter(mine), adapter_files.read_adapter(model.store.checkpoint_dir(0))
    assert taken.keys() == kept.keys()
    assert all(bool((taken[name] == kept[name]).all()) for name in kept)
    with pytest.raises(StoreError, match="step 7. Existing steps: 0, 1.$"):
        await pull(model, step=7)
    with pytest.raises(StoreError, match="step 7.*S3.*my-bucket"):
        await pull(model, step=7, s3_bucket="my-bucket")
    with pytest.raises(BackendMissing, match=f"--lora-modules.*{newest}"):
        await local._experimental_deploy("together", model, s3_bucket="bucket", verbose=True, wait_for_completion=False)
    assert await local._experimental_pull_model_checkpoint(named("ttt")) == str(newest)  # not registered, same run
