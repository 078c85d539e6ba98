"""Routes for the storage of Weave 0.52.41 (`python weave_server.py DATABASE PORT`), in .venv-observer-weave-server.

The newest wheels have no storage any more. Newer clients send fields that it does not know, so these are left out.
"""

import json
import sys

import uvicorn
from fastapi import FastAPI, Request, Response
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from pydantic import BaseModel
from weave.trace_server import trace_server_interface as tsi
from weave.trace_server.external_to_internal_trace_server_adapter import ExternalTraceServer, IdConverter
from weave.trace_server.sqlite_trace_server import SqliteTraceServer

ENTITY, USER = "tests", "tester"


class PlainIds(IdConverter):
    """Internal IDs are external IDs in hexadecimal digits."""

    def ext_to_int_project_id(self, project_id):
        return project_id.encode().hex()

    def int_to_ext_project_id(self, project_id):
        return bytes.fromhex(project_id).decode()

    def ext_to_int_run_id(self, run_id):
        return run_id

    def int_to_ext_run_id(self, run_id):
        return run_id

    def ext_to_int_user_id(self, user_id):
        return user_id

    def int_to_ext_user_id(self, user_id):
        return user_id


storage = SqliteTraceServer(sys.argv[1])
storage.setup_tables()
server, app = ExternalTraceServer(storage, PlainIds()), FastAPI()
METHODS = {
    "call/start": ("call_start", tsi.CallStartReq),
    "call/end": ("call_end", tsi.CallEndReq),
    "call/upsert_batch": ("call_start_batch", tsi.CallCreateBatchReq),
    "calls/stream_query": ("calls_query_stream", tsi.CallsQueryReq),
    "obj/create": ("obj_create", tsi.ObjCreateReq),
    "obj/read": ("obj_read", tsi.ObjReadReq),
    "table/create": ("table_create", tsi.TableCreateReq),
    "feedback/create": ("feedback_create", tsi.FeedbackCreateReq),
    "feedback/query": ("feedback_query", tsi.FeedbackQueryReq),
    "feedback/purge": ("feedback_purge", tsi.FeedbackPurgeReq),
    "feedback/replace": ("feedback_replace", tsi.FeedbackReplaceReq),
}


def known(model, data):
    """Leave out the fields that a model does not have."""
    if not (isinstance(model, type) and issubclass(model, BaseModel) and isinstance(data, dict)):
        return data
    return {
        name: known(model.model_fields[name].annotation, v) for name, v in data.items() if name in model.model_fields
    }


def call(method, model, data):
    """Call a method of the storage."""
    data = known(model, data)
    if "wb_user_id" in model.model_fields:
        data["wb_user_id"] = USER
    return getattr(server, method)(model.model_validate(data))


def reply(result):
    """A reply of one object, or of lines."""
    if isinstance(result, BaseModel):
        return Response(result.model_dump_json(), media_type="application/json")
    return Response("".join(item.model_dump_json() + "\n" for item in result), media_type="application/jsonl")


@app.get("/server_info")
def server_info():
    return {"min_required_weave_python_version": "0.0.1"}


@app.post("/graphql")
async def graphql(request: Request):
    query = await request.json()
    name = (query.get("variables") or {}).get("name") or "project"
    viewer = {"id": USER, "username": USER, "defaultEntity": {"name": ENTITY}}
    return {"data": {"viewer": viewer, "model": {"name": name}, "project": {"name": name}}}


@app.post("/otel/v1/traces")
async def otel(request: Request):
    message = ExportTraceServiceRequest.FromString(await request.body())
    project_id = request.headers["project_id"]
    entity, _, project = project_id.partition("/")
    spans = [
        tsi.ProcessedResourceSpans(entity=entity, project=project, run_id=None, resource_spans=each)
        for each in message.resource_spans
    ]
    server.otel_export(tsi.OTelExportReq(processed_spans=spans, project_id=project_id, wb_user_id=USER))
    return Response(ExportTraceServiceResponse().SerializeToString(), media_type="application/x-protobuf")


@app.post("/v2/{entity}/{project}/calls/complete")
async def calls_complete(entity: str, project: str, request: Request):
    for complete in json.loads(await request.body())["batch"]:
        start = known(tsi.StartedCallSchemaForInsert, complete)
        end = known(tsi.EndedCallSchemaForInsert, complete)
        call("call_start", tsi.CallStartReq, {"start": start | {"wb_user_id": USER}})
        call("call_end", tsi.CallEndReq, {"end": end})
    return {}


@app.post("/v2/{entity}/{project}/call/{event}")
async def call_event(entity: str, project: str, event: str, request: Request):
    """The start or the end of a call that is sent alone, for example of an evaluation."""
    method, model = METHODS[f"call/{event}"]
    return reply(call(method, model, {event: json.loads(await request.body())[event] | {"wb_user_id": USER}}))


@app.post("/feedback/batch/create")
async def feedback_batch(request: Request):
    batch = json.loads(await request.body())["batch"]
    results = [call("feedback_create", tsi.FeedbackCreateReq, each) for each in batch]
    return {"res": [json.loads(result.model_dump_json()) for result in results]}


@app.post("/file/create")
@app.post("/files/create")
async def file_create(request: Request):
    form = await request.form()
    content = await form["file"].read()
    req = tsi.FileCreateReq(project_id=form["project_id"], name=form["file"].filename, content=content)
    return reply(server.file_create(req))


@app.post("/{path:path}")
async def anything(path: str, request: Request):
    if path not in METHODS:
        return Response(f"no route for {path}", 404)
    method, model = METHODS[path]
    return reply(call(method, model, json.loads(await request.body())))


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
