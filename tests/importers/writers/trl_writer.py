"""Datasets in the formats of TRL: `python trl_writer.py FOLDER`."""

import json
import sys
from pathlib import Path

from datasets import Dataset, DatasetDict
from trl.data_utils import maybe_extract_prompt, maybe_unpair_preference_dataset

folder = Path(sys.argv[1])
ASK = [{"role": "user", "content": "2 + 2?"}]
RIGHT, WRONG = [{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "5"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
with_tools = [*ASK, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "name": "add", "content": "4"}]
messages = Dataset.from_list(
    [{"messages": [*ASK, *RIGHT], "tools": None}, {"messages": [*with_tools, *RIGHT], "tools": json.dumps([SCHEMA])}]
)
messages.to_parquet(folder / "trl_messages.parquet")
pairs = Dataset.from_list([{"chosen": [*ASK, *RIGHT], "rejected": [*ASK, *WRONG]}])
explicit = pairs.map(maybe_extract_prompt)
explicit.to_parquet(folder / "trl_preference.parquet")
pairs.to_json(folder / "trl_preference_implicit.jsonl")
maybe_unpair_preference_dataset(explicit).to_json(folder / "trl_unpaired.jsonl")
Dataset.from_list([{"prompt": "2 + 2?", "completion": " 4"}]).to_json(folder / "trl_completion.jsonl")
Dataset.from_list([{"prompt": ASK}]).to_json(folder / "trl_prompts.jsonl")
DatasetDict({"train": messages, "test": messages.select([0])}).save_to_disk(folder / "trl_saved")
