"""What is counted over a run: names, sums, costs of judges and machines, and that a restart goes on counting."""

import asyncio
import copy
import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai
import pytest

import art_nb as art
from art_nb.models.model import Model
from art_nb.rewards.ruler import ruler_score_group
from art_nb.runs.costs import (
    MODEL_PRICING,
    ModelPricing,
    as_pricing,
    build_cost_calculator,
    get_model_pricing,
    parse_usage,
)
from art_nb.runs.metrics import MetricsBuilder, cumulative_name, group_metrics, metric_name, track_api_cost

MILLION = {"usage": {"prompt_tokens": 1_000_000, "completion_tokens": 0}}


def group(*rewards, **fields):
    said = [{"role": "user", "content": "hi"}]
    return art.TrajectoryGroup(
        [
            art.Trajectory(messages_and_choices=[*said, {"role": "assistant", "content": f"a{i}"}], reward=r)
            for i, r in enumerate(rewards)
        ],
        **fields,
    )


@pytest.fixture
def model(tmp_path):
    return Model(name="m", project="p", base_path=str(tmp_path))


# names


def test_names_of_known_sections_stand():
    assert metric_name("time/step_wall_s", "val") == "time/step_wall_s"
    assert metric_name("mine/x", "val") == "val/mine/x"
    assert (metric_name("costs/gpu", "sft"), metric_name("loss", "sft")) == ("costs/gpu", "sft/loss")
    assert cumulative_name("data/step_num_scenarios") == "data/cum/num_scenarios"
    assert cumulative_name("costs/train/judge") == "costs/cum/train/judge"


def test_a_rollouts_cost_is_a_sum_and_its_metrics_are_means():
    both = group(0, 1)
    for trajectory in both:
        trajectory.metrics |= {"turns": 3, "costs/train/tool": 0.25, "completion_tokens": 7}
    found = group_metrics([both], "train")
    assert (found["train/turns"], found["costs/train/tool"], found["data/step_rollout_tokens"]) == (3, 0.5, 14)
    assert "data/step_rollout_tokens" not in group_metrics([both, group(0, 1)], "train")


# the builder


def test_what_cannot_be_added_is_refused():
    builder = MetricsBuilder("train")
    for wrong in ("plain", "costs/cum/x"):
        with pytest.raises(ValueError, match="section"):
            builder.add_metric(wrong, 1)
    builder.add_cost("train/judge", 1)
    for wrong in ("train", "train/judge/ruler"):
        with pytest.raises(ValueError, match="cannot both"):
            builder.add_cost(wrong, 1)
    assert builder.take()["costs/all"] == 1
    with pytest.raises(ValueError, match="context"):
        MetricsBuilder("  ")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
async def test_what_is_no_number_spoils_no_sum(model, wrong):
    both = group(0, 1)
    for trajectory in both:
        trajectory.metrics |= {"costs/train/tool": wrong, "time/step_tool_s": wrong}
    await model.log([both], split="train", metrics={"costs/gpu": 1}, step=1)
    await model.log([group(0, 1)], split="train", metrics={"costs/gpu": wrong}, step=2)
    again = Model(name="m", project="p", base_path=model.base_path)
    for one in (model, again):
        row = await one.log(split="train", metrics={"costs/gpu": 1, "costs/train/tool": 1}, step=3)
    assert (row["costs/cum/gpu"], row["costs/cum/train/tool"], row["costs/cum/all"]) == (3, 2, 5)


def test_a_rollout_without_a_number_hides_no_others():
    both = group(0, 1)
    for trajectory, usd in zip(both, (float("nan"), 0.25), strict=True):
        trajectory.metrics["costs/train/tool"] = usd
    assert group_metrics([both], "train")["costs/train/tool"] == 0.25


async def test_a_state_that_holds_nothing_where_a_number_was_can_be_read(model):
    model.store.write_own_state(
        "_metrics_builder_state",
        {
            "cum_state": {"costs/cum/gpu": None, "costs/cum/all": 2.0},
            "rates": {"throughput/avg_rollout_tok_per_s": [None, 3.0]},
        },
    )
    row = await model.log(split="train", metrics={"costs/gpu": 1}, step=1)
    assert (row["costs/cum/gpu"], row["costs/cum/all"]) == (1, 3)


