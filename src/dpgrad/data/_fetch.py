"""Downloading one published file: to a temporary name, bounded, verified, then renamed into place."""

import contextlib
import os
import secrets
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from email.message import Message
from http.client import HTTPException, HTTPResponse, responses
from pathlib import Path
from typing import IO

from dpgrad.errors import DataError

CHUNK = 1 << 16
TIMEOUT_SECONDS = 30.0
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


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
            received = _download(url, file, 2 * size + 4096, target, size)
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


def _download(url: str, file: IO[bytes], limit: int, target: Path, size: int) -> int:
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
