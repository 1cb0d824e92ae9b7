"""Published files: where they are expected, what they must hash to, and reading them only if they do.

A download goes to a temporary name, is bounded and verified, and only then renamed into place.
"""

import contextlib
import hashlib
import os
import secrets
import stat
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPException, HTTPResponse, responses
from pathlib import Path
from typing import IO

from dpgrad.errors import DataError, MissingFileError

CHUNK = 1 << 16
TIMEOUT_SECONDS = 30.0
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
UNKNOWN_SIZE = 1 << 30  # the most that is read of a file whose size is not known


@dataclass(frozen=True)
class Content:
    """A checksum of what a file holds, for files whose outer bytes differ between honest copies.

    Gzip stamps a time into its header and text files change line ends in transit; `read` removes that, and its result
    must hash to `sha256`.
    """

    sha256: str
    read: Callable[[bytes, str], bytes]
    described: str


@dataclass(frozen=True)
class Source:
    """One file of a dataset as it was published.

    `url` is set where the very bytes can be fetched without an account; `published` says in words where they are from.
    `sha256` and `size` are None where nobody has published them: what the file holds is then all that is checked.

    >>> Source("toy", "toy.csv", "ab" * 32, 12, "https://example.org/toy").place
    'toy/toy.csv'
    """

    folder: str
    file: str
    sha256: str | None
    size: int | None
    published: str
    url: str | None = None
    content: Content | None = None

    @property
    def place(self) -> str:
        """The path below the data folder."""
        return f"{self.folder}/{self.file}"

    @property
    def checksum(self) -> str:
        """The checksum that is verified, with what it is taken of."""
        if self.content is not None:
            return f"sha256 {self.content.sha256} {self.content.described}"
        return "no checksum known" if self.sha256 is None else f"sha256 {self.sha256}"

    @property
    def length(self) -> str:
        """The size in words."""
        return "some bytes" if self.size is None else f"{self.size} bytes"

    @property
    def limit(self) -> int:
        """The most bytes that are read: never much more than was published, whatever lies there."""
        if self.size is None:
            return UNKNOWN_SIZE
        return self.size if self.content is None else 2 * self.size + 4096


def published_at(address: str, folder: str, *files: tuple[str, int, str]) -> tuple[Source, ...]:
    """Files that are published, and can be fetched, under one address: the name, size and sha256 of each.

    >>> published_at("https://example.org/", "toy", ("toy.csv", 12, "ab" * 32))[0].url
    'https://example.org/toy.csv'
    """
    return tuple(Source(folder, name, sha, size, address + name, address + name) for name, size, sha in files)


def data_folder(root: Path | None) -> Path | None:
    """The folder of the data files: the one given, else the one that `DPGRAD_DATA` names, else None."""
    if root is not None:
        return Path(root).expanduser()
    named = os.environ.get("DPGRAD_DATA", "")
    return Path(named).expanduser() if named else None


def read_all(name: str, sources: Sequence[Source], root: Path | None, *, download: bool) -> list[bytes]:
    """The verified contents of all files of a dataset; what is missing is fetched or named in one message."""
    below = data_folder(root)
    missing = [source for source in sources if below is None or not present(below / source.place)]
    if below is None or (missing and not (download and all(source.url for source in missing))):
        raise MissingFileError(_missing(name, missing, below))
    for source in missing:
        _download(source, below)
    return [read(below / source.place, source) for source in sources]


