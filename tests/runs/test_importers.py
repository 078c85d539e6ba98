"""Files that the tools themselves wrote: `tests/importers/make_data.py` wrote them in a session of an endpoint."""

import json
import math
import shutil
from pathlib import Path

import pytest
from support.registered import at_home, heard

import art_nb as art
from art_nb.core.events import Warned
from art_nb.core.types import StoreError
from art_nb.panels.viewer import RolloutViewer
from art_nb.rewards.journal import Journal, imported_judgments
from art_nb.runs.readers import ROLLOUT_FORMATS
from art_nb.runs.store import RunStore
from art_nb.tokens.advantages import signal_report
from art_nb.views.index import load_all

DATA = Path(__file__).parents[1] / "importers" / "data"
TRACES = {
    "otlp_openinference.jsonl": "OTLP",
    "otlp_genai.jsonl": "OTLP",
    "otlp_langfuse.jsonl": "OTLP",
    "phoenix.jsonl": "Phoenix",
    "mlflow.jsonl": "MLflow",
    "langfuse.jsonl": "Langfuse",
    "weave.jsonl": "Weave",
    "litellm.jsonl": "LiteLLM",
}
DATASETS = {
    "openai_chat.jsonl": "OpenAI chat",
    "openai_preferences.jsonl": "OpenAI preferences",
    "openpipe.jsonl": "OpenPipe",
    "sharegpt.jsonl": "ShareGPT",
    "trl_completion.jsonl": "TRL dataset",
    "trl_messages.parquet": "OpenAI chat",
    "trl_preference.parquet": "TRL preferences",
    "trl_preference_implicit.jsonl": "TRL preferences",
    "trl_prompts.jsonl": "TRL dataset",
    "trl_saved": "OpenAI chat",
    "trl_unpaired.jsonl": "TRL dataset",
}
SESSIONS = {"claude_code.jsonl": "Claude Code", "codex.jsonl": "Codex"}
QUESTION, EXPERT_QUESTION = "How is the weather in Rome?", "What does the expert say about Rome?"


def texts(messages):
    """Return roles and texts, with the names of tool calls."""
    return [
        (m["role"], m.get("content") or "", [call["function"]["name"] for call in m.get("tool_calls") or ()])
        for m in messages
    ]


@pytest.mark.parametrize(("name", "source"), (TRACES | DATASETS | SESSIONS).items())
def test_the_format_is_detected_and_can_be_named(name, source):
    read = art.read_conversations(DATA / name)
    assert {trajectory.metadata["imported_from"] for trajectory in read} == {source}
    named = art.read_conversations(DATA / name, format=source.lower())
    assert [t.messages() for t in named] == [t.messages() for t in read]
    others = {"OTLP", "MLflow", "Codex"} - {source}
    for other in others:
        with pytest.raises(StoreError, match=f"is not a file of {other}: expected the columns"):
            art.read_conversations(DATA / name, format=other)


@pytest.mark.parametrize("name", TRACES)
def test_calls_of_a_session_are_merged_and_the_expert_is_an_additional_history(name):
    talks = {t.metadata["session"]: t for t in art.read_conversations(DATA / name)}
    assert [*talks] == ["session-1", "session-2"]
    alone, supervised = talks["session-1"], talks["session-2"]
    assert texts(alone.messages()) == [
        ("system", "You are a guide.", []),
        ("user", QUESTION, []),
        ("assistant", "", ["weather"]),
        ("tool", "sunny in Rome 1", []),
        ("assistant", "It is sunny.", []),
    ]
    assert not alone.additional_histories
    assert texts(supervised.messages())[1:3] == [("user", EXPERT_QUESTION, []), ("assistant", "", ["ask_expert"])]
    (expert,) = supervised.additional_histories
    assert texts(expert.messages())[0] == ("system", "You are an expert.", [])
    assert texts(expert.messages())[1:] == texts(alone.messages())[1:]
    for history in (alone, supervised, expert):
        (call,) = [m["tool_calls"][0] for m in history.messages() if m.get("tool_calls")]
        (result,) = [m for m in history.messages() if m["role"] == "tool"]
        assert call["id"] == result["tool_call_id"] and json.loads(call["function"]["arguments"])
        names = [tool["function"]["name"] for tool in history.tools]
        assert names == ["weather", "ask_expert"]
        assert history.tools[0]["function"]["parameters"]["required"] == ["city"]


