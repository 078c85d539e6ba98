"""Short answers to simple questions: the questions, a rollout, and a rule that needs no judge."""

import re

import art_nb as art

SYSTEM = "Answer in one short sentence."
QUESTIONS = [
    "Why is the sky blue?",
    "Why do we sleep?",
    "What does a baker do?",
    "How do birds stay warm in winter?",
    "Why do leaves fall in autumn?",
    "What is a bridge for?",
]
TRAIN_QUESTIONS = [
    "What does a dentist do?",
    "Why does ice float?",
    "What is a library for?",
    "How do fish breathe?",
    "Why do we wash our hands?",
    "What is a clock for?",
    "What does a gardener do?",
    "Why do cats purr?",
    "How does bread rise?",
    "What is a map for?",
    "Why do we have seasons?",
    "What does a pilot do?",
    "Why is the sea salty?",
    "How do bees make honey?",
    "What is an umbrella for?",
    "Why do we need money?",
]
TEST_QUESTIONS = [
    "What does a teacher do?",
    "Why does wood float?",
    "What is a bell for?",
    "How do plants drink?",
    "Why do we brush our teeth?",
    "What is a window for?",
    "What does a farmer do?",
    "Why do dogs bark?",
    "How does soap work?",
    "What is a key for?",
    "Why is it dark at night?",
    "What does a painter do?",
    "Why is snow cold?",
    "How do spiders catch flies?",
    "What is a ladder for?",
    "Why do we need water?",
]


async def rollout(model: art.Model, question: str, **options) -> art.Trajectory:
    """Sample one answer."""
    messages: art.Messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    trajectory = art.Trajectory(messages_and_choices=[*messages], metadata={"question": question})
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_completion_tokens=60, logprobs=True, **options
    )
    trajectory.messages_and_choices.append(completion.choices[0])
    trajectory.metrics["words"] = len((completion.choices[0].message.content or "").split())
    return trajectory.finish()


def one_short_sentence(trajectory: art.Trajectory) -> tuple[float, str]:
    """Score 1 for one complete sentence of at most 15 words, regardless of its meaning."""
    text = str(trajectory.messages()[-1].get("content")).strip()
    words, sentences = len(text.split()), len(re.findall(r"[.!?](?:\s|$)", text))
    score = min(1.0, 15 / max(words, 1)) * (1.0 if sentences == 1 else 0.5) if sentences else 0.0
    return score, f"{words} words, {sentences} whole sentences"
