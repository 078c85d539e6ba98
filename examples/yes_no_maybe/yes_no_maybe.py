"""The task of yes-no-maybe.ipynb, for other tutorials: three words, of which "maybe" has the highest reward."""

from itertools import permutations

import art_nb as art

REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
TEMPLATES = ["Pick one: {} / {} / {}", "Choose: {} / {} / {}", "{} / {} / {}?"]
prompts = [template.format(*words) for template in TEMPLATES for words in permutations(REWARDS)]


async def rollout(model, prompt):
    messages = [{"role": "system", "content": "Answer with one word."}, {"role": "user", "content": prompt}]
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_completion_tokens=5, logprobs=True
    )
    word = (completion.choices[0].message.content or "").strip(" .!\n").lower()
    trajectory = art.Trajectory(messages_and_choices=[*messages, completion.choices[0]], reward=REWARDS.get(word, 0.0))
    trajectory.metrics["maybe"] = word == "maybe"
    return trajectory.finish()
