"""A file that holds one JSON object, read with errors that name it and what it should have been.

For model configs, node profiles and measured rates.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json_object(path: str | Path, what: str) -> dict[str, Any]:
    """The object in `path`; `what` says in errors what it was wanted as, such as "node profile".

    Raises:
        ValueError: it cannot be read, is no JSON, or is no object.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot read the {what}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: holds {type(data).__name__}; a {what} is a JSON object")
    return data
