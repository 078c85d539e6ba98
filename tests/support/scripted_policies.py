"""A policy that follows a function of its prompt, behind a real endpoint, for the tests of environments."""

from contextlib import contextmanager

from support.server_parts import Scripted, endpoint

import art_nb as art


class Following(Scripted):
    """A sampler whose reply is a function of the prompt's text."""

    def __init__(self, answer, max_model_len):
        super().__init__()
        self.answer, self.max_model_len = answer, max_model_len

    async def generate(self, prompt_ids, params, adapter):
        self.words = self.answer(bytes(prompt_ids).decode("utf-8", "replace"))
        async for token in super().generate(prompt_ids, params, adapter):
            yield token


@contextmanager
def policy(answer, name="policy", max_model_len=400_000):
    """Serve a function of the prompt as a model."""
    served = endpoint(Following(answer, max_model_len))
    served.start()
    try:
        yield art.Model(
            name=name,
            project="tests",
            inference_base_url=served.base_url,
            inference_api_key=served.api_key,
            inference_model_name="ttt@3",
        )
    finally:
        served.stop()