async def test_contexts_share_sums_and_not_steps():
    train = MetricsBuilder("train")
    held = train.for_cost_context("eval")
    train.add_cost("train/judge", 1)
    held.add_cost("eval/judge", 2)
    first, second = await train.flush(), await held.flush()
    assert (first["costs/all"], second["costs/all"]) == (1, 2)
    assert (first["costs/cum/all"], second["costs/cum/all"]) == (1, 3)
    assert "costs/eval" not in first
    assert await train.flush() == {}


def test_rates_take_only_steps_that_tell_tokens_and_seconds():
    builder = MetricsBuilder("train")
    builder.add_data(step_rollout_tokens=1000)
    assert "throughput/avg_rollout_tok_per_s" not in builder.take()
    builder.add_data(step_rollout_tokens=30)
    builder.add_user_timing(step_rollout_s=2)
    assert builder.take()["throughput/avg_rollout_tok_per_s"] == 15
    builder.add_data(step_rollout_tokens=70)
    builder.add_user_timing(step_rollout_s=3)
    assert builder.take()["throughput/avg_rollout_tok_per_s"] == 20


def test_what_the_loop_measured_is_summed():
    builder = MetricsBuilder("train")
    for _ in range(2):
        for _ in range(2):
            builder.add_idle_times(step_trainer_idle_s=1.5, step_rollout_idle_s=0.5)
            builder.add_user_timing(step_wall_s=4, step_eval_s=2)
            builder.add_data(step_num_scenarios=3)
        found = builder.take()
    assert found == {
        "time/step_trainer_idle_s": 3,
        "time/step_rollout_idle_s": 1,
        "time/step_wall_s": 8,
        "time/step_eval_s": 4,
        "data/step_num_scenarios": 6,
        "time/cum/trainer_idle_s": 6,
        "time/cum/rollout_idle_s": 2,
        "time/cum/wall_s": 16,
        "time/cum/eval_s": 8,
        "data/cum/num_scenarios": 12,
    }


def test_many_threads_add_and_nothing_is_lost():
    builder, taken = MetricsBuilder("train"), []

    def add():
        for i in range(500):
            builder.add_cost("train/judge", 1)
            builder.add_data(scenario_ids=[i])

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken.append(builder.take())
    for thread in threads:
        thread.join()
    taken.append(builder.take())
    assert sum(one.get("costs/train/judge", 0) for one in taken) == 4000
    assert builder.state_dict()["cum_state"]["costs/cum/train/judge"] == 4000
    assert len(builder.state_dict()["unique_scenario_ids"]) == 500


async def test_concurrent_tasks_have_separate_contexts(model):
    async def spends(context, usd):
        with model.metrics_builder(context).activate_context():
            await asyncio.sleep(0)
            active = MetricsBuilder.get_active()
            active.add_cost(f"{active.cost_context}/judge", usd)

    await asyncio.gather(spends("train", 1), spends("eval", 2))
    assert model.metrics_builder("train").take()["costs/all"] == 1
    assert model.metrics_builder("eval").take()["costs/all"] == 2
    with pytest.raises(LookupError):
        MetricsBuilder.get_active()


async def test_what_an_evaluation_spends_stands_in_the_first_row_of_its_splits(model):
    with model.metrics_builder("eval").activate_context():
        MetricsBuilder.get_active().add_cost("eval/judge", 2)
    for split, cost in (("discarded", None), ("train", None), ("hard", 2), ("easy", None)):
        row = await model.log([group(0, 1)], split=split, step=1)
        assert row.get("costs/eval") == cost


async def test_arts_token_ends_a_context(model):
    token = model.activate_metrics_context("eval")
    assert MetricsBuilder.get_active().cost_context == "eval"
    token.var.reset(token)
    with pytest.raises(LookupError):
        MetricsBuilder.get_active()


def test_measure_counts_a_block_that_fails():
    builder = MetricsBuilder("train")
    with pytest.raises(ZeroDivisionError), builder.measure("time/step_judge_s"):
        print(1 / 0)
    assert builder.take()["time/cum/judge_s"] >= 0


# prices


