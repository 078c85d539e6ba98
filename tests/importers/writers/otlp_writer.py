"""Spans of OpenTelemetry as JSON lines: `python otlp_writer.py openinference|genai FILE`."""

import os
import sys

os.environ["OTEL_SEMCONV_STABILITY_OPT_IN"] = "gen_ai_latest_experimental"
os.environ["OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"] = "SPAN_ONLY"

from agent import SESSIONS, answer, client
from opentelemetry import trace
from opentelemetry.exporter.otlp.json.file import FileSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

KIND, PATH = sys.argv[1:]
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(FileSpanExporter(PATH)))
trace.set_tracer_provider(provider)
if KIND == "openinference":
    from openinference.instrumentation import using_session
    from openinference.instrumentation.openai import OpenAIInstrumentor
else:
    from opentelemetry.instrumentation.genai.openai import OpenAIInstrumentor
OpenAIInstrumentor().instrument(tracer_provider=provider)
tracer, llm = trace.get_tracer("tests"), client()
for session, questions in SESSIONS.items():
    for question in questions:
        attributes = {} if KIND == "openinference" else {"gen_ai.conversation.id": session}
        with tracer.start_as_current_span("invoke_agent guide", attributes=attributes) as span:
            if KIND == "openinference":
                with using_session(session):
                    answer(llm, question)
            else:
                answer(llm, question)
                evaluation = {"gen_ai.evaluation.name": "helpful", "gen_ai.evaluation.score.value": 0.75}
                span.add_event("gen_ai.evaluation.result", evaluation)
provider.shutdown()
