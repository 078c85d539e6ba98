"""Greedy replies of exported models, token by token with ours (`make test-export`).

The model is SmolLM2-135M with an adapter that was trained on a few conversations. In fp32, transformers must give the
same tokens. A file with 16-bit weights has rounded updates, so its tokens may differ where two tokens are about equally
likely: the test prints these places with the difference of their logprobs.
"""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import art_nb as art
from art_nb.models.weights import fetch

pytest.importorskip("xllamacpp", reason="make test-export installs the packages")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
NEW = 16
ANIMALS = "lion owl whale ant fox bear crow trout wolf bee".split()
QUESTIONS = [
    f"{ask} {animal}?"
    for animal in ANIMALS
    for ask in ("Where does it live: the", "What eats the", "What is a", "How big is a", "Tell me a joke about the")
]
NEAR = 0.5  # nats: a larger difference between two tokens is not a matter of rounding


@pytest.fixture(scope="module")
async def replies(tmp_path_factory):
    """A trained run, and our greedy replies to 50 questions."""
    path = str(tmp_path_factory.mktemp("replies") / ".art")
    model = art.TrainableModel(name="animals", project="p", base_model="smollm2-135m", base_path=path)
    backend = art.LocalBackend(path=path, dtype="float32")
    await model.register(backend)
    say = lambda i: f"The {ANIMALS[i]} is a creature that I have number {i} for. Ask the {ANIMALS[-i]} about it!"
    rows = [
        art.Trajectory(
            messages_and_choices=[
                {"role": "user", "content": QUESTIONS[5 * i + k]},
                {"role": "assistant", "content": say(i)},
            ]
        )
        for i in range(0, 10, 3)
        for k in (0, 3)
    ]
    await model.train_sft(rows * 3, art.TrainSFTConfig(learning_rate=1e-3, batch_size=4))
    client, found = model.openai_client(), {}
    for question in QUESTIONS:
        completion = await client.chat.completions.create(
            model=model.get_inference_name(),
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=NEW,
            logprobs=True,
        )
        extra = completion.choices[0].model_extra
        found[question] = (extra["prompt_token_ids"], extra["token_ids"])
    await backend.close()
    return model, found


def greedy(model, prompt):
    """The greedy reply of a model of transformers."""
    with torch.no_grad():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return ids[0, len(prompt) :].tolist()


def differences(found, reply, reference):
    """The places of the first different token of each reply, and by how much our model prefers its own there."""
    places = []
    for question, (prompt, ours) in found.items():
        theirs = reply(question, prompt)
        place = next((i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), None)
        if place is None:
            assert ours[: len(theirs)] == theirs[: len(ours)] and abs(len(ours) - len(theirs)) <= 1, question
            continue
        with torch.no_grad():
            logprobs = reference(torch.tensor([prompt + ours[:place]])).logits[0, -1].log_softmax(-1)
        places.append((question, place, float(logprobs[ours[place]] - logprobs[theirs[place]])))
    return places


async def test_transformers_and_peft_give_our_tokens(replies, tmp_path):
    model, found = replies
    merged = await model.export("merged", tmp_path / "merged", dtype="float32", progress=False)
    adapter = await model.export("peft", tmp_path / "peft", progress=False)
    base = AutoModelForCausalLM.from_pretrained(fetch("smollm2-135m"), dtype=torch.float32)
    plain = sum(greedy(base, prompt) != ours for prompt, ours in found.values())
    tuned = PeftModel.from_pretrained(base, adapter)
    loaded = AutoModelForCausalLM.from_pretrained(merged)
    results = {
        "merged": differences(found, lambda _, prompt: greedy(loaded, prompt), loaded),
        "peft": differences(found, lambda _, prompt: greedy(tuned, prompt), loaded),
    }
    print(
        {name: f"{50 - len(places)} of 50 equal {places}" for name, places in results.items()}, f"base: {plain} differ"
    )
    assert plain > 40  # the adapter changes the replies
    assert results == {"merged": [], "peft": []}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_16_bit_weights_differ_only_where_two_tokens_are_equally_likely(replies, tmp_path, dtype):
    model, found = replies
    merged = await model.export("merged", tmp_path / "merged", dtype=dtype, progress=False)
    loaded = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    exact = AutoModelForCausalLM.from_pretrained(
        await model.export("merged", tmp_path / "exact", dtype="float32", progress=False)
    )
    places = differences(found, lambda _, prompt: greedy(loaded, prompt), exact)
    print(f"merged, {dtype}: {50 - len(places)} of 50 equal", places)
    assert all(margin < NEAR for _, _, margin in places)


def served(file):
    """llama.cpp with a GGUF file, on one core."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="make test-export installs the package")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.cpuparams.n_threads = str(file), 1024, 1, 1
    return xllamacpp.Server(params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_llama_cpp_gives_our_texts(replies, tmp_path, dtype):
    model, found = replies
    server = served(await model.export("gguf", tmp_path / "model.gguf", dtype=dtype, progress=False))
    exact = AutoModelForCausalLM.from_pretrained(
        await model.export("merged", tmp_path / "exact", dtype="float32", progress=False)
    )
    tokenizer = AutoTokenizer.from_pretrained(fetch("smollm2-135m"))

    def reply(question, prompt):
        request = {"prompt": prompt, "n_predict": NEW, "temperature": 0, "top_k": 1, "repeat_penalty": 1.0}
        text = server.handle_completions(request)["choices"][0]["text"]
        if text == tokenizer.decode(found[question][1], skip_special_tokens=True):
            return found[question][1]
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    places = differences(found, reply, exact)
    print(f"gguf, {dtype}: {50 - len(places)} of 50 equal", places)
    assert all(margin < NEAR for _, _, margin in places)
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    chat = server.handle_chat_completions({"messages": messages, "temperature": 0, "max_tokens": NEW})
    by_ids = server.handle_completions({"prompt": found[QUESTIONS[0]][0], "n_predict": NEW, "temperature": 0})
    assert chat["choices"][0]["message"]["content"].strip() == by_ids["choices"][0]["text"].strip()