@pytest.mark.parametrize(
    ("response", "usd"),
    [
        (MILLION, 2.0),
        ({"usage": {"prompt_tokens": 1_000_000, "prompt_tokens_details": {"cached_tokens": 400_000}}}, 1.4),
        ({"usage": {"input_tokens": 600_000, "output_tokens": 0, "cache_read_input_tokens": 400_000}}, 1.4),
        ({"usage": {"prompt_tokens": 5, "cost": 0.5}}, 0.5),
        ({"usage": {"prompt_tokens": 5}, "_hidden_params": {"response_cost": 0.25}}, 0.25),
    ],
)
def test_an_answer_is_priced_by_its_shape(response, usd):
    builder = MetricsBuilder("train")
    assert builder.add_response_cost("judge/x", response, provider="openai", model_name="gpt-4.1") == pytest.approx(usd)
    assert builder.take()["costs/train/judge/x"] == pytest.approx(usd)


def test_prices_and_extractors_of_the_user_have_priority():
    builder = MetricsBuilder("train")
    builder.register_model_pricing("openai/gpt-4.1", prompt_per_million=1, completion_per_million=1)
    told = {"provider": "OpenAI", "model_name": "openai/gpt-4.1"}
    assert builder.add_response_cost("a", MILLION, **told) == 1
    assert builder.add_response_cost("a", MILLION, **told, prompt_price_per_million=7) == 7
    builder.for_cost_context("eval").register_cost_extractor("openai", lambda response: 0.75)
    assert builder.add_response_cost("a", MILLION, **told) == 0.75
    wrong = {"usage": {"prompt_tokens": 5, "cost": 0.5}}
    assert builder.add_response_cost("a", wrong, **told) == 0.75
    builder.register_cost_extractor("openai", lambda response: None)
    assert builder.add_response_cost("a", wrong, **told) == 0.5


CACHED = {"usage": {"prompt_tokens": 1_000_000, "prompt_tokens_details": {"cached_tokens": 400_000}}}
READ_AND_WRITTEN = {
    "usage": {
        "input_tokens": 600_000,
        "output_tokens": 0,
        "cache_read_input_tokens": 400_000,
        "cache_creation_input_tokens": 100_000,
    }
}


@pytest.mark.parametrize(
    ("prices", "response", "usd"),
    [
        ({}, CACHED, 4.0),
        ({"cached_prompt_per_million": 1}, CACHED, 2.8),
        ({"cache_read_per_million": 0}, CACHED, 2.4),
        ({}, READ_AND_WRITTEN, 4.4),
        ({"cache_read_per_million": 0.5, "cache_creation_per_million": 5}, READ_AND_WRITTEN, 3.1),
    ],
)
def test_what_a_cache_holds_has_prices_of_its_own(prices, response, usd):
    builder = MetricsBuilder("train")
    builder.register_model_pricing("mine", prompt_per_million=4, completion_per_million=8, **prices)
    assert builder.add_response_cost("a", response, provider="me", model_name="mine") == pytest.approx(usd)


def test_an_unknown_price_is_reported():
    builder = MetricsBuilder("train")
    with pytest.raises(ValueError, match="register_model_pricing|Register one"):
        builder.add_response_cost("a", MILLION, provider="openai", model_name="nobody/knows")
    with pytest.raises(ValueError, match="register_cost_extractor"):
        builder.add_response_cost("a", {"usage": None}, provider="x", model_name="openai/o3")
    with pytest.raises(ValueError, match="needs both"):
        as_pricing({"prompt_price_per_million": 1})
    with pytest.raises(ValueError, match="Unknown price 'prompts'"):
        as_pricing({"prompts": 1})
    assert builder.take() == {}
    assert parse_usage(object()) is None
    assert get_model_pricing(None) is None
    assert all(0 < price.prefill < price.sample for price in MODEL_PRICING.values())


def test_a_price_put_into_the_table_is_found(monkeypatch):
    monkeypatch.setitem(MODEL_PRICING, "mine", ModelPricing(1.0, 2.0))
    assert get_model_pricing("mine").sample == 2.0
    assert get_model_pricing("o3") is MODEL_PRICING["openai/o3"]


async def test_a_decorated_call_is_counted_where_somebody_counts():
    @track_api_cost(
        source="judge/mine", provider="openai", model_name="openai/o3", response_getter=lambda pair: pair[1]
    )
    async def judge():
        return "good", MILLION

    assert (await judge())[0] == "good"
    with MetricsBuilder("eval").activate_context() as builder:
        await judge()
    assert builder.take()["costs/eval/judge/mine"] == 2.0
    assert judge.__name__ == "judge"


# judges


