"""`art-nb init --data`: a task from the rows of a file."""

import json
import re
import runpy
import subprocess
from itertools import count

import pytest
from support.warm import warm_python

from art_nb.cli.data_task import data_task, read_answer_file
from art_nb.cli.main import main
from art_nb.cli.starter import StarterAnswers, read_answers, write_starter
from art_nb.models.tiny import save_tiny_model


def csv_file(path, rows, columns=("text", "label"), delimiter=",", encoding="utf-8"):
    """Write rows of cells without commas."""
    lines = [delimiter.join(map(str, row)) for row in (columns, *rows)]
    path.write_bytes(("\r\n".join(lines) + "\r\n").encode(encoding))
    return path


def two_answers(n=40):
    return [(f"Film {i}", "good" if i % 2 else "bad (C++)") for i in range(n)]


def namespace(task, folder):
    """Return the names that the source of a task defines, as in a script in a folder."""
    names = {"__file__": str(folder / "train.py")}
    exec(task.task, names)
    return names


def test_few_answers_restrict_the_reply(tmp_path):
    rows = [*two_answers(), ("", "good"), ("Film 50", " "), ("Film 3", "bad (C++)"), ("Film 51",)]
    file = csv_file(tmp_path / "my films.csv", rows, encoding="utf-8-sig")
    task = data_task(file, tmp_path)
    first, question, *shown = task.summary.splitlines()
    assert first == (
        "my films.csv: 44 rows, questions from `text`, answers from `label` (2 different). Replies are restricted to "
        "these answers. Rows left out: 3 without a text or an answer and 1 with a text that occurs earlier."
    )
    assert question == "Three rows. Do the answers fit the texts?" and len(shown) == 3
    assert all(line in {f"  {text!r} → {answer!r}" for text, answer in two_answers()} for line in shown)
    assert task.model == "my-films-001"
    names = namespace(task, tmp_path)
    assert all(re.fullmatch(names["FORMAT"], answer) for answer in ("good", "bad (C++)"))
    assert not re.fullmatch(names["FORMAT"], "bad C")
    assert "bad (C++), good." in names["INSTRUCTION"]
    assert len(names["held_out"]) == 10 and len(names["scenarios"]) == 30
    shown = {scenario["text"]: scenario["answer"] for scenario in names["scenarios"] + names["held_out"]}
    assert shown == dict(two_answers()) == read_answer_file(file).answers


def test_similar_texts_are_reported(tmp_path):
    """A file without similar texts, one with two wordings of each, and the same with answers of other texts."""
    words = (
        "lamp boat tree coin bird road milk sand door ring leaf song king wolf rain fire hand moon star ship".split()
    )
    texts = [f"The {a} and the {b} near my {c}" for a, b, c in zip(words, words[7:] + words[:7], words[3:] + words[:3])]

    def summary(rows):
        return data_task(csv_file(tmp_path / "stories.csv", rows), tmp_path).summary

    answers = ["yes", "no"] * 10
    assert len(summary([*zip(texts, answers)]).splitlines()) == 5
    both = texts + [f"Hello. {text} (thanks)" for text in texts]
    assert summary([*zip(both, answers * 2)]).splitlines()[5:] == [
        "40 of 40 texts are similar to another one. If one of them is held out, the model has seen the other, so the "
        "result says little about new wordings."
    ]
    *_, count, first, second = summary([*zip(both, answers + answers[::-1])]).splitlines()
    assert count == "40 of 40 texts have another answer than a similar text. Do the answers belong to these texts?"
    assert first == f"  {texts[0]!r} → 'yes'" and second == f"  {both[20]!r} → 'no'"


def test_the_kind_of_the_answers(tmp_path):
    def form(answers):
        file = csv_file(tmp_path / "a.csv", [(f"Film {i}", answer) for i, answer in zip(range(60), answers)])
        return namespace(data_task(file, tmp_path), tmp_path)["FORMAT"]

    assert form(count()) == r"-?[0-9]+(\.[0-9]+)?"
    assert form(i % 5 for i in count()) == "(0|1|2|3|4)"  # few numbers
    assert form(f"word {i % 20}" for i in count()) is None  # each only three times
    assert form(f"{i % 2} {'long ' * 13}" for i in count()) is None


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_other_delimiters_and_folders(delimiter, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "runs").mkdir()
    rows = [(f"{text}, a comedy", answer) for text, answer in two_answers()]
    file = csv_file(tmp_path / "data" / "films.CSV", rows, ("film", "mood"), delimiter)
    names = namespace(data_task(file, tmp_path / "runs"), tmp_path / "runs")
    assert {scenario["text"] for scenario in names["scenarios"]} < {text for text, _ in rows}


def test_json_lines(tmp_path):
    lines = [{"id": i, "Prompt": f"{i} + 0 =", "completion": i} for i in range(24)] + [{"id": 24}]
    file = tmp_path / "sums.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    names = namespace(data_task(file, tmp_path), tmp_path)
    assert {"text": "0 + 0 =", "answer": "0"} in names["scenarios"] + names["held_out"]
    assert (names["QUESTION"], names["ANSWER"]) == ("Prompt", "completion")


