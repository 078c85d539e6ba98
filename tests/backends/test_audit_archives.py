"""Archives that a hostile server could send: only the valid checkpoint is accepted, nothing is written outside."""

import io
import json
import tarfile

import pytest

from art_nb.backends.remote_protocol import MAX_ARCHIVE_FILES, tar_pieces, unpack
from art_nb.core.types import ServeError

HEADER = json.dumps({"x": {"dtype": "U8", "shape": [500], "data_offsets": [0, 500]}}).encode()
CHECKPOINT = {
    "adapter_config.json": b"{}",
    "training.json": b"{}",
    "adapter_model.safetensors": len(HEADER).to_bytes(8, "little") + HEADER + bytes(500),
}


def member(name, content=b"", **attributes):
    """A member of an archive: its header and its content."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in attributes.items():
        setattr(info, key, value)
    return info, content


def archive(*members, checkpoint=CHECKPOINT, form=tarfile.PAX_FORMAT, **options):
    """A tar of a whole checkpoint and of further members."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form, **options) as tar:
        for info, content in [*members, *(member(name, content) for name, content in checkpoint.items())]:
            tar.addfile(info, io.BytesIO(content) if content else None)
    return made.getvalue()


def link(name, to, kind=tarfile.SYMTYPE):
    return member(name, type=kind, linkname=to)


def cve_2025_4517(to):
    """A chain of links so long that `os.path.realpath` gives up, and a name behind it that leads outside."""
    part, steps, names = "d" * 247, "abcdefghijklmnop", []
    members = []
    for step in steps:
        members += [
            member("/".join([*names, part]), type=tarfile.DIRTYPE, mode=0o755),
            link("/".join([*names, step]), part),
        ]
        names.append(part)
    short = "/".join(steps)
    chain = f"{short}/{'l' * 254}"
    return archive(
        *members,
        link(chain, "../" * len(steps)),
        link("escape", f"{chain}/../../{to}"),
        link("hard", "escape/secret", tarfile.LNKTYPE),
        member("hard", b"overwritten"),
        member("escape/new", b"new"),
    )


def raw(name=b"a", size=b"%011o\0" % 3, kind=b"0", mode=b"0000644\0", content=b"abc"):
    """A member with any bytes in its header, in front of a valid archive."""
    head = bytearray(512)
    head[: len(name)], head[100:108], head[124:136], head[156:157] = name, mode, size, kind
    head[257:265] = b"ustar\x0000"
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + content.ljust(512, b"\0") + archive()


def valid():
    return archive()


HOSTILE = {
    "parent": lambda out: archive(member("../secret", b"x")),
    "parent_inside": lambda out: archive(member("a/../../secret", b"x")),
    "absolute": lambda out: archive(member(str(out / "secret"), b"x")),
    "symbolic_link": lambda out: archive(link("link", str(out / "secret"))),
    "write_through_link": lambda out: archive(link("link", str(out)), member("link/new", b"x")),
    "hard_link": lambda out: archive(link("link", "../secret", tarfile.LNKTYPE)),
    "character_device": lambda out: archive(member("device", type=tarfile.CHRTYPE)),
    "block_device": lambda out: archive(member("device", type=tarfile.BLKTYPE)),
    "fifo": lambda out: archive(member("pipe", type=tarfile.FIFOTYPE)),
    "setuid": lambda out: archive(member("run", b"x", mode=0o4755)),
    "sparse": lambda out: raw(b"big", kind=b"S"),
    "folder": lambda out: archive(member("folder", type=tarfile.DIRTYPE)),
    "nested_folders": lambda out: archive(*(member("a/" * n, type=tarfile.DIRTYPE) for n in range(1, 1500))),
    "members": lambda out: archive(*(member(f"f{n}") for n in range(20_000))),
    "long_name": lambda out: archive(member("n" * 300, b"x")),
    "nul_in_name": lambda out: raw(b"a\0/../../secret"),
    "hidden_name": lambda out: archive(member(".bashrc", b"x")),
    "backslashes": lambda out: archive(member("..\\secret", b"x")),
    "surrogates": lambda out: raw(b"\xff\xfe"),
    "repeated_name": lambda out: archive(member("training.json", b"x")),
    "cve_2025_4517": lambda out: cve_2025_4517(out.name),
    "truncated": lambda out: archive()[:2500],
    "no_end": lambda out: b"".join(
        info.tobuf() + content.ljust(-(-len(content) // 512) * 512, b"\0")
        for info, content in map(member, CHECKPOINT, CHECKPOINT.values())
    ),
    "size_lies": lambda out: raw(size=b"%011o\0" % (7 << 30)),
    "negative_size": lambda out: raw(size=b"\xff" * 12),
    "giant_size": lambda out: raw(size=b"\x80" + b"\x7f" * 11),
    "bad_checksum": lambda out: b"x" + archive()[1:],
    "pax_path": lambda out: archive(member("a", b"x", pax_headers={"path": "../secret"})),
    "pax_size": lambda out: archive(member("a", b"x", pax_headers={"size": "99999999999"})),
    "pax_global": lambda out: archive(pax_headers={"path": "../secret"}),
    "gnu_long_name": lambda out: archive(member("../" * 60 + "secret", b"x"), form=tarfile.GNU_FORMAT),
    "second_archive": lambda out: archive() + archive(member("../secret", b"x")),
    "compressed": lambda out: __import__("gzip").compress(archive()),
    "page": lambda out: b"<html>" * 1000,
    "empty": lambda out: b"",
}


def everything(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_archive_is_rejected_whole(tmp_path, kind):
    victim, runs = tmp_path / "victim", tmp_path / "runs" / "checkpoints"
    victim.mkdir()
    runs.mkdir(parents=True)
    (victim / "secret").write_text("kept")
    (tmp_path / "runs" / "secret").write_text("kept")
    before = everything(tmp_path)
    with pytest.raises(ServeError, match="No files were kept"):
        unpack(io.BytesIO(HOSTILE[kind](victim)), runs / "0003")
    assert everything(tmp_path) == before


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_valid_archive_is_accepted(tmp_path, form):
    unpack(io.BytesIO(archive(form=form)), tmp_path / "0003")
    assert everything(tmp_path / "0003") == CHECKPOINT


def test_what_is_sent_is_accepted(tmp_path):
    saved = tmp_path / "saved"
    (saved / "folder").mkdir(parents=True)
    for name, content in CHECKPOINT.items():
        (saved / name).write_bytes(content)
    (saved / ".hidden").write_text("left out")
    (saved / "link").symlink_to("/etc/passwd")
    sent = io.BytesIO(b"".join(tar_pieces(saved)))
    unpack(sent, tmp_path / "first")
    unpack(sent, tmp_path / "first")  # again, into a directory that exists
    assert everything(tmp_path / "first") == CHECKPOINT


def test_the_largest_number_of_files(tmp_path):
    more = MAX_ARCHIVE_FILES - len(CHECKPOINT)
    unpack(io.BytesIO(archive(*(member(f"f{n}") for n in range(more)))), tmp_path / "full")
    assert len(everything(tmp_path / "full")) == MAX_ARCHIVE_FILES
    with pytest.raises(ServeError, match="more than 100 files"):
        unpack(io.BytesIO(archive(*(member(f"f{n}") for n in range(more + 1)))), tmp_path / "over")
