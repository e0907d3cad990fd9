"""Fetching official files on demand: resumed where they broke off, from mirrors, with progress, verified by md5.

Where the files are in place nothing is fetched. Where they are not and cannot be fetched, one line says which file
goes where. `$DALE_MIRROR`, the address of a folder with one folder per data set, is asked first where it is set.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from dale.data.sources import Source, find_folder, verify
from dale.errors import DataError

_CHUNK = 1 << 18
_MAX_DOWNLOAD = 1 << 30  # no official file comes near; a server that sends without end is cut off
_TIMEOUT = (10, 30)  # seconds to connect, and between two pieces


def ensure(source: Source, data_dir: Path) -> Path:
    """Return the folder that holds all files of the source, unpacking or fetching what is missing."""
    folder = find_folder(source, data_dir) or data_dir / source.folders[0]
    if not _missing(source, folder):
        return folder
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with _lock(data_dir / f".{source.name}.lock"):  # another process may be fetching the same files
            if source.archive is not None and _missing(source, folder):
                _from_archive(source, data_dir, folder)
            for file in _missing(source, folder):
                fetch(source, file, source.files[file], folder / file)
    except OSError as error:
        raise DataError(f"{source.name}: cannot write its files to {data_dir} ({error.strerror or error})") from error
    return folder


def _missing(source: Source, folder: Path) -> list[str]:
    return [file for file in source.files if not (folder / file).is_file()]


def _from_archive(source: Source, data_dir: Path, folder: Path) -> None:
    assert source.archive is not None
    name, want = source.archive
    home = data_dir / source.name
    given = [path for path in (home / name, folder / name, data_dir / name) if path.is_file()]
    archive = given[0] if given else home / name
    if given:
        verify({archive: want})
    else:
        fetch(source, name, want, archive)
    extract(archive, set(source.files), folder)
    if not given:
        archive.unlink()


def fetch(source: Source, file: str, md5: str | None, target: Path) -> None:
    """Fetch one file to `target` from the first mirror that has it; a partial one is kept and resumed next time."""
    import pooch
    import requests

    pooch.get_logger().setLevel(logging.WARNING)
    target.parent.mkdir(parents=True, exist_ok=True)
    mirrors = [f"{mirror}/{file}" for mirror in source.mirrors]
    if own := os.environ.get("DALE_MIRROR"):
        mirrors.insert(0, f"{own.rstrip('/')}/{source.name}/{file}")
    part = target.with_name(target.name + ".part")
    failures: dict[str, str] = {}
    for _ in range(2):  # the second round resumes what broke off in the first
        for url in mirrors:
            if failures.get(url, "").startswith("no connection"):
                continue
            try:
                pooch.retrieve(
                    url,
                    known_hash=None if md5 is None else f"md5:{md5}",
                    fname=target.name,
                    path=target.parent,
                    downloader=_Resuming(part),
                )
                return
            except requests.exceptions.HTTPError as error:
                failures[url] = f"the server said {str(error).partition(' for url')[0]}"
            except (requests.exceptions.ChunkedEncodingError, requests.exceptions.ReadTimeout) as error:
                failures[url] = f"broke off ({type(error).__name__})"
            except requests.exceptions.RequestException as error:
                failures[url] = f"no connection ({type(error).__name__})"
            except ValueError:  # pooch's word for a wrong checksum; what came has been deleted
                failures[url] = "what came has a wrong md5"
    reasons = "; ".join(f"{url}: {reason}" for url, reason in failures.items())
    raise DataError(f"{source.name}: {file} is missing and cannot be fetched; put it at {target} [{reasons}]")


class _Resuming:
    """A downloader for pooch that keeps what has come in a .part file and asks the server for the rest of it."""

    def __init__(self, part: Path) -> None:
        self.part = part

    def __call__(self, url: str, output_file: str, pooch: Any) -> None:
        import requests
        from tqdm import tqdm

        have = self.part.stat().st_size if self.part.exists() else 0
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        with requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT) as response:
            if response.status_code == requests.codes.requested_range_not_satisfiable:
                self.part.unlink()  # longer than the file itself: start again in the next round
                raise requests.exceptions.ChunkedEncodingError("the partial file is too long")
            response.raise_for_status()
            if response.status_code != requests.codes.partial_content:
                have = 0  # the server sends the whole file
            length = response.headers.get("Content-Length")
            total = None if length is None else have + int(length)
            with (
                self.part.open("ab" if have else "wb") as file,
                tqdm(total=total, initial=have, unit="B", unit_scale=True, desc=Path(url).name, disable=None) as bar,
            ):
                for chunk in response.iter_content(_CHUNK):
                    have += file.write(chunk)
                    bar.update(len(chunk))
                    if have > _MAX_DOWNLOAD:
                        break
        if have > _MAX_DOWNLOAD or (total is not None and have > total):
            self.part.unlink()
            raise requests.exceptions.ChunkedEncodingError("more came than a data file can have")
        if total is not None and have < total:
            raise requests.exceptions.ChunkedEncodingError(f"{have} of {total} bytes came")
        os.replace(self.part, output_file)


def extract(archive: Path, files: set[str], folder: Path) -> None:
    """Unpack the wanted files of a .tar.gz into `folder`, by their bare names; refuse an archive that reaches out."""
    folder.mkdir(parents=True, exist_ok=True)
    left = set(files)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                    raise DataError(f"{archive}: member {member.name!r} points outside or is a link; nothing is taken")
                if member.isfile() and path.name in left:
                    if member.size > _MAX_DOWNLOAD:
                        raise DataError(f"{archive}: member {member.name!r} declares {member.size} bytes")
                    _unpack(tar, member, folder / path.name)
                    left.discard(path.name)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataError(f"{archive}: cannot be unpacked ({error})") from error
    if left:
        raise DataError(f"{archive}: has no {', '.join(sorted(left))}")


def _unpack(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    content = tar.extractfile(member)
    assert content is not None
    part = target.with_name(target.name + ".part")
    with part.open("wb") as file:
        while chunk := content.read(_CHUNK):
            file.write(chunk)
    os.replace(part, target)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock file while fetching (where the system has such locks)."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
