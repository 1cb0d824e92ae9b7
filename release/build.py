"""Build the source archive and the wheel so that everyone gets the same bytes.

    python release/build.py [--out dist] [--twice]

What is committed at HEAD is built, in an empty folder, with the time of the commit as that of every file. The source
archive is packed anew with sorted names, one owner and that time; the wheel is built from it. With --twice both are
built again in another folder, and the digests must be the same.
"""

import argparse
import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str, folder: Path, **settings: str) -> str:
    """Run a command; its standard output."""
    environment = {**os.environ, **settings}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return done.stdout


def checkout(folder: Path) -> str:
    """Write the files of HEAD to a folder; the time of the commit."""
    with tempfile.TemporaryDirectory() as held:
        archive = Path(held) / "head.tar"
        run("git", "archive", "-o", str(archive), "HEAD", folder=ROOT)
        with tarfile.open(archive) as files:
            files.extractall(folder, filter="data")
    return run("git", "log", "-1", "--format=%ct", folder=ROOT).strip()


def packed_anew(archive: Path, time: int) -> None:
    """The archive with sorted names, no owner and one time: setuptools takes those of the file system."""
    content = io.BytesIO()
    with tarfile.open(archive) as old, tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = time
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with archive.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=time) as zipped:
        zipped.write(content.getvalue())


def build(out: Path) -> list[Path]:
    """Source archive and wheel."""
    with tempfile.TemporaryDirectory() as held:
        source, unpacked = Path(held) / "checkout", Path(held) / "unpacked"
        source.mkdir()
        time = checkout(source)
        steady = {"SOURCE_DATE_EPOCH": time, "PYTHONHASHSEED": "0", "TZ": "UTC"}
        here = sys.executable
        made = Path(held) / "dist"
        run(here, "-m", "build", "--no-isolation", "--sdist", "--outdir", str(made), ".", folder=source, **steady)
        (archive,) = made.glob("*.tar.gz")
        packed_anew(archive, int(time))
        with tarfile.open(archive) as files:
            files.extractall(unpacked, filter="data")
        (inside,) = unpacked.iterdir()
        run(here, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(made), ".", folder=inside, **steady)
        out.mkdir(parents=True, exist_ok=True)
        return [file.rename(out / file.name) for file in sorted(made.iterdir())]


def digests(files: list[Path]) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where to put both; default: dist")
    parser.add_argument("--twice", action="store_true", help="build again elsewhere and compare")
    given = parser.parse_args()
    found = digests(build(given.out.resolve()))
    if given.twice:
        with tempfile.TemporaryDirectory() as other:
            again = digests(build(Path(other) / "dist"))
        if again != found:
            print("built twice, and not the same:", found, again, sep="\n", file=sys.stderr)
            return 1
    lines = "".join(f"{digest}  {name}\n" for name, digest in found.items())
    (given.out / "SHA256SUMS").write_text(lines, "utf-8")
    print(lines + ("built twice, the same bytes" if given.twice else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