def scores(name):
    """Return rewards, metrics and sources of the scores by session."""
    return {
        t.metadata["session"]: (t.reward, t.metrics, {s["source"] for s in t.metadata.get("scores", ())})
        for t in art.read_conversations(DATA / name)
    }


def test_scores_become_rewards_metrics_and_judgments(tmp_path):
    assert scores("otlp_genai.jsonl")["session-1"] == (0.75, {"score/helpful": 0.75}, {"judge"})
    assert scores("phoenix.jsonl")["session-2"] == (1.0, {"score/helpful": 1.0}, {"judge", "person"})
    assert scores("weave.jsonl")["session-1"] == (0.5, {"score/helpful": 0.5}, {"rule"})
    assert scores("langfuse.jsonl")["session-1"] == (0.5, {"score/helpful": 0.5}, {"judge"})
    for name, metric in ("langfuse.jsonl", "score/right"), ("mlflow.jsonl", "score/helpful"):
        by_session = scores(name)
        (several,) = [found for found in by_session.values() if len(found[1]) == 2]
        assert math.isnan(several[0]) and several[1] == {metric: 1.0, "score/length": 12.0}
        assert several[2] == {"person", "rule"}
    groups = art.read_groups(DATA / "phoenix.jsonl")[0]
    journal = Journal(tmp_path)
    for group in groups:
        journal.append(imported_judgments(group))
    ((index, judgment),) = journal.current(groups[1]).items()
    assert (index, judgment.score, judgment.by, judgment.reason) == (0, 1.0, "human", "It names the weather.")
    assert sorted(j.score for j in journal.read()) == [0.25, 1.0]


def test_mlflow_keeps_what_was_expected():
    (expected,) = [
        t.metadata["expected"] for t in art.read_conversations(DATA / "mlflow.jsonl") if "expected" in t.metadata
    ]
    assert expected == {"expected": "It is sunny."}


def test_a_session_of_claude_code_has_its_sub_agent(tmp_path):
    (trajectory,) = art.read_conversations(DATA / "claude_code.jsonl")
    assert [role for role, _, _ in texts(trajectory.messages())] == ["user", "assistant", "tool", "assistant"]
    assert texts(trajectory.messages())[1][2] == ["Agent"]
    (agent,) = trajectory.additional_histories
    assert [call for _, _, calls in texts(agent.messages()) for call in calls] == ["Bash"]
    assert texts(agent.messages())[-1] == ("assistant", "It is sunny.", [])
    shutil.copy(DATA / "claude_code.jsonl", tmp_path / "alone.jsonl")
    (alone,) = art.read_conversations(tmp_path)
    assert alone.messages() == trajectory.messages() and not alone.additional_histories


def test_a_session_of_codex_is_found_in_its_folders(tmp_path):
    place = tmp_path / "2026" / "11" / "26" / "rollout-2026-11-26T12-00-00-1.jsonl"
    place.parent.mkdir(parents=True)
    shutil.copy(DATA / "codex.jsonl", place)
    (trajectory,) = art.read_conversations(tmp_path)
    roles = [role for role, _, _ in texts(trajectory.messages())]
    assert roles[-4:] == ["user", "assistant", "tool", "assistant"] and roles[0] == "system"
    assert texts(trajectory.messages())[-3][2] == ["exec_command"]
    (scenario,) = art.conversation_scenarios([trajectory])
    assert scenario["metadata"]["scenario_id"].startswith("What does weather.txt say?")


def test_datasets_of_trl():
    for name in ("trl_preference.parquet", "trl_preference_implicit.jsonl", "trl_unpaired.jsonl"):
        ((group,),) = art.read_groups(DATA / name).values()
        assert [(t.reward, t.messages()[-1]["content"], len(t.messages())) for t in group] == [
            (1.0, "4", 2),
            (0.0, "5", 2),
        ]
    for path, count in (DATA / "trl_messages.parquet", 2), (DATA / "trl_saved", 2), (DATA / "trl_saved" / "test", 1):
        found = art.read_conversations(path)
        assert len(found) == count and texts(found[0].messages()) == [("user", "2 + 2?", []), ("assistant", "4", [])]
    with_tools = art.read_conversations(DATA / "trl_messages.parquet")[1]
    assert with_tools.tools[0]["function"]["name"] == "add"
    call = with_tools.messages()[1]["tool_calls"][0]["function"]
    assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 2, "b": 2})
    assert len(art.read_conversations(DATA / "trl_saved", split="test")) == 1
    with pytest.raises(StoreError, match="holds no rollouts"):
        art.read_conversations(DATA / "trl_saved", split="validation")


