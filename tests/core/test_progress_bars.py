"""Progress bars in a terminal and in a notebook that is saved."""

import asyncio
import io

import nbformat
import pytest
from support.jupyter_kernels import run_notebook

from art_nb.core import progress_bars
from art_nb.core.progress_bars import progress_bar, refresh_regularly

GATHER = """
from tqdm import tqdm
import art_nb as art
import art_nb.core.progress_bars

async def rollout():
    return art.Trajectory(messages_and_choices=[], reward=1)

await art.gather_trajectories([rollout() for _ in range(3)], pbar_desc="gather")
bar = art_nb.core.progress_bars.progress_bar(total=4, desc="half")
bar.update(2)
tqdm.write("above")
bar.close()
hidden = art_nb.core.progress_bars.progress_bar(total=4, desc="hidden", disable=True)
late = art_nb.core.progress_bars.progress_bar(total=4, desc="late", delay=60)
late.update()
late.close()
"""


def test_a_saved_notebook_shows_the_last_state_of_each_bar(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(GATHER)])
    run_notebook(notebook, tmp_path, 120)
    outputs = notebook.cells[0].outputs
    bars = [output.data for output in outputs if output.output_type == "display_data"]
    assert [list(bar) for bar in bars] == [["text/plain"], ["text/plain"]]
    assert "gather: 100%" in bars[0]["text/plain"] and "3/3" in bars[0]["text/plain"]
    assert "half:  50%" in bars[1]["text/plain"]
    assert "widgets" not in notebook.metadata
    assert "".join(output.text for output in outputs if output.output_type == "stream") == "above\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


class WithoutTerminal:
    """Only what tqdm needs."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def getvalue(self):
        return self.text


def test_a_terminal_has_the_bar_of_tqdm_and_a_file_has_lines():
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        with progress_bar(total=200, desc="here", file=stream) as bar:
            for _ in range(200):
                bar.update()
    assert "here: 100%" in terminal.getvalue()
    assert "\r" in terminal.getvalue()
    assert [line.split("|")[0] for line in file.getvalue().splitlines()] == ["here:   0%", "here: 100%"]


@pytest.mark.parametrize(
    ("file_type", "is_drawn_again"), [(Terminal, True), (io.StringIO, False), (WithoutTerminal, False)]
)
async def test_a_bar_is_drawn_again_in_a_terminal_and_not_in_a_file(monkeypatch, file_type, is_drawn_again):
    monkeypatch.setattr(progress_bars, "REDRAW_S", 0.01)
    file = file_type()
    with progress_bar(total=2, desc="waits", file=file) as bar:
        with refresh_regularly(bar):
            first = file.getvalue()
            await asyncio.sleep(0.2)
        assert (file.getvalue() != first) == is_drawn_again
        last = file.getvalue()
        await asyncio.sleep(0.1)
        assert file.getvalue() == last


def test_a_short_operation_writes_no_line_into_a_file():
    file = io.StringIO()
    with progress_bar(total=2, desc="short", file=file, delay=60) as bar:
        bar.update(2)
    assert file.getvalue() == ""
