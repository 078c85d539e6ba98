"""The task of email-agent.ipynb: the agent answers a question about an email, with tools that search and read."""

import json
import random
import sqlite3
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import art_nb as art

SYSTEM = "You answer questions about a mailbox. Search for keywords, read the email, then answer with the time only."
NAMES = (
    "Anna Boris Clara David Elena Felix Grace Henry Irene James Karen Louis Maria Nadia Oscar Paula Ralph Sarah Tomas "
    "Ursula Victor Wendy Alice Brian Diana Edgar Fiona Gavin Helen Isaac"
).split()
UNSEEN_NAMES = "Carla Peter Linda Simon Laura Bruno Sofia Aaron Judith Martin".split()
TOPICS = {  # a question, and the email that answers it
    "dinner": ("When is the dinner with {}?", "We have a table for {} and you. The dinner is at {}."),
    "meeting": ("When does the meeting with {} start?", "{} has sent the slides. The meeting starts at {}."),
    "flight": ("When does the flight of {} land?", "{} has checked in. The flight lands at {}."),
    "parcel": ("When does the parcel for {} arrive?", "{} has ordered a lamp. The parcel arrives at {}."),
    "interview": ("When is the interview of {}?", "{} applies as an engineer. The interview is at {}."),
    "concert": ("When does the concert of {} begin?", "{} plays the violin. The concert begins at {}."),
    "lesson": ("When is the lesson of {}?", "{} has a new teacher. The lesson is at {}."),
    "train": ("When does the train of {} leave?", "{} has a seat at the window. The train leaves at {}."),
}
FIELDS = {"search": "keywords", "read": "id", "answer": "text"}  # the argument of each tool


@dataclass(frozen=True)
class Email:
    """An email, and the question that it answers."""

    id: int
    topic: str
    name: str
    time: str

    @property
    def subject(self) -> str:
        """The subject. No other email has the same."""
        return f"{self.topic} {self.name}"

    @property
    def question(self) -> str:
        """The question, whose answer is `time`."""
        return TOPICS[self.topic][0].format(self.name)

    @property
    def text(self) -> str:
        """The text of the email."""
        return TOPICS[self.topic][1].format(self.name, self.time)


def mailbox() -> list[Email]:
    """Return 320 emails in random order: one for each topic and name."""
    dice = random.Random(0)
    subjects = [(topic, name) for topic in TOPICS for name in NAMES + UNSEEN_NAMES]
    dice.shuffle(subjects)
    times = [f"{dice.randint(8, 20)}:{dice.choice(['00', '15', '30', '45'])}" for _ in subjects]
    return [Email(i, *subject, time) for i, (subject, time) in enumerate(zip(subjects, times, strict=True), 1)]


EMAILS = mailbox()
DATABASE = sqlite3.connect(":memory:", check_same_thread=False)
DATABASE.execute("CREATE VIRTUAL TABLE emails USING fts5(subject, text)")
DATABASE.executemany(
    "INSERT INTO emails (rowid, subject, text) VALUES (?, ?, ?)", [(e.id, e.subject, e.text) for e in EMAILS]
)


def tasks(names: Collection[str]) -> list[Email]:
    """Return the emails about some names. The agent gets only the question of an email."""
    return [email for email in EMAILS if email.name in names]


def search(keywords: str) -> str:
    """Return the numbers and subjects of the first three emails that contain all keywords."""
    words = " ".join(f'"{word}"' for word in keywords.replace('"', " ").split())
    query = "SELECT rowid, subject FROM emails WHERE emails MATCH ? ORDER BY rowid LIMIT 3"
    rows = DATABASE.execute(query, [words]).fetchall() if words else []
    return "\n".join(f"{number}: {subject}" for number, subject in rows) or "No email contains all keywords."


def read(number: str) -> str:
    """Return the text of an email."""
    rows = DATABASE.execute("SELECT text FROM emails WHERE rowid = ?", [number]).fetchall()
    return rows[0][0] if rows else f"There is no email {number}."


def call_tool(name: str, arguments: str) -> tuple[str, str]:
    """Return the argument of a call and its result. The result of `answer` is empty."""
    argument = json.loads(arguments)[FIELDS[name]]
    return argument, {"search": search, "read": read, "answer": lambda _: ""}[name](argument)


def schema(name: str, description: str) -> Any:
    """Return the schema of a tool with one text as its argument."""
    parameters = {
        "type": "object",
        "properties": {FIELDS[name]: {"type": "string"}},
        "required": [FIELDS[name]],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: list[Any] = [
    schema("search", "Return the emails that contain all keywords."),
    schema("read", "Return the text of an email."),
    schema("answer", "Answer the question and end."),
]


def example(number: int) -> art.Trajectory:
    """Return a conversation for the warm-up. Two of three use one keyword. It reads the first email found."""
    email = tasks(NAMES)[number]
    keywords = [email.subject, email.topic, email.name][number % 3]
    first = EMAILS[int(search(keywords).split(":")[0]) - 1]
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": email.question}]
    for name, argument in (("search", keywords), ("read", str(first.id)), ("answer", first.time)):
        arguments = json.dumps({FIELDS[name]: argument})
        call = {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        if name != "answer":
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": call_tool(name, arguments)[1]})
    return art.Trajectory(tools=TOOLS, messages_and_choices=messages)