def test_datasets_of_openai_and_openpipe(tmp_path):
    talks = [texts(talk.messages()) for talk in art.read_conversations(DATA / "openai_chat.jsonl")]
    ask, reply = [("system", "You are a guide.", []), ("user", QUESTION, [])], ("assistant", "It is sunny.", [])
    assert [*ask, ("assistant", "", ["weather"])] in talks  # a line for each call of the agent
    assert [*ask, ("assistant", "", ["weather"]), ("tool", "sunny in Rome 1", []), reply] in talks
    (call,) = art.read_conversations(DATA / "openai_chat.jsonl")[0].messages()[2]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}  # Phoenix writes an object
    unweighted = {
        "messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "5", "weight": 0}]
    }
    (tmp_path / "chat.jsonl").write_text(json.dumps(unweighted))
    (talk,) = art.read_conversations(tmp_path / "chat.jsonl")
    assert talk.messages()[1]["weight"] == 0  # `train_sft` does not train this message
    ((pair,),) = art.read_groups(DATA / "openai_preferences.jsonl").values()
    assert [(t.reward, t.messages()[-1]["content"], len(t.messages())) for t in pair] == [(1.0, "4", 3), (0.0, "5", 3)]
    ((pair, calling),) = art.read_groups(DATA / "openpipe.jsonl").values()
    assert [(t.reward, t.messages()[-1]["content"]) for t in pair] == [(1.0, "4"), (0.0, "5")]
    assert [(t.metadata["split"], t.metadata["metadata"]) for t in pair] == [("TRAIN", {"topic": "sums"})] * 2
    (talk,) = calling
    assert texts(talk.messages()) == [
        ("user", "2 + 2?", []),
        ("assistant", "", ["add"]),
        ("tool", "4", []),
        ("assistant", "4", []),
    ]
    assert talk.tools[0]["function"]["name"] == "add" and talk.metadata["split"] == "TEST"


def test_a_dataset_of_sharegpt_keeps_the_text_of_tool_calls():
    talk = art.read_conversations(DATA / "sharegpt.jsonl")[1]
    roles = [message["role"] for message in talk.messages()]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert talk.messages()[2]["content"].startswith("<tool_call>") and "tool_calls" not in talk.messages()[2]


@pytest.mark.parametrize("name", ["phoenix.jsonl", "mlflow.jsonl", "trl_preference.parquet", "claude_code.jsonl"])
def test_conversations_open_in_the_viewer(name):
    index = load_all(DATA / name)
    assert not index.lost and len(index) == len(art.read_conversations(DATA / name))
    viewer = art.view(DATA / name)
    assert isinstance(viewer, RolloutViewer)
    page = viewer.html()
    assert "2 + 2?" in page or "Rome" in page or "weather.txt" in page
    viewer.close()


@pytest.mark.parametrize("name", [*TRACES, *SESSIONS, "sharegpt.jsonl", "trl_unpaired.jsonl"])
def test_reinforcement_learning_says_that_the_text_was_imported(name):
    report = signal_report(art.read_groups(DATA / name)[0])
    source = (TRACES | SESSIONS | DATASETS)[name]
    assert report.reason.startswith("imported text: ") and f"({source})" in report.reason
    assert "model.train_sft" in report.reason and "art.conversation_scenarios" in report.reason
    assert (report.trainable_groups, report.rows) == (0, 0)


async def test_training_warns_and_fine_tuning_learns(tiny_model_dir, tmp_path):
    async with at_home(tiny_model_dir, tmp_path) as (model, backend):
        warnings = heard(backend, Warned)
        result = await model.train(art.read_groups(DATA / "mlflow.jsonl")[0])
        assert result.metrics["data/step_num_groups_trainable"] == 0
        assert any("imported text: 2 trajectories were imported (MLflow)" in event.message for event in warnings)
        talks = art.read_conversations(DATA / "sharegpt.jsonl") + art.read_conversations(DATA / "trl_completion.jsonl")
        config = art.TrainSFTConfig(learning_rate=1e-2)
        losses = [(await model.train_sft(talks, config)).metrics["sft/loss"] for _ in range(4)]
        assert losses[-1] < losses[0]


