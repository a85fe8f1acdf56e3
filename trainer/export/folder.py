"""A folder that appears whole, in place of an earlier one, or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..seal import sync


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Gives a temporary folder to fill; at the end of the block it is on disk and takes the place of `out`. After an error
    `out` is as it was."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        temporary.chmod(0o755)
        yield temporary
        for path in temporary.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)  # an engine may run as another user
            sync(path)
        sync(temporary)
        if out.exists():
            earlier = temporary.with_name(f"{temporary.name}.earlier")
            out.rename(earlier)
            temporary.rename(out)
            shutil.rmtree(earlier)
        else:
            temporary.rename(out)
        sync(out.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
