"""KDD Cup 1999, the 10 % file: 494,021 connections to a network, normal or an attack (Stolfo et al., UCI)."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpgrad.data import _table
from dpgrad.data._dataset import CHOSEN_BOUNDS, OUTSIDE, ROW_COUNTS, Dataset, check_preprocessing
from dpgrad.data._prepare import SEED, SPLIT_80_20, cut_80_20, split_80_20, to_unit
from dpgrad.data._source import Source, read_all
from dpgrad.data._unpack import gunzip
from dpgrad.errors import DataError

__all__ = ["BOUNDS", "CLASSES", "PREPROCESSINGS", "SOURCES", "SYMBOLS", "TEXT_BYTES", "load", "parse"]

ROWS, DRAWN = 494_021, 70_000
TEXT_BYTES = 1 << 28  # a bound on the unpacked text, whose size is not published
SOURCES = (
    Source(
        "kddcup99",
        "kddcup.data_10_percent.gz",
        "8045aca0d84e70e622d1148d7df782496f6333bf6eb979a1b0837c42a9fd9561",
        None,
        published="https://ndownloader.figshare.com/files/5976042",
    ),
)
CLASSES = ("attack", "normal")
PREPROCESSINGS = ("default", "yu2020")
CELLS, FIRST_SYMBOL, AFTER_SYMBOLS = 42, 1, 4  # a line: duration, three symbols, 37 numbers, the label
# Column of numbers -> bounds. Flags and rates have the ranges their meaning gives; the two windows count at most 511
# and 255 connections. The others are round constants, chosen by authors who knew the published file; values beyond
# are clipped, so the bounds hold in any case.
BOUNDS: tuple[tuple[float, float], ...] = (
    (0, 10_000),  # duration, seconds
    (0, 10_000), (0, 10_000),  # bytes from the source and to it
    (0, 1), (0, 3), (0, 3),  # land, wrong fragments, urgent packets
    # what was sent: hot, failed logins, logged in, compromised, root shell, su, root, files, shells, access, outbound,
    # login of a host, of a guest
    (0, 30), (0, 5), (0, 1), (0, 10), (0, 1), (0, 2), (0, 10), (0, 10), (0, 5), (0, 10), (0, 1), (0, 1), (0, 1),
    (0, 511), (0, 511), *((0, 1),) * 7,  # counts and rates of two seconds
    (0, 255), (0, 255), *((0, 1),) * 8,  # counts and rates of a host
)  # fmt: skip
# The three symbols and their values in the full set, in the order of their spelling.
SYMBOLS: tuple[tuple[bytes, ...], ...] = (
    (b"icmp", b"tcp", b"udp"),
    tuple(
        b"IRC X11 Z39_50 aol auth bgp courier csnet_ns ctf daytime discard domain domain_u echo eco_i ecr_i efs exec "
        b"finger ftp ftp_data gopher harvest hostnames http http_2784 http_443 http_8001 imap4 iso_tsap klogin kshell "
        b"ldap link login mtp name netbios_dgm netbios_ns netbios_ssn netstat nnsp nntp ntp_u other pm_dump pop_2 "
        b"pop_3 printer private red_i remote_job rje shell smtp sql_net ssh sunrpc supdup systat telnet tftp_u tim_i "
        b"time urh_i urp_i uucp uucp_path vmnet whois".split()
    ),
    tuple(b"OTH REJ RSTO RSTOS0 RSTR S0 S1 S2 S3 SF SH".split()),
)


def load(root: Path | None = None, *, preprocessing: str = "default", download: bool = False) -> Dataset:
    """KDD Cup 1999 as (n, 122): numbers clipped to public bounds and mapped to [0, 1], a column for each known symbol.

    "yu2020" is the benchmark of Iyengar et al.: 70,000 rows drawn with replacement, so one connection may be in
    several rows, also of train and of test at once; a column for each symbol *found*, then the numbers as they are.

    >>> load(preprocessing="raw")
    Traceback (most recent call last):
    dpgrad.errors.DataError: preprocessing of kddcup99 must be one of default, yu2020, got 'raw'
    """
    check_preprocessing("kddcup99", preprocessing, PREPROCESSINGS)
    (blob,) = read_all("kddcup99", SOURCES, root, download=download)
    text = gunzip(blob, SOURCES[0].place, limit=TEXT_BYTES)
    numbers, symbols, y = parse(text, SOURCES[0].place, rows=ROWS)
    public: tuple[str, ...] = (ROW_COUNTS, "the two classes")
    if preprocessing == "default":
        public += ("the symbols of the full set, known to the authors", CHOSEN_BOUNDS)
        blocks = [to_unit(numbers, BOUNDS), *_columns(symbols, [list(known) for known in SYMBOLS])]
        x = np.concatenate(blocks, axis=1, dtype=np.float32)
        return Dataset("kddcup99", *split_80_20(x, y), CLASSES, preprocessing, SPLIT_80_20, public)
    public += (
        OUTSIDE + "the symbols found, read from all private rows, train and test",
        OUTSIDE + "rows are drawn with replacement, so one connection counts several times, in train and in test",
    )
    random = np.random.RandomState(SEED)
    drawn = random.randint(ROWS, size=DRAWN)
    found = [sorted(set(column.tolist())) for column in symbols[drawn].T]
    x = np.concatenate([*_columns(symbols[drawn], found), numbers[drawn]], axis=1)
    order = random.permutation(DRAWN)
    split = f"{DRAWN:,} rows drawn with replacement and shuffled by seed {SEED}, of them 80 % for train"
    return Dataset("kddcup99", *cut_80_20(x[order], y[drawn][order]), CLASSES, preprocessing, split, public)


def _columns(symbols: NDArray[np.bytes_], known: list[list[bytes]]) -> list[NDArray[np.float64]]:
    """For each symbol a block of 0/1 columns, one for each value that is known; another value is a row of zeros."""
    return [(symbols[:, place, None] == np.array(values)).astype(np.float64) for place, values in enumerate(known)]


def parse(text: bytes, name: str, *, rows: int) -> tuple[NDArray[np.float64], NDArray[np.bytes_], NDArray[np.int64]]:
    """Numbers (rows, 38), symbols (rows, 3) and classes: 1 where the label is `normal.`.

    >>> line = b"0,tcp,http,SF," + b"0," * 37 + b"normal."
    >>> numbers, symbols, classes = parse(line, "toy", rows=1)
    >>> numbers.shape, symbols.tolist(), classes.tolist()
    ((1, 38), [[b'tcp', b'http', b'SF']], [1])
    """
    lines = [line.split(b",") for line in text.splitlines() if line.strip()]
    if len(lines) != rows:
        raise DataError(f"{name}: {len(lines)} rows, {rows} expected")
    for number, cells in enumerate(lines, start=1):
        if len(cells) != CELLS:
            raise DataError(f"{name}: row {number} has {len(cells)} columns, {CELLS} expected")
    numbers = b"\n".join(b",".join((*cells[:FIRST_SYMBOL], *cells[AFTER_SYMBOLS:-1])) for cells in lines)
    table = _table.parse(numbers, f"{name}, its numbers", rows=rows, columns=len(BOUNDS))
    symbols = np.array([cells[FIRST_SYMBOL:AFTER_SYMBOLS] for cells in lines])
    return table, symbols, np.array([cells[-1] == b"normal." for cells in lines], dtype=np.int64)
