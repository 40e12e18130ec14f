"""Published files, read from manual_dir or downloaded. Their checksums are always verified."""

import hashlib
import shutil
import urllib.error
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from xfresearch.data.cache import build_once
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import inside, read_bytes
from xfresearch.runtime.opening import open_to_read

LARGEST = 1 << 28  # bytes of a member


@dataclass(frozen=True)
class Published:
    """A file of a published corpus: `member` of the zip file at `url`. `checksum` ('sha256:...') is the member's."""

    corpus: str
    url: str
    member: str
    checksum: str

    def read(self, manual_dir: str, root: Path) -> bytes:
        """The bytes of the file, from `manual_dir` if given, otherwise from the download cached under `root`."""
        return self._from_manual_dir(Path(manual_dir).expanduser()) if manual_dir else self._from_network(root)

    def _from_manual_dir(self, directory: Path) -> bytes:
        name = Path(self.member).name
        archive = Path(self.url).name
        for folder in ("", self.corpus, Path(self.member).parent):
            if (file := inside(directory, folder, name)).is_file():
                return self._checked(read_bytes(file), file)
            if (file := inside(directory, folder, archive)).is_file():
                return self._from_zip(file)
        raise UserError(
            f"corpus {self.corpus!r}: config.data.manual_dir={str(directory)!r} contains neither {name} nor {archive}"
        )

    def _from_network(self, root: Path) -> bytes:
        name = Path(self.url).name
        return self._from_zip(
            build_once(root / "downloads" / name, lambda directory: self._download_checked(directory / name)) / name
        )

    def _download_checked(self, path: Path) -> None:
        self._download(path)
        self._from_zip(path)  # before it is published in the cache

    def _download(self, path: Path) -> None:
        try:
            with urllib.request.urlopen(self.url, timeout=30) as response, path.open("wb") as file:
                shutil.copyfileobj(response, file)
                wanted = response.headers.get("Content-Length")
            if wanted and path.stat().st_size != int(wanted):
                raise ConnectionError(f"the connection ended after {path.stat().st_size:,} of {int(wanted):,} bytes")
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            reason = getattr(error, "reason", None) or error
            raise UserError(
                f"corpus {self.corpus!r}: cannot download {self.url} ({reason}); download it by hand"
                " and set config.data.manual_dir to its directory"
            ) from None

    def _from_zip(self, path: Path) -> bytes:
        try:
            with open_to_read(path) as file, zipfile.ZipFile(file) as archive:
                if archive.getinfo(self.member).file_size > LARGEST:
                    raise zipfile.BadZipFile(f"{self.member} has more than {LARGEST:,} bytes")
                content = archive.read(self.member)
        except (zipfile.BadZipFile, zlib.error, KeyError) as error:
            raise UserError(
                f"{path}: not the zip file of corpus {self.corpus!r}: {error}; delete it and try again"
            ) from None
        return self._checked(content, path)

    def _checked(self, content: bytes, path: Path) -> bytes:
        kind, wanted = self.checksum.split(":")
        actual = hashlib.new(kind, content).hexdigest()
        if actual != wanted:
            raise UserError(
                f"{path}: wrong checksum of {Path(self.member).name} of corpus {self.corpus!r}:"
                f" {kind} is {actual}, must be {wanted}"
            )
        return content