def test_imported_groups_can_be_stored(tmp_path):
    groups = art.read_groups(DATA / "langfuse.jsonl")[0]
    store = RunStore(tmp_path)
    store.write_groups("imported", 0, groups)
    stored = store.read_groups("imported", 0)
    assert [[t.messages() for t in group] for group in stored] == [[t.messages() for t in group] for group in groups]
    assert [t.metadata["session"] for group in stored for t in group] == ["session-1", "session-2"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": "Hi"}, r"line 2: invalid `messages` \(str\): expected a list of messages"),
        ({"messages": ["Hi"]}, r"line 2: invalid `messages` \(list\): expected a list of messages"),
        ({"conversations": None}, r"line 2: invalid `conversations` \(NoneType\)"),
        ({"input": [], "preferred_output": []}, r"line 2: invalid `input` \(list\): expected an object"),
        ({"chosen": 3, "rejected": "b"}, r"line 2: invalid `chosen` \(int\): expected a text or a list of messages"),
        ({"prompt": 3}, r"line 2: invalid `prompt` \(int\): expected a text or a list of messages"),
        ({"resourceSpans": {}}, r"line 2: invalid `resourceSpans` \(dict\): expected a list"),
        ({"info": {}, "data": None}, r"line 2: invalid `data` \(NoneType\): expected an object with `spans`"),
        ({"context": "t", "span_kind": "LLM", "attributes": {}}, r"line 2: invalid `context` \(str\)"),
        ({"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, r"line 2: invalid `messages` \(list\): .*str"),
        ({"messages": [{"role": "user", "content": [1, 2]}]}, r"line 2: invalid `messages` \(list\): .*content"),
        ({"info": {}, "data": {"spans": ["x"]}}, r"line 2: invalid `data` \(dict\): .*AttributeError"),
        (
            {"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "x"}]}]}]},
            r"line 2: invalid `resourceSpans`.*traceId",
        ),
        (
            {"context": {"trace_id": "1", "span_id": "2"}, "span_kind": "LLM", "attributes": ["x"]},
            r"line 2: invalid `attributes` \(list\): .*AttributeError",
        ),
        (
            {"sessionId": "s", "uuid": "u", "message": {"role": "user", "content": "Hi", "tool_calls": [1]}},
            r"line 2: invalid `message` \(dict\): .*AttributeError",
        ),
    ],
)
def test_errors_name_file_line_field_and_form(tmp_path, row, says):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n" + json.dumps(row) + "\n")
    with pytest.raises(StoreError, match=rf"chats\.jsonl, {says}.*Fix or remove the line"):
        art.read_conversations(path)


def test_texts_and_images_keep_their_order(tmp_path):
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    content = [image, {"type": "text", "text": "A"}, image, {"type": "text", "text": "B"}]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": content}]}) + "\n")
    (talk,) = art.read_conversations(path)
    assert talk.messages()[0]["content"] == content


def test_damaged_lines_are_counted(tmp_path):
    path = tmp_path / "mlflow.jsonl"
    first, second = (DATA / "mlflow.jsonl").read_text().splitlines()
    path.write_text(f"{first}\n{second[:100]}\n[]\n7\n{second}\n")
    with pytest.warns(UserWarning, match=r"mlflow.jsonl: skipped 2 line\(s\) that are not JSON objects \(line 2, 4\)"):
        assert len(art.read_conversations(path)) == 2


def test_pages_of_an_api_are_read(tmp_path):
    rows = [json.loads(line) for line in (DATA / "phoenix.jsonl").read_text().splitlines()]
    (tmp_path / "page.json").write_text(json.dumps({"data": rows, "next_cursor": None}))
    assert [t.reward for t in art.read_conversations(tmp_path)][1] == 1.0


def test_an_unknown_format_lists_the_known_ones(tmp_path):
    with pytest.raises(StoreError, match="Did you mean 'mlflow'"):
        art.read_conversations(DATA / "mlflow.jsonl", format="mlfow")
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": 1}\n')
    with pytest.raises(StoreError) as error:
        art.read_conversations(path)
    assert all(name in str(error.value) for name in ROLLOUT_FORMATS)