class Priced(BaseHTTPRequestHandler):
    """An endpoint that scores two trajectories and names its price."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        scores = [{"trajectory_id": str(i), "explanation": "", "score": i / 2} for i in (1, 2)]
        answer = {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": "judge",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": {"role": "assistant", "content": json.dumps({"scores": scores})},
                }
            ],
            "usage": {"prompt_tokens": 1000, "completion_tokens": 10, "total_tokens": 1010, "cost": 0.125},
        }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def judge_url():
    with ThreadingHTTPServer(("127.0.0.1", 0), Priced) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"judge@http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


async def test_rulers_cost_goes_to_the_active_builder_once(model, judge_url, tmp_path):
    cache = tmp_path / "judge.jsonl"
    await ruler_score_group(group(0, 0), judge_url, cache=None)  # nobody counts
    with model.metrics_builder("train").activate_context():
        judged = await ruler_score_group(group(0, 0), judge_url, cache=cache)
        await ruler_score_group(group(0, 0), judge_url, cache=cache)  # from the cache: nothing is spent
    row = await model.log([judged], split="train", step=1)
    assert row["costs/train/judge/ruler"] == row["costs/train"] == row["costs/all"] == 0.125
    assert row["train/group/judge_cost"] == 0.125


async def test_a_tracked_openai_client(judge_url):
    client = openai.AsyncOpenAI(base_url=judge_url.partition("@")[2], api_key="none")

    @track_api_cost(source="judge/mine", provider="openai", model_name="unknown/model")
    async def ask():
        return await client.chat.completions.create(model="judge", messages=[{"role": "user", "content": "hi"}])

    with MetricsBuilder("train").activate_context() as builder:
        await ask()
    assert builder.take()["costs/train/judge/mine"] == 0.125


# a model's rows


async def test_rows_have_step_values_and_sums_that_continue_after_a_restart(model):
    model.overwrite_state({"position": 3})
    await model.log([group(0, 1, metadata={"scenario_id": "a"})], split="train", metrics={"costs/gpu": 1}, step=1)
    model.merge_state({"epoch": 1})
    await model.log([group(0, 1, metadata={"scenario_id": "a"})], split="val", step=1)
    model.overwrite_state({"position": 9})
    again = Model(name="m", project="p", base_path=model.base_path)
    other = group(1, 1, 0, metadata={"scenario_id": 4})
    row = await again.log([other], split="train", metrics={"costs/gpu": 2}, step=2)
    assert row["data/step_num_trajectories"] == 3
    assert row["data/cum/num_trajectories"] == 5
    assert row["data/cum/num_unique_scenarios"] == 2
    assert (row["costs/gpu"], row["costs/cum/gpu"], row["costs/cum/all"]) == (2, 3, 3)
    assert again.read_state() == {"position": 9}
    state = json.loads((model.store.path / "state.json").read_text())
    assert sorted(state) == ["_metrics_builder_state", "position"]


async def test_a_stale_copy_of_the_state_does_not_bring_old_sums_back(model):
    await model.log(metrics={"costs/gpu": 1}, split="train", step=1)
    whole = json.loads((model.store.path / "state.json").read_text())
    await model.log(metrics={"costs/gpu": 1}, split="train", step=2)
    model.overwrite_state(whole | {"mine": 1})
    again = Model(name="m", project="p", base_path=model.base_path)
    assert (await again.log(metrics={"costs/gpu": 1}, split="train", step=3))["costs/cum/gpu"] == 3
    assert model.read_state() == {"mine": 1}


async def test_a_copy_of_a_model_counts_for_itself(model):
    await model.log(metrics={"costs/gpu": 1}, split="train", step=1)
    for other in (model.model_copy(deep=True), model.model_copy(update={"name": "n"}), copy.deepcopy(model)):
        other.name = "other"
        assert other.metrics_builder() is not model.metrics_builder()
        assert other.metrics_builder().state_dict()["cum_state"] == {}


async def test_logs_from_many_threads_are_all_counted(model):
    await asyncio.gather(
        *(model.log(metrics={"costs/gpu": 1}, split=split, step=i) for i in range(20) for split in ("train", "val"))
    )
    rows = model.store.history()
    assert sorted(row["costs/cum/gpu"] for row in rows) == list(range(1, 41))
    assert model.store.read_own_state("_metrics_builder_state")["cum_state"]["costs/cum/gpu"] == 40


async def test_own_tokens_are_priced_where_a_calculator_is_set(tmp_path):
    from openai.types.chat.chat_completion import Choice

    model = art.TrainableModel(name="m", project="p", base_model="b", base_path=str(tmp_path))
    assert model.cost_calculator(1, 1, "train") == {}
    model.set_cost_calculator(build_cost_calculator(ModelPricing(1e6, 2e6)))
    said = Choice.model_validate(
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "a"},
            "prompt_token_ids": [1, 2, 3],
            "token_ids": [4, 5],
        }
    )
    played = art.TrajectoryGroup([art.Trajectory(messages_and_choices=[said], reward=1)])
    row = await model.log([played], split="val", step=0)
    assert (row["costs/eval/prefill"], row["costs/eval/sample"], row["costs/all"]) == (3, 4, 7)


SPEND = """
import asyncio, os, sys
from art_nb.models.model import Model
async def main():
    model = Model(name="m", project="p", base_path=sys.argv[1])
    while True:
        await model.log(metrics={"costs/gpu": 1}, split="train", step=0)
        os.write(1, b".")
