"""The bus under threads, broken subscribers and re-entrance; the wire format of every event."""

import dataclasses
import json
import threading

import numpy as np
import pytest

from art_nb.core.events import (
    EVENTS,
    Bus,
    Event,
    GroupDone,
    RolloutDone,
    StepDone,
    Warned,
    from_json,
    print_once,
    print_warnings,
    to_json,
)
from art_nb.core.jsonable import plain

SAMPLES = {"str": "x", "bool": True, "int": 3, "float": 0.5, "dict": {"loss": 0.1}, "list": [1.0, 2.0]}


def sample(kind):
    values = {
        f.name: SAMPLES[str(f.type).split(" |")[0].removeprefix("<class '").removesuffix("'>")]
        for f in dataclasses.fields(kind)
    }
    return kind(**values)


@pytest.mark.parametrize("kind", EVENTS.values(), ids=EVENTS)
def test_every_event_survives_json(kind):
    event = sample(kind)
    wire = json.loads(json.dumps(to_json(event), allow_nan=False))
    assert wire["event"] == kind.__name__
    assert from_json(wire) == event
    assert isinstance(event, Event)
    assert not hasattr(event, "__dict__")


def test_numpy_and_nan_reach_the_wire_as_json():
    event = RolloutDone(rollout="a", reward=np.float32("nan"), metrics={"n": np.int64(2), "loss": float("inf")})
    wire = json.loads(json.dumps(to_json(event), allow_nan=False))
    assert (wire["reward"], wire["metrics"]) == (None, {"n": 2, "loss": None})


def test_plain_leaves_nothing_that_json_refuses():
    nasty = {1: {2, 3}, "a": np.array([[1.0, np.nan]]), "b": ValueError("x"), "c": (np.bool_(False), b"y")}
    assert json.loads(json.dumps(plain(nasty), allow_nan=False))["a"] == [[1.0, None]]


def test_unknown_events_and_keys_are_passed_over():
    assert from_json({"event": "Nope"}) is None
    assert from_json({}) is None
    assert from_json({"event": "GroupDone", "step": 1}) is None
    assert from_json({"event": "GroupDone", "group": "g", "new": 1, "time": 2.0}) == GroupDone(group="g", time=2.0)


def test_all_subscribers_see_one_order_from_many_threads():
    bus, first, second = Bus(), [], []
    bus.subscribe(first.append)
    bus.subscribe(second.append)
    threads = [
        threading.Thread(target=lambda k=k: [bus.emit(StepDone(step=1000 * k + i)) for i in range(200)])
        for k in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [e.step for e in first] == [e.step for e in second]
    assert len(first) == 1600
    for k in range(8):
        own = [e.step for e in first if e.step // 1000 == k]
        assert own == sorted(own)


def test_a_broken_subscriber_is_dropped_and_the_others_hear_of_it(caplog):
    bus, heard, calls = Bus(), [], []

    def broken(event):
        calls.append(event)
        raise ValueError("no widget")

    bus.subscribe(broken)
    bus.subscribe(heard.append)
    bus.emit(StepDone(step=1))
    bus.emit(StepDone(step=2))
    assert len(calls) == 1
    assert [type(e) for e in heard] == [StepDone, Warned, StepDone]
    assert "no widget" in heard[1].message
    assert "no widget" in caplog.text


def test_an_event_emitted_by_a_subscriber_waits_its_turn():
    bus, heard = Bus(), []

    def echo(event):
        if event.step < 3:
            bus.emit(StepDone(step=event.step + 1))

    bus.subscribe(echo, StepDone)
    bus.subscribe(lambda event: heard.append(event.step))
    bus.emit(StepDone(step=0))
    assert heard == [0, 1, 2, 3]


def test_subscribers_can_change_while_events_are_delivered():
    bus, heard = Bus(), []
    stops = []

    def once(event):
        stops[0]()
        bus.subscribe(heard.append)

    stops.append(bus.subscribe(once))
    bus.emit(StepDone(step=0))
    bus.emit(StepDone(step=1))
    stops[0]()
    assert [e.step for e in heard] == [1]


def test_an_interrupt_in_a_subscriber_does_not_jam_the_bus():
    bus, heard = Bus(), []

    def interrupted(event):
        raise KeyboardInterrupt

    unsubscribe = bus.subscribe(interrupted)
    with pytest.raises(KeyboardInterrupt):
        bus.emit(StepDone(step=0))
    unsubscribe()
    bus.subscribe(heard.append)
    bus.emit(StepDone(step=1))
    assert [e.step for e in heard] == [1]


def test_a_warning_is_printed_once_by_overlapping_contexts(capsys):
    bus = Bus()
    with print_warnings(bus):
        with print_warnings(bus), print_warnings(bus, verbose=False):
            bus.warn_once("a", "first")
        bus.warn_once("b", "second")
        print_once(bus, "third")
        print_once(bus, "third")
        bus.inform_once("g", "explained")
        bus.inform_once("g", "explained")
    with print_warnings(bus, verbose=False):
        bus.warn_once("d", "fourth")
    print_once(bus, "fifth")
    bus.warn_once("f", "sixth")
    assert capsys.readouterr().out.split() == ["first", "second", "third", "explained", "fifth"]


def test_the_run_is_stamped_and_warnings_are_said_once():
    bus, heard = Bus(run="r1"), []
    bus.subscribe(heard.append)
    bus.emit(StepDone(step=0))
    bus.emit(StepDone(step=0, run="other"))
    threads = [threading.Thread(target=bus.warn_once, args=("k", "m")) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [e.run for e in heard] == ["r1", "other", "r1"]