def present(path: Path) -> bool:
    """Whether anything bears this name; what it is, `read` judges."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except OSError:
        # For instance a parent that is a file, or a folder that may not be entered: `read` says which.
        return True
    return True


def read(path: Path, source: Source) -> bytes:
    """The bytes of one file, or of its content, refused unless they hash to the published checksum."""
    raw = _bytes(path, source)
    if source.content is None:
        if source.sha256 is not None:
            _compare(path, raw, source.sha256, "", source)
        return raw
    content = source.content.read(raw, str(path))
    _compare(path, content, source.content.sha256, f" {source.content.described}", source)
    return content


def _bytes(path: Path, source: Source) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise DataError(f"{path} is {kind}: put the file {source.file} there")
        if status.st_size == 0:
            raise DataError(f"{path} is empty, {source.length} expected: fetch it again from {source.published}")
        exact = source.content is None and source.size is not None
        if status.st_size > source.limit or (exact and status.st_size != source.size):
            expected = f"{source.size} expected" if exact else f"at most {source.limit} expected"
            raise DataError(
                f"{path} has {status.st_size} bytes, {expected}: truncated or another version, "
                f"fetch it again from {source.published}"
            )
        with path.open("rb") as file:
            return file.read(source.limit + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): check the path and its permissions") from None


def _compare(path: Path, content: bytes, expected: str, described: str, source: Source) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise DataError(
            f"{path}: sha256{described} is {found}, published {expected}: damaged or another version, "
            f"fetch it again from {source.published}"
        )


def _download(source: Source, folder: Path) -> None:
    def verify(path: Path) -> None:
        read(path, source)

    if source.url is None or source.size is None:
        raise DataError(f"{source.place} has no address to fetch it from: it is published at {source.published}")
    try:
        fetch(source.url, folder / source.place, size=source.size, verify=verify)
    except DataError as error:
        # Whoever fetches it by hand instead wants the checksum too; a mismatch has named it already.
        digest = source.sha256 if source.content is None else source.content.sha256
        named = digest is None or digest in str(error)
        raise DataError(f"{error}" if named else f"{error} ({source.checksum})") from None


def _missing(name: str, sources: Sequence[Source], below: Path | None) -> str:
    files = "; ".join(f"{s.place} ({s.checksum}, {s.length}, published at {s.published})" for s in sources)
    where = "to a folder, which root or DPGRAD_DATA names" if below is None else f"to {below}"
    fetch = "pass download=True to fetch them, or save them " if all(source.url for source in sources) else "save them "
    return f"{name} needs files that are missing: {fetch}{where}: {files}"


def fetch(url: str, target: Path, *, size: int, verify: Callable[[Path], None]) -> None:
    """Download `url` to `target`; nothing appears under that name unless `verify` accepts the bytes.

    Only https is used, or http to this very machine, also after redirects. At most twice the published size is
    accepted: a server may compress anew, and must not fill the disk.

    >>> fetch("ftp://example.org/a", Path("a"), size=1, verify=print)
    Traceback (most recent call last):
    dpgrad.errors.DataError: ftp://example.org/a is refused: only https addresses are fetched
    """
    _refuse_insecure(url)
    part = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("xb") as file:
            received = _streamed(url, file, 2 * size + 4096, target, size)
            file.flush()
            os.fsync(file.fileno())
        if received == 0:
            raise DataError(f"{url} sent an empty file, {size} bytes expected: fetch it by hand to {target}")
        verify(part)
        os.replace(part, target)
    except urllib.error.HTTPError as error:
        # The code's own name: the server's words may be anything.
        answer = f"{error.code} {responses.get(error.code, 'unknown')}"
        raise DataError(f"{url} answered {answer}: fetch it by hand and put it at {target}") from None
    except urllib.error.URLError as error:
        raise DataError(_unreachable(url, target, " ".join(str(error.reason).split()))) from None
    except HTTPException as error:
        raise DataError(_unreachable(url, target, type(error).__name__)) from None
    except TimeoutError:
        raise DataError(_unreachable(url, target, f"no answer within {TIMEOUT_SECONDS:g} s")) from None
    except OSError as error:
        raise DataError(f"{url} could not be saved at {target} ({error.strerror or error})") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _unreachable(url: str, target: Path, reason: str) -> str:
    return f"{url} cannot be reached ({reason}): fetch it on a machine with a network and put it at {target}"


def _refuse_insecure(url: str) -> None:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOOPBACK):
        raise DataError(f"{url} is refused: only https addresses are fetched")


class _SecureRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but never away from https."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        _refuse_insecure(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


def _streamed(url: str, file: IO[bytes], limit: int, target: Path, size: int) -> int:
    # Plain http is this very machine: no proxy stands between. None means the environment's proxies.
    proxies: dict[str, str] | None = {} if url.startswith("http:") else None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies), _SecureRedirects())
    request = urllib.request.Request(url, headers={"User-Agent": "dpgrad", "Accept-Encoding": "identity"})
    response: HTTPResponse
    with opener.open(request, timeout=TIMEOUT_SECONDS) as response:
        declared = response.headers.get("Content-Length", "")
        announced = int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 16 else None
        if announced is not None and announced > limit:
            raise DataError(f"{url} announces {announced} bytes, {size} expected: refused, fetch by hand to {target}")
        received = 0
        with _progress(target.name, announced or size) as advance:
            while chunk := response.read(CHUNK):
                received += len(chunk)
                if received > limit:
                    raise DataError(f"{url} sends more than {limit} bytes, {size} expected: refused")
                file.write(chunk)
                advance(len(chunk))
    if announced is not None and received != announced:
        raise DataError(f"{url} broke off after {received} of {announced} bytes: try again")
    return received


@contextlib.contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, a line for each quarter elsewhere; both on stderr."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(name, total=total)
            yield lambda count: bar.advance(task, count)
        return

    done, quarter = 0, 0

    def advance(count: int) -> None:
        nonlocal done, quarter
        done += count
        reached = min(4, 4 * done // max(1, total))
        if reached > quarter:
            quarter = reached
            print(f"{name}: {done:,} of {total:,} bytes", file=sys.stderr)

    print(f"{name}: fetching {total:,} bytes", file=sys.stderr)
    yield advance
