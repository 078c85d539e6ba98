"""The doctor on healthy and on sick rollouts, of a real model; it must touch nothing."""

import asyncio
import itertools
import json
import math
import re
import site
import socket
from contextlib import suppress
from pathlib import Path

import openai
import pytest
from openai.types.chat.chat_completion import Choice

import art_nb as art
from art_nb.core.types import TrainError
from art_nb.models.tiny import save_tiny_model
from art_nb.rollouts.trajectories import PydanticException
from art_nb.training.doctor import (
    Check,
    DoctorReport,
    Probe,
    check_context,
    check_cost,
    check_metrics,
    check_rows,
    check_success,
    check_tools,
    check_variance,
    failure_cause,
)


@pytest.fixture(scope="module")
def home(tiny_model_dir, tmp_path_factory):
    """A registered model; its rollouts run on loops of their own."""
    model = art.TrainableModel(name="tiny", project="tests", base_model=str(tiny_model_dir))
    backend = art.LocalBackend(path=tmp_path_factory.mktemp("runs"), verbose=False, max_model_len=128)
    asyncio.run(model.register(backend))
    yield model
    asyncio.run(backend.close())


async def ask(model, messages, **options):
    """One reply."""
    asked = {"model": model.get_inference_name(), "max_tokens": 3, "logprobs": True} | options
    return (await model.openai_client().chat.completions.create(messages=messages, **asked)).choices[0]


def player(reward=lambda n: n % 2, text=lambda s, n: f"free: {s}", turns=1, keep=lambda choice: choice, **options):
    """A rollout; `n` counts its calls."""
    counter = itertools.count()

    async def rollout(model, scenario):
        n, history = next(counter), []
        for _ in range(turns):
            history.append({"role": "user", "content": text(scenario, n)})
            choice = await ask(model, art.Trajectory(messages_and_choices=history).messages(), **options)
            history.append(keep(choice))
        return art.Trajectory(messages_and_choices=history, reward=reward(n))

    return rollout


QUESTION = [{"role": "user", "content": "free: A1 B1"}]


async def examine(model, rollout, **options):
    return await art.doctor(model, rollout, range(8), **{"groups": 2, "show_progress": False} | options)


def files(model):
    return {path: path.stat().st_mtime_ns for path in model.store.path.rglob("*") if path.is_file()}


async def test_a_healthy_rollout_passes_and_nothing_is_touched(home):
    events, before = [], files(home)
    forget = home.backend().bus.subscribe(events.append)
    found = await examine(home, player(), per_step=(4, 2))
    forget()
    verdicts = {check.name: check.verdict for check in found.checks}
    assert verdicts.pop("length") == "warn"  # a random model does not end its replies
    assert set(verdicts.values()) == {"ok"}, str(found)
    assert list(verdicts) == [
        "model",
        "rollouts",
        "rewards",
        "variance",
        "success",
        "choices",
        "tokens",
        "rows",
        "scenario",
        "context",
        "cost",
    ]
    assert found.ok
    assert "8 rollouts" in found["rollouts"].finding
    # at most 3 tokens a reply, and now and then an early end
    assert re.search("4 x 2 rollouts would sample about (1[6-9]|2[0-4]) tokens in at most", found["cost"].finding)
    assert "of 128 that fit" in found["context"].finding
    assert "lowest reward, 0. Temperature: 1." in found["success"].finding
    assert (await home.get_step(), files(home), events) == (0, before, [])


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"max_tokens": 1}, "Raise max_tokens in the request"),
        ({"max_completion_tokens": 1, "max_tokens": None}, "Raise max_completion_tokens in the request"),
        ({"max_tokens": None}, "The request sets no limit, so the reply filled the context"),
    ],
)
async def test_the_advice_names_the_limit_that_the_request_used(home, options, advice):
    async def rollout(model, scenario):
        choice = await ask(model, QUESTION, extra_body={"ignore_eos": True}, **options)
        return art.Trajectory(messages_and_choices=[*QUESTION, choice])

    assert advice in (await examine(home, rollout))["length"].advice


