"""Parts for the tests of the server for Tinker's client: a server of the tiny model, and requests over HTTP."""

from contextlib import contextmanager

import httpx
import numpy as np

from art_nb.servers.tinker_messages import new_message, parse_message
from art_nb.servers.tinker_server import TinkerServer

PROTOBUF = {"content-type": "application/x-protobuf"}


class TinkerHttp:
    """The requests of Tinker's client, with httpx."""

    def __init__(self, server, base_model):
        self.http = httpx.Client(
            base_url=f"{server.url}/api/v1", timeout=120, headers={"x-api-key": server.api_key}, trust_env=False
        )
        self.base_model = base_model
        self.session = self.post("create_session", tags=[], sdk_version="0.38.0")["session_id"]
        self.seq = 0

    def post(self, path, /, **body):
        """Return the answer to a request that must succeed."""
        response = self.http.post(f"/{path}", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def retrieve(self, answer):
        """Return the response with the result of a request."""
        while True:
            response = self.http.post("/retrieve_future", json={"request_id": answer["request_id"]})
            assert response.status_code == 200, response.text
            if response.headers["content-type"] == PROTOBUF["content-type"]:
                return response.content
            if response.json().get("type") != "try_again":
                return response.json()

    def create_model(self, number=0, **lora):
        """Create a model and return its ID."""
        config = {"rank": 8, "seed": 3} | lora
        body = {"session_id": self.session, "model_seq_id": number, "base_model": self.base_model}
        return self.retrieve(self.post("create_model", **body, lora_config=config))["model_id"]

    def send_data(self, model_id, seq_id, loss, data, config=None, forward_only=False):
        """Send a request with data and return the first answer."""
        message = request_message(model_id, seq_id, loss, data, config or {}, forward_only)
        response = self.http.post("/forward_backward", content=message.SerializeToString(), headers=PROTOBUF)
        assert response.status_code == 200, response.text
        return response.json()

    def forward_backward(self, *args, **options):
        """Send a request with data. Return the metrics and the arrays of each item, or the error."""
        content = self.retrieve(self.send_data(*args, **options))
        if isinstance(content, dict):
            return content
        return read_output(content)

    def optim_step(self, model_id, seq_id, **params):
        """Take an optimizer step."""
        return self.retrieve(self.post("optim_step", model_id=model_id, seq_id=seq_id, adam_params=params))


def tensor(array):
    """Return an array as a message of the client."""
    array = np.asarray(array)
    kind = "<i8" if array.dtype.kind in "iu" else "<f4"
    number = 2 if kind == "<i8" else 1
    return new_message("Tensor", dense=array.astype(kind).tobytes(), dtype=number, shape=array.shape)


def request_message(model_id, seq_id, loss, data, config, forward_only=False):
    """Return a `forward_backward` request. `data` has the tokens and the arrays of each item."""
    messages = []
    for tokens, inputs in data:
        chunk = new_message("EncodedTextChunk", tokens=np.array(tokens, "<i4").tobytes())
        arrays = [new_message("LossInput", key=name, value=tensor(array)) for name, array in inputs.items()]
        messages.append(
            new_message("Datum", model_input=[new_message("Chunk", encoded_text=chunk)], loss_fn_inputs=arrays)
        )
    options = [new_message("Metric", key=name, value=value) for name, value in config.items()]
    return new_message(
        "ForwardBackwardRequest",
        model_id=model_id,
        seq_id=seq_id,
        data=messages,
        loss_fn=loss,
        loss_fn_config=options,
        forward_only=forward_only,
    )


def read_output(content):
    """Return the metrics and the arrays of each item of a `forward_backward` result."""
    output = parse_message("ForwardBackwardOutput", content)
    items = []
    for record in output.loss_fn_outputs:
        columns = {}
        for field in record.fields:
            offsets = np.frombuffer(field.value.offsets, "<i8") // 4
            parts = np.split(np.frombuffer(field.value.data, "<f4"), offsets[1:-1])
            columns[field.key] = [part.reshape(-1, *field.value.trailing_shape) for part in parts]
        items += [{name: parts[i] for name, parts in columns.items()} for i in range(record.num_datums)]
    return {entry.key: entry.value for entry in output.metrics}, items


@contextmanager
def serving(base_model, path, **options):
    """Serve a base model on a free port."""
    settings = {"device": "cpu", "dtype": "float32", "max_running": 16} | options
    with TinkerServer([str(base_model)], path=path, port=0, **settings) as server:
        yield server
