"""Downloads against a server on this machine: good, broken, lying, oversized and absent ones."""

import contextlib
import hashlib
import io
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dpgrad.data._source import Source, fetch, read_all
from dpgrad.errors import DataError

BODY = b"0123456789" * 20_000


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        match self.path:
            case "/good":
                self.reply(200, BODY)
            case "/unannounced":
                self.reply(200, BODY, announce=None)
            case "/truncated":
                self.reply(200, BODY[:-7], announce=len(BODY))
            case "/changed":
                self.reply(200, b"X" + BODY[1:])
            case "/empty":
                self.reply(200, b"")
            case "/announces-much":
                self.reply(200, b"", announce=10**12)
            case "/announces-nonsense":
                self.reply(200, BODY, announce="9" * 5000)
            case "/endless":
                self.reply(200, BODY * 50, announce=None)
            case "/to-http":
                self.redirect("http://example.org/good")
            case "/to-file":
                self.redirect("file:///etc/hostname")
            case "/to-good":
                self.redirect("/good")
            case "/circle":
                self.redirect("/circle")
            case "/garbage":
                self.wfile.write(b"no http here\r\n\r\n")
            case _:
                self.send_error(404)

    def reply(self, code: int, body: bytes, announce: object = "length") -> None:
        self.send_response(code)
        if announce is not None:
            self.send_header("Content-Length", str(len(body) if announce == "length" else announce))
        self.end_headers()
        with contextlib.suppress(OSError):  # the client may hang up, as it should
            self.wfile.write(body)

    def redirect(self, to: str) -> None:
        self.send_response(302)
        self.send_header("Location", to)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keep the test output clean."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()


def verify(path: Path) -> None:
    if path.read_bytes() != BODY:
        raise DataError("wrong bytes")


@pytest.mark.parametrize("page", ["good", "unannounced", "to-good", "announces-nonsense"])
def test_good_file_arrives(server: str, tmp_path: Path, page: str) -> None:
    target = tmp_path / "new" / "file"
    fetch(f"{server}/{page}", target, size=len(BODY), verify=verify)
    assert target.read_bytes() == BODY
    assert [path.name for path in target.parent.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("page", "pattern"),
    [
        ("truncated", "broke off after 199993 of 200000 bytes"),
        ("changed", "wrong bytes"),
        ("empty", "sent an empty file"),
        ("announces-much", "announces 1000000000000 bytes, 200000 expected"),
        ("endless", "sends more than 404096 bytes, 200000 expected"),
        ("absent", "answered 404 Not Found: fetch it by hand and put it at"),
        ("to-http", "http://example.org/good is refused: only https"),
        ("to-file", "answered 302|only https"),
        ("circle", "answered 302 Found: fetch it by hand"),
        ("garbage", "cannot be reached"),
    ],
)
def test_bad_answer_leaves_nothing_behind(server: str, tmp_path: Path, refused, page: str, pattern: str) -> None:
    with refused(pattern):
        fetch(f"{server}/{page}", tmp_path / "file", size=len(BODY), verify=verify)
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_file_survives_a_bad_answer(server: str, tmp_path: Path, refused) -> None:
    (tmp_path / "file").write_bytes(b"earlier")
    with refused("wrong bytes"):
        fetch(f"{server}/changed", tmp_path / "file", size=len(BODY), verify=verify)
    assert (tmp_path / "file").read_bytes() == b"earlier"


def test_no_network_is_one_line(tmp_path: Path, refused) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with refused("cannot be reached .*fetch it on a machine with a network and put it at"):
        fetch(f"http://127.0.0.1:{port}/file", tmp_path / "file", size=1, verify=verify)


@pytest.mark.parametrize("url", ["http://example.org/a", "file:///etc/hostname", "ftp://example.org/a", "a", ""])
def test_only_https_leaves_this_machine(url: str, tmp_path: Path, refused) -> None:
    with refused("is refused: only https addresses are fetched"):
        fetch(url, tmp_path / "file", size=1, verify=verify)


def test_folder_that_cannot_be_made(server: str, tmp_path: Path, refused) -> None:
    (tmp_path / "file").touch()
    with refused("could not be saved"):
        fetch(f"{server}/good", tmp_path / "file" / "inside", size=len(BODY), verify=verify)


def test_plain_lines_elsewhere(server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fetch(f"{server}/good", tmp_path / "file", size=len(BODY), verify=verify)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0] == "file: fetching 200,000 bytes"
    assert err.splitlines()[-1] == "file: 200,000 of 200,000 bytes"
    assert len(err.splitlines()) == 5


def test_a_bar_on_a_terminal(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    fetch(f"{server}/good", tmp_path / "file", size=len(BODY), verify=verify)
    assert "file" in terminal.getvalue()
    assert "200.0" in terminal.getvalue()


def test_a_missing_file_is_fetched_verified_and_read(server: str, tmp_path: Path, refused) -> None:
    digest = hashlib.sha256(BODY).hexdigest()
    source = Source("toy", "file", digest, len(BODY), published="here", url=f"{server}/good")
    assert read_all("toy", [source], tmp_path, download=True) == [BODY]
    assert (tmp_path / "toy" / "file").read_bytes() == BODY
    other = Source("toy", "other", digest, len(BODY), published="here", url=f"{server}/changed")
    with refused(f"published {digest}"):
        read_all("toy", [other], tmp_path, download=True)
    absent = Source("toy", "other", digest, len(BODY), published="here", url=f"{server}/absent")
    with refused(f"answered 404 .*put it at .*other .sha256 {digest}"):
        read_all("toy", [absent], tmp_path, download=True)
    assert not (tmp_path / "toy" / "other").exists()