async def test_a_client_of_another_event_loop(home):
    async def rollout(model, scenario):
        raise RuntimeError("Event loop is closed")

    check = (await examine(home, rollout))["rollouts"]
    assert check.verdict == "fail" and "Create it inside the rollout" in check.advice


async def test_greedy_replies_cannot_be_trained(home):
    found = await examine(home, player(reward=lambda n: 1, temperature=0))
    assert {"tokens", "variance", "cost"} <= {check.name for check in found.checks if check.verdict == "fail"}
    said = f"{found['tokens'].finding} {found['tokens'].advice}"
    assert said.startswith("all greedy: the replies of 8 trajectories")
    assert "Set temperature=1 in the request, or pass request_overrides=dict(temperature=1)" in said
    assert found["variance"].advice.startswith("Set temperature=1 in the request")
    assert "train none of them" in found["cost"].finding


async def test_some_greedy_replies(home):
    async def rollout(model, scenario):
        history = []
        for temperature in (0, 1):
            history.append({"role": "user", "content": f"free: {scenario}"})
            asked = art.Trajectory(messages_and_choices=history).messages()
            history.append(await ask(model, asked, temperature=temperature))
        return art.Trajectory(messages_and_choices=history)

    found = await examine(home, rollout)
    assert (found["tokens"].verdict, found["cost"].verdict) == ("warn", "ok")
    assert "8 of 16 (50%) replies were sampled at temperature 0" in found["tokens"].finding
    assert found["variance"].advice == "See the check `success`."


async def test_an_agent_that_asks_another_server(home):
    async def rollout(model, scenario):
        address = f"http://user:secret@127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=address, api_key="sk-1", max_retries=0) as client:
            await client.chat.completions.create(model="gpt", messages=QUESTION)

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # nothing listens
        port = server.getsockname()[1]
        advice = (await examine(home, rollout))["rollouts"].advice
    assert f"A request went to http://127.0.0.1:{port}/v1/chat/completions, not to the endpoint" in advice
    assert home.inference_base_url in advice and "set OPENAI_BASE_URL" in advice


async def test_a_request_without_a_limit_in_a_thread_is_named(tmp_path):
    """The thread still waits for the reply when the rollout has ended."""
    tiny = save_tiny_model(tmp_path / "tiny", context=8192)
    model = art.TrainableModel(name="tiny", project="tests", base_model=str(tiny))

    def send(messages):
        client = openai.OpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key, max_retries=0)
        with suppress(openai.APIError):  # the backend is closed
            client.chat.completions.create(model="tiny", messages=messages, extra_body={"ignore_eos": True})

    async def rollout(model, scenario):
        await asyncio.to_thread(send, QUESTION)

    async with art.LocalBackend(path=tmp_path / "runs", verbose=False) as backend:
        await model.register(backend)
        report = await art.doctor(model, rollout, [1], groups=1, rollouts_per_group=1, timeout_s=1)
    assert report["rollouts"].advice.startswith("The requests set no limit")


async def test_a_wrong_request_to_the_right_server(home):
    async def rollout(model, scenario):
        await ask(model, QUESTION, temperature=9)

    assert "Fix the rollout function" in (await examine(home, rollout))["rollouts"].advice


async def test_groups_and_rollouts_are_as_asked(home, capfd):
    seen = []

    async def rollout(model, scenario):
        seen.append(scenario)
        return art.Trajectory(messages_and_choices=[])

    await art.doctor(home, rollout, "abc", groups=3, rollouts_per_group=2)
    assert sorted(seen) == list("aabbcc")
    bar = capfd.readouterr().err
    assert "doctor: rollouts" in bar and "6/6" in bar
    with pytest.raises(TrainError):
        await art.doctor(home, rollout, [])


# each sickness and the sentence that names it


def crash(n):
    if n % 4 == 0:
        raise ValueError("no such square")
    return n % 2


def as_dict(choice):
    return {"role": "assistant", "content": choice.message.content}