GOOD = "text,label\n" + "".join(f"Film {i},{i % 2}\n" for i in range(40))


@pytest.mark.parametrize(
    ("name", "content", "options", "error"),
    [
        ("absent.csv", None, (), "Could not read"),
        ("films.xlsx", "", (), "ends in .csv or .jsonl"),
        ("films.csv", "", (), "has no rows"),
        ("films.csv", "text,label\n", (), "has no rows"),
        ("films.csv", GOOD, ("--answer", "mood"), "no column 'mood' for --answer. The columns: text, label."),
        ("films.csv", GOOD, ("--answer", "text", "--question", "text"), "Choose two columns"),
        (
            "films.csv",
            "id,text,mood\n1,a,b\n",
            (),
            "--answer COLUMN for the right answers. The columns: id, text, mood.",
        ),
        ("films.csv", GOOD[:100], (), "different texts with an answer. At least 20 are needed"),
        ("films.csv", GOOD.replace(",0", ",1"), (), "are equal"),
        ("films.csv", GOOD + "Good, not great,1\n", (), "Line 42 of films.csv has more cells than the header"),
        ("films.csv", GOOD.encode() + b"Caf\xe9,1\n", (), "not encoded in UTF-8"),
        ("films.jsonl", '{"text": "a"}\n["b"]\n', (), "Line 2 of films.jsonl is not a JSON object"),
        ("films.jsonl", '{"text": [], "label": "a"}\n', (), "contains lists or objects"),
        ("films.csv", GOOD, ("--task", "answer"), "Pass --data or --task, not both"),
        ("films.csv", GOOD, ("--reward", "judge"), "has its own reward"),
    ],
)
def test_errors(name, content, options, error, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    before = [*tmp_path.iterdir()]
    assert main(["init", "--data", name, *options]) == 1
    assert error in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == before


def test_columns_need_a_file(capsys):
    assert main(["init", "--answer", "label"]) == 1
    assert "pass --data FILE" in capsys.readouterr().err


def test_a_file_as_an_answer_to_the_questions(tmp_path, capsys):
    file = csv_file(tmp_path / "films.csv", two_answers())
    lines = iter(["data", "absent.csv", str(file), ""])
    answers = read_answers({}, lambda prompt: next(lines), tmp_path)
    assert answers == StarterAnswers(data_task(file, tmp_path), "environment")
    assert "Could not read absent.csv" in capsys.readouterr().out


def test_the_generated_tests_pass(tmp_path):
    """Those of a notebook and of a script, in another working directory. Answers that do not fit FORMAT are found."""
    folder = tmp_path / "task"
    folder.mkdir()
    labels = csv_file(folder / "labels.csv", two_answers())
    free = csv_file(folder / "free.csv", [(f"Say {i} times a", "a" * i) for i in range(2, 30)])
    write_starter(folder / "labels.ipynb", StarterAnswers(data_task(labels, folder), "environment"))
    write_starter(folder / "free.py", StarterAnswers(data_task(free, folder), "environment"))
    line = [warm_python(), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", str(folder)]
    said = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert "4 passed" in said, said
    csv_file(labels, [(text, answer.replace("good", "great")) for text, answer in two_answers()])
    said = subprocess.run([*line, "-k", "labels"], cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert "does not have the format" in said and "1 failed, 1 passed" in said, said


@pytest.mark.slow
def test_the_script_runs(tmp_path, monkeypatch, capsys):
    """With the tiny model: the warm-up, one step and both evaluations."""
    monkeypatch.chdir(tmp_path)
    tiny = save_tiny_model(tmp_path / "tiny", context=2048)
    csv_file(tmp_path / "films.csv", two_answers())
    assert main(["init", "--data", "films.csv", "--model", str(tiny), "train.py"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("films.csv: 40 rows") and "python train.py" in shown
    source = (tmp_path / "train.py").read_text()
    for pattern, new in (
        (r"steps=\d+, groups_per_step=\d+", "steps=2, groups_per_step=2"),
        (r"(EPOCHS = )\d+, \d+", r"\g<1>4, 1"),
    ):
        source, n = re.subn(pattern, new, source)
        assert n == 1
    (tmp_path / "train.py").write_text(source)
    done = subprocess.run([warm_python(), "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("EvaluationDifference(films-001 step 2 against step") == 2
    assert "'answer': '" in done.stdout  # of the worst rollouts


def test_art_nb_train_can_read_the_script(tmp_path):
    file = csv_file(tmp_path / "films.csv", two_answers())
    script, _ = write_starter(tmp_path / "train.py", StarterAnswers(data_task(file, tmp_path), "environment"))
    assert len(runpy.run_path(str(script))["scenarios"]) == 30
