"""The task of yes-no-maybe.ipynb, for other tutorials: three words, of which "maybe" has the highest reward."""

from itertools import permutations

import art_nb as art

WORTH = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
asking = ["Pick one: {} / {} / {}", "Choose: {} / {} / {}", "{} / {} / {}?"]
prompts = [ask.format(*words) for ask in asking for words in permutations(WORTH)]


async def rollout(model, prompt):
    messages = [{"role": "system", "content": "Answer with one word."}, {"role": "user", "content": prompt}]
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_completion_tokens=5, logprobs=True
    )
    word = (completion.choices[0].message.content or "").strip(" .!\n").lower()
    trajectory = art.Trajectory(messages_and_choices=[*messages, completion.choices[0]], reward=WORTH.get(word, 0.0))
    trajectory.metrics["maybe"] = word == "maybe"
    return trajectory.finish()