def bare(choice):
    return choice.model_copy(update={"token_ids": None, "prompt_token_ids": None})


def silent(choice):
    return choice.model_copy(update={"logprobs": None, "token_logprobs": None})


def torn(choice):
    if len(choice.logprobs.content) == 3:  # a reply may end earlier
        choice.logprobs.content.pop()
    return choice


@pytest.mark.parametrize(
    ("name", "verdict", "said", "options"),
    [
        ("rollouts", "warn", "2 of 8 (25%) failed; 2 with ValueError: no such square (", {"reward": crash}),
        ("rollouts", "warn", "no such square (test_doctor.py, line", {"reward": crash}),
        ("rollouts", "warn", "in crash: raise ValueError", {"reward": crash}),
        ("rewards", "fail", "2 of 8 (25%) rewards are NaN or infinite", {"reward": lambda n: n if n % 4 else math.nan}),
        ("variance", "fail", "In 2 of 2 (100%) groups all rewards are equal", {"reward": lambda n: 1}),
        ("variance", "warn", "In 1 of 2 (50%) groups all rewards are equal", {"reward": lambda n: n * (n < 4)}),
        (
            "success",
            "warn",
            "All rewards are 1, so they do not distinguish the replies. Replies: ",
            {"reward": lambda n: 1},
        ),
        (
            "success",
            "warn",
            "1 of 8 (12%) trajectories got more than the lowest reward, 0",
            {"reward": lambda n: n == 2},
        ),
        ("choices", "fail", "8 of 8 (100%) trajectories contain no Choice", {"keep": as_dict}),
        ("tokens", "fail", "No reply has token IDs", {"keep": bare}),
        ("tokens", "warn", "8 of 8 (100%) replies have no logprobs", {"keep": silent}),
        ("tokens", "fail", "2 logprobs for 3 sampled tokens", {"keep": torn}),
        ("scenario", "warn", "In 2 of 2 (100%) groups the rollouts see", {"text": lambda s, n: f"{s} {n}"}),
        ("context", "warn", "of 128 that fit", {"text": lambda s, n: "A1 " * 53}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_sick_rollout_is_told(home, name, verdict, said, options):
    found = await examine(home, player(**options))
    assert (found[name].verdict, said in found[name].finding) == (verdict, True), str(found)
    assert found.ok == all(check.verdict != "fail" for check in found.checks)
    assert found[name].advice or name == "tokens"
    assert name != "success" or "sample replies" in found[name].advice
    assert said[:20] in " ".join(str(found).split())


@pytest.mark.parametrize("role", ["system", "user"])
async def test_the_advice_about_success_depends_on_the_prompt_and_the_metrics(home, role):
    numbers = itertools.count()

    async def rollout(model, scenario):
        messages = [{"role": role, "content": "free: "}, {"role": "user", "content": "A1"}]
        choice = await ask(model, messages)
        criteria = {"polite": next(numbers) % 2, "right": 0}
        return art.Trajectory(messages_and_choices=[*messages, choice], reward=0.0, metrics=criteria)

    found = await examine(home, rollout)
    assert ("put the instruction into the user message" in found["success"].advice) == (role == "system")
    credit = f"(metrics that differ in groups with equal rewards: polite); ({4 if role == 'system' else 3}) add a few"
    assert credit in found["success"].advice
    assert "in chat.completions.create (response_format" in found["success"].advice
    assert "Always 0: right" in found["metrics"].finding


async def test_a_history_that_is_rewritten(home):
    async def rollout(model, scenario):
        first = await ask(model, [{"role": "user", "content": "A1"}])
        second = await ask(model, [{"role": "user", "content": "B2"}])
        talk = [{"role": "user", "content": "A1"}, first, {"role": "user", "content": "B2"}, second]
        return art.Trajectory(messages_and_choices=talk)

    found = await examine(home, rollout)
    assert "8 conversations become 16 training rows" in found["rows"].finding
    assert found["rows"].verdict == "warn"
    kept = player(turns=2, text=lambda s, n: f"free: {s} {n}")  # two replies to one prompt may print alike
    assert (await examine(home, kept))["rows"].verdict == "ok"


async def test_rollouts_that_hang_crash_or_lie(home):
    async def hang(model, scenario):
        await asyncio.sleep(60)

    async def lie(model, scenario):
        return 1.0

    for rollout, said in ((hang, "no trajectory after 0.2 s"), (lie, "returned float"), (lambda m, s: 1, "not async")):
        found = await examine(home, rollout, timeout_s=0.2 if rollout is hang else 60)
        assert [check.name for check in found.checks] == ["model", "rollouts", "rewards"]
        assert (said in found["rollouts"].finding, found["rollouts"].finding[:6]) == (True, "8 of 8")
        assert not found.ok


async def test_too_long_for_the_model(home):
    found = await examine(home, player(text=lambda s, n: "A1 B2 " * 200))
    assert "128 tokens" in found["rollouts"].finding
    assert not found.ok


async def test_a_model_without_a_backend(tiny_model_dir):
    found = await examine(art.TrainableModel(name="new", project="tests", base_model=str(tiny_model_dir)), player())
    assert (found["model"].verdict, "register" in found["model"].advice) == ("fail", True)
    assert "has no endpoint yet" in found["rollouts"].finding


async def test_a_prompted_model(home):
    model = art.Model(name="other", project="tests", inference_base_url="http://in-process/v1", inference_api_key="x")

    async def rollout(prompted, scenario):
        return await player(reward=lambda n: scenario)(home, scenario)

    found = await examine(model, rollout)
    assert (found.ok, "prompted model" in found["model"].finding) == (False, True)
    assert [check.name for check in found.checks] == [
        "model",
        "rollouts",
        "rewards",
        "variance",
        "success",
        "length",
        "scenario",
    ]


async def test_what_the_doctor_says_is_what_training_does(home):
    cases = [({}, True), ({"keep": silent}, True)]
    cases += [(sick, False) for sick in ({"reward": lambda n: 1}, {"keep": bare}, {"temperature": 0})]
    for options, learns in cases:
        rollout = player(**options)
        assert (await examine(home, rollout)).ok == learns
        pending = [art.TrajectoryGroup(rollout(home, scenario) for _ in range(4)) for scenario in range(2)]
        groups = await art.gather_trajectory_groups(pending, pbar_desc=None)
        result = await home.backend().train(home, groups)
        assert result.metrics["data/step_num_gradient_steps"] == learns


# parts


def test_the_table():
    checks = [Check("a", "ok", "Fine."), Check("longer", "warn", "word " * 40, "Do that.")]
    lines = str(DoctorReport(checks)).splitlines()
    assert lines[0] == "ok    a       Fine."
    assert max(map(len, lines)) <= 100
    assert all(line.startswith(" " * 14) for line in lines[2:-1])
    assert lines[-1] == "Explained in docs/how-to/debug.md"
    assert repr(DoctorReport(checks)) == str(DoctorReport(checks))
    assert (str(DoctorReport()), DoctorReport().ok) == ("", True)


def test_the_page_is_named_as_seen_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = DoctorReport([Check("a", "warn", "Wrong.")])
    place = str(report).rpartition("Explained in ")[2]
    assert place.startswith("../") and Path(place).read_text().startswith("# ")
    assert "<a" not in report._repr_html_(), "Jupyter cannot open a file outside of its directory"
    monkeypatch.chdir(Path(place).resolve().parents[1])
    assert str(report).endswith("Explained in how-to/debug.md")
    assert 'href="how-to/debug.md"' in report._repr_html_()


def test_the_cause_of_a_failure_is_the_last_line_that_is_not_in_a_library():
    def deep():
        return int("x")

    try:
        deep()
    except ValueError as error:
        record = PydanticException.of(error)
    assert failure_cause(record).startswith("test_doctor.py, line ")
    assert failure_cause(record).endswith('in deep: return int("x")')
    frames = [
        "cell",
        "agent.py",
        json.__file__,
        art.__file__,
        f"{site.getusersitepackages()}/a.py",
        "<frozen importlib>",
    ]
    lines = "".join(f'  File "{file}", line {n}, in f{n}\n    call({n})\n' for n, file in enumerate(frames))
    assert failure_cause(PydanticException(type="E", message="m", traceback=lines)) == "line 1, in f1: call(1)"
    only_libraries = PydanticException(type="E", message="m", traceback=f'  File "{json.__file__}", line 7, in load\n')
    assert failure_cause(only_libraries) == "__init__.py, line 7, in load"
    assert failure_cause(PydanticException(type="E", message="m", traceback="")) == ""


def test_a_ratio_at_the_border():
    def probe(*rewards):
        group = art.TrajectoryGroup(art.Trajectory(messages_and_choices=[], reward=r) for r in rewards)
        return Probe(art.Model(name="m", project="p"), player(), [group], [], 2.0)

    failed = probe(0, 1)
    failed.groups += [art.TrajectoryGroup([ValueError("no key")])]
    assert check_variance(failed).finding.endswith("the rewards differ. All rollouts of 1 other group failed.")
    failed.groups[0] = probe(1, 1).groups[0]
    assert check_variance(failed).finding.endswith("no gradient. All rollouts of 1 other group failed.")
    assert check_success(probe(*[0] * 7, 1, 1, 1)).verdict == "ok"
    assert check_success(probe(*[0] * 8, 1, 1)).verdict == "warn"
    assert check_success(probe(-1, -1, 0.5)).finding == (
        "1 of 3 (33%) trajectories got more than the lowest reward, -1. "
        "This verdict may change with other rollouts (95 % interval: 6 to 79 %)."
    )
    assert (check_rows(probe(0)), check_context(probe(0))) == (None, None)
    assert "8 x 8" in check_cost(probe(0)).finding


@pytest.mark.parametrize(
    ("better", "note"),
    [
        (1, ""),
        (2, " This verdict may change with other rollouts (95 % interval: 3 to 36 %)."),
        (8, " This verdict may change with other rollouts (95 % interval: 28 to 72 %)."),
        (9, ""),
    ],
)
def test_a_verdict_near_the_border_says_so(better, note):
    group = art.TrajectoryGroup(art.Trajectory(messages_and_choices=[], reward=float(i < better)) for i in range(16))
    finding = check_success(Probe(art.Model(name="m", project="p"), player(), [group], [], 2.0)).finding
    slow = "" if better > 4 else " Below about 30 %, training starts slowly."
    assert finding.partition(" trajectories ")[2] == f"got more than the lowest reward, 0.{slow}{note}"


@pytest.mark.parametrize(
    ("temperatures", "note"),
    [((None, None), ""), ((1, None), " Temperature: 1."), ((0.7, 0), " Temperature: 0 to 0.7.")],
)
@pytest.mark.parametrize("equal", [True, False])
def test_the_success_rate_names_the_temperature_if_it_is_known(temperatures, note, equal):
    def rolled_out(i, temperature):
        message = {"role": "assistant", "content": f"{i}"}
        choice = Choice.model_validate({"index": 0, "finish_reason": "stop", "message": message})
        if temperature is not None:
            choice.temperature = temperature
        return art.Trajectory(messages_and_choices=[*QUESTION, choice], reward=0.0 if equal else float(i))

    group = art.TrajectoryGroup(rolled_out(i, temperature) for i, temperature in enumerate(temperatures))
    finding = check_success(Probe(art.Model(name="m", project="p"), player(), [group], [], 2.0)).finding
    assert (note in finding) and ("Temperature" in finding) == bool(note)


def probe_of_groups(*groups):
    """A probe of groups of (reward, metrics)."""
    made = [
        art.TrajectoryGroup(art.Trajectory(messages_and_choices=[], reward=r, metrics=metrics) for r, metrics in group)
        for group in groups
    ]
    return Probe(art.Model(name="m", project="p"), player(), made, [], 2.0)


@pytest.mark.parametrize(
    ("rewards", "metrics", "verdict"),
    [
        ((1, 1, 1, 0.4), {}, "warn"),  # three of four groups are solved
        ((1, 1, 0.4, 0.4), {}, "fail"),
        ((1, 1, 1, 1), {}, "fail"),  # nothing shows that this is the best reward
        ((0.1, 0.1, 0.1, 0), {"right": False}, "fail"),
    ],
)
def test_equal_rewards_are_only_a_warning_if_most_groups_may_be_solved(rewards, metrics, verdict):
    check = check_variance(probe_of_groups(*([(reward, metrics)] * 4 for reward in rewards)))
    assert check.verdict == verdict
    assert ("In 3 of 4 groups, all rewards are the highest one, 1." in check.advice) == (verdict == "warn")


@pytest.mark.parametrize(
    ("rewards", "first", "second", "verdict"),
    [
        ((0.2, 0.6), {"right": False}, {"right": False}, "warn"),
        ((0.2, 0.2), {"right": False}, {"right": False}, "info"),  # see the check `variance`
        ((0.2, 0.6), {"invalid": False}, {"invalid": False}, "info"),
        ((0.2, 0.6), {"right": False, "invalid": False}, {"right": True, "invalid": False}, "info"),
        ((0.2, 0.6), {"right": False, "short": False}, {"right": False, "short": True}, "info"),  # a step on the way
        ((0.2, 0.6), {"right": False, "words": 3}, {"right": False, "words": 5}, "warn"),
    ],
)
def test_partial_credit_without_success_is_a_warning(rewards, first, second, verdict):
    check = check_metrics(probe_of_groups([*zip(rewards, (first, second), strict=True)]))
    assert check.verdict == verdict
    assert ("first train on examples" in check.advice) == (verdict == "warn")


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def with_tools(*calling, tools=(TOOL,)):
    """A probe of rollouts that were offered tools, and those that call one."""
    said = [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "4", "tool_calls": calls}}
        for calls in ([CALL] if one else None for one in calling)
    ]
    made = [
        art.Trajectory(
            messages_and_choices=[{"role": "user", "content": "2 + 2?"}, Choice.model_validate(one)],
            tools=[*tools] or None,
            reward=0.0,
        )
        for one in said
    ]
    return Probe(art.Model(name="m", project="tests"), None, [art.TrajectoryGroup(made)], made, 1.0)


def test_tools_that_are_offered_and_never_called():
    check = check_tools(with_tools(False, False, False))
    assert check.verdict == "warn"
    assert check.finding == "Tools were offered but never called: 0 of 3 trajectories call one."
    assert 'tool_choice="required"' in check.advice and "train_sft" in check.advice
    assert check_tools(with_tools(False, True)).finding == "1 of 2 (50%) trajectories with tools call one."
    assert check_tools(with_tools(False, tools=())) is None


async def test_the_doctor_looks_at_tools_only_where_they_were_offered(home):
    async def rollout(model, scenario):
        trajectory = await player()(model, scenario)
        trajectory.tools = [TOOL] if offered else None
        return trajectory

    for offered in (True, False):
        verdicts = {check.name: check.verdict for check in (await examine(home, rollout)).checks}
        assert verdicts.get("tools") == ("warn" if offered else None)


@pytest.mark.parametrize(
    ("options", "advice"), [({}, "set no limit"), ({"max_tokens": 90}, "a failed rollout is not trained")]
)
async def test_a_timeout_names_a_missing_limit(home, options, advice):
    async def interrupted(model, scenario):
        request = {"model": model.get_inference_name(), "messages": QUESTION, "stream": True, **options}
        async with await model.openai_client().chat.completions.create(**request) as stream:
            await anext(aiter(stream))
        await asyncio.Event().wait()

    check = (await art.doctor(home, interrupted, [0], timeout_s=3))["rollouts"]
    assert "line " in check.finding and advice in check.advice