asyncio.run(main())
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_a_kill_between_two_writes_loses_at_most_a_row(model):
    command = [sys.executable, "-c", SPEND, model.base_path]
    for life in range(3):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            for _ in range(5 + 3 * life):
                assert process.stdout.read(1) == b"."
            process.send_signal(signal.SIGKILL)
    sums = [row["costs/cum/gpu"] for row in model.store.history()]
    assert sums == sorted(set(sums))
    counted = model.store.read_own_state("_metrics_builder_state")["cum_state"]["costs/cum/gpu"]
    assert len(sums) <= counted <= len(sums) + 3
    assert counted - sums[-1] in (0, 1)


# a backend


async def test_the_machine_is_paid_for_from_step_to_step(tiny_model_dir, tmp_path):
    model = art.TrainableModel(name="tiny", project="tests", base_model=str(tiny_model_dir))
    async with art.LocalBackend(path=tmp_path, verbose=False, gpu_cost_per_hour_usd=3600) as backend:
        await model.register(backend)
        results = [await backend.train(model, [group(0, 1)]) for _ in range(2)]
        rows = [await model.log([group(0, 1)], split="train", metrics=r.metrics, step=r.step) for r in results]
    for row in rows:
        assert row["costs/gpu"] == pytest.approx(row["time/step_wall_s"])
        assert row["time/step_wall_s"] >= row["time/step_backend_train_s"] > 0
    assert rows[1]["costs/cum/gpu"] == pytest.approx(sum(row["costs/gpu"] for row in rows))


async def test_without_a_price_no_cost_is_invented(tiny_model_dir, tmp_path):
    model = art.TrainableModel(name="tiny", project="tests", base_model=str(tiny_model_dir))
    async with art.LocalBackend(path=tmp_path, verbose=False) as backend:
        await model.register(backend)
        result = await backend.train(model, [group(0, 1)])
        row = await model.log([group(0, 1)], split="train", metrics=result.metrics, step=result.step)
    assert not [name for name in row if name.startswith("costs/")]
    assert "throughput/avg_trainer_tok_per_s" not in row  # nothing was trained on, so nothing was measured


async def test_a_run_counts_judges_tokens_and_seconds(tiny_model_dir, tmp_path, judge_url):
    model = art.TrainableModel(name="tiny", project="tests", base_model=str(tiny_model_dir))

    async def say(model, scenario):
        said = [{"role": "user", "content": f"free: {scenario}"}]
        reply = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=said, max_tokens=4, logprobs=True
        )
        return art.Trajectory(messages_and_choices=[*said, reply.choices[0]])

    async with art.LocalBackend(path=tmp_path, verbose=False) as backend:
        await model.register(backend)
        run = await art.train(
            model,
            say,
            range(3),
            steps=2,
            groups_per_step=2,
            rollouts_per_group=2,
            show=False,
            after_each=lambda g: ruler_score_group(g, judge_url, cache=None),
        )
    last = run.history[-1]
    assert last["costs/train/judge/ruler"] == 0.25
    assert last["costs/cum/train"] == 0.5
    assert last["data/cum/num_unique_scenarios"] == 3
    assert last["data/cum/rollout_tokens"] == sum(row["data/step_rollout_tokens"] for row in run.history)
    assert last["throughput/avg_trainer_tok_per_s"] > 0
    assert last["throughput/avg_rollout_tok_per_s"] > 0
    assert last["time/cum/wall_s"] == pytest.approx(sum(row["time/step_wall_s"] for row in run.history))
