"""Conversion of any value to JSON."""

import functools
import json
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from art_nb.core.jsonable import MAX_PLAIN_DEPTH, json_safe, plain
from art_nb.rollouts.trajectories import Trajectory, TrajectoryGroup
from art_nb.runs.store import RunStore


class Note(BaseModel):
    text: Any


class Unreadable:
    def __float__(self):
        raise TypeError("not one number")


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def endless():
    value = {}
    value["itself"] = value
    return value


ODD = {
    "tensor": torch.ones(2),
    "tensor without elements": torch.ones(0),
    "object": Unreadable(),
    "longdouble": np.longdouble(0.5),
    "longdoubles": np.ones(2, np.longdouble),
    "clongdouble": np.clongdouble(1),
    "deep list": nested(5000),
    "endless dict": endless(),
    "set": {"\ud800"},
    "model": Note(text="\ud800"),
    "model in a model": Note(text=[Note(text={"\ud800": 1})]),
    "text": "\ud800",
    "bytes": b"\xff",
    "class": Unreadable,
}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD.keys())
def test_every_value_becomes_json_and_utf8(value):
    for form in (value, [value], {"key": value}, (value,)):
        json.dumps(plain(form), allow_nan=False)
        json.dumps(json_safe(form), allow_nan=False, ensure_ascii=False).encode()


def test_numbers_at_the_deepest_level_stay_numbers():
    value = plain(functools.reduce(lambda inner, _: [inner], range(MAX_PLAIN_DEPTH), {"int": 1, "float": 1.5}))
    for _ in range(MAX_PLAIN_DEPTH):
        (value,) = value
    assert value == {"int": 1, "float": 1.5}


def test_a_series_of_pandas():
    pandas = pytest.importorskip("pandas")
    assert plain({"rewards": pandas.Series([1, 2])})["rewards"].startswith("0    1")


def test_a_tensor_in_metadata_does_not_lose_the_step(tmp_path):
    trajectory = Trajectory(messages_and_choices=[{"role": "user", "content": "A1"}], metadata={})
    trajectory.metadata["board"] = torch.ones(2)
    store = RunStore(tmp_path)
    store.write_groups("train", 1, [TrajectoryGroup([trajectory])])
    [group] = store.read_groups("train", 1)
    assert group.trajectories[0].metadata == {"board": "tensor([1., 1.])"}
