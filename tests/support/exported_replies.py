"""A trained model, its greedy replies to 50 questions, and where the replies of an exported model differ from them."""

import asyncio
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import art_nb as art
from art_nb.models.weights import fetch

NEW = 16
ANIMALS = "lion owl whale ant fox bear crow trout wolf bee".split()
QUESTIONS = [
    f"{ask} {animal}?"
    for animal in ANIMALS
    for ask in ("Where does it live: the", "What eats the", "What is a", "How big is a", "Tell me a joke about the")
]
NEAR = 0.5  # nats: a larger difference between two tokens is not a matter of rounding


@dataclass(frozen=True)
class Difference:
    """The first different token of a reply, and the probabilities that our model in fp32 gives both tokens."""

    question: str
    position: int
    ours: str
    theirs: str
    p_ours: float
    p_theirs: float

    @property
    def nats(self):
        """How much our model prefers its own token."""
        return float(torch.log(torch.tensor(self.p_ours / self.p_theirs)))


@dataclass
class Replies:
    """The model, and the token IDs of the prompt and of the reply for each question."""

    model: art.TrainableModel
    folder: Path
    tokens: dict[str, tuple[list[int], list[int]]]

    @cached_property
    def tokenizer(self):
        """The tokenizer."""
        return AutoTokenizer.from_pretrained(fetch("smollm2-135m"))

    @cached_property
    def exact(self):
        """The merged weights in fp32 in transformers."""
        folder = self.folder / "exact"
        art.reports.export_model(self.model, "merged", folder, dtype="float32", progress=False)
        return AutoModelForCausalLM.from_pretrained(folder)

    def differences(self, name, replies):
        """Return the differences of the replies of an exported model, and print them as rows of a table."""
        found = []
        for question, theirs in zip(QUESTIONS, replies, strict=True):
            prompt, ours = self.tokens[question]
            place = next((i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), None)
            if place is None:
                assert abs(len(ours) - len(theirs)) <= 1, question  # llama.cpp and vLLM leave out the end token
            else:
                found.append(self._difference(question, prompt, ours, theirs, place))
        print(f"\n{name}: {len(QUESTIONS) - len(found)} of {len(QUESTIONS)} equal")
        for d in found:
            values = f"{d.ours!r}, {d.theirs!r} | {d.p_ours:.4f}, {d.p_theirs:.4f}"
            print(f"| {name} | {d.question} | {d.position} | {values} |")
        return found

    def _difference(self, question, prompt, ours, theirs, place):
        with torch.no_grad():
            probabilities = self.exact(torch.tensor([prompt + ours[:place]])).logits[0, -1].softmax(-1)
        texts = [self.tokenizer.decode([ids[place]]) for ids in (ours, theirs)]
        return Difference(question, place, *texts, *(float(probabilities[ids[place]]) for ids in (ours, theirs)))


async def trained_replies(folder):
    """Train SmolLM2-135M on a few conversations, in fp32, and ask it the questions."""
    path = str(folder / ".art")
    model = art.TrainableModel(name="animals", project="p", base_model="smollm2-135m", base_path=path)
    backend = art.LocalBackend(path=path, dtype="float32", sampler="transformers")
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
    await model.train_sft(rows * 2, art.TrainSFTConfig(learning_rate=3e-3, batch_size=8))
    client = model.openai_client()
    completions = await asyncio.gather(
        *(
            client.chat.completions.create(
                model=model.get_inference_name(),
                messages=[{"role": "user", "content": question}],
                temperature=0,
                max_tokens=NEW,
                logprobs=True,
            )
            for question in QUESTIONS
        )
    )
    extras = [completion.choices[0].model_extra for completion in completions]
    await backend.close()
    tokens = {q: (extra["prompt_token_ids"], extra["token_ids"]) for q, extra in zip(QUESTIONS, extras, strict=True)}
    return Replies(model, folder, tokens)
