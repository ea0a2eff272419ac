"""Workloads by the names of a command line: built in, in a file, or on the Hugging Face hub.

Only a name that begins with `hf:` goes to the network, and only to fetch files that are not in the
hub's cache yet.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import httpx

from kappa_workload.catalogue import workload_named
from kappa_workload.reading import ReadAs, TokenCounter, WorkloadError, estimated_tokens
from kappa_workload.scaling import scaled
from kappa_workload.shapes import Workload

HUB_PREFIX = "hf:"
SHAREGPT_FILE = "ShareGPT_V3_unfiltered_cleaned_split.json"

_DATA_FILES = ["*.parquet", "*.jsonl", "*.json"]
_REACH_TIMEOUT_S = 5.0


def open_workload(
    name: str, *, tokenizer: str | None = None, scale: float | Fraction = 1, **reading: Any
) -> Workload:
    """A workload by a user's name for it.

    Args:
        name: of a built-in workload, a path, or `hf:OWNER/NAME[/FILE]` for a data set on the hub;
            without a file it is `SHAREGPT_FILE` if the data set has that, else the whole.
        tokenizer: a `tokenizer.json`, or the folder of a model that has one; for texts.
        scale: every length times this (`kappa_workload.scaling`); unless it is 1, without texts.
        reading: the fields of `kappa_workload.reading.ReadAs`.

    Raises:
        WorkloadError: there is no such workload, or it cannot be used or fetched.
        ValueError: it cannot be scaled so.
    """
    count_tokens = estimated_tokens if tokenizer is None else token_counter(tokenizer)
    if name.startswith(HUB_PREFIX):
        name = str(fetched(name))
    return scaled(workload_named(name, ReadAs(count_tokens, **reading)), scale)


def token_counter(tokenizer: str) -> TokenCounter:
    """A counter of a text's tokens, special ones left out.

    Raises:
        WorkloadError: there is no tokenizer there.
    """
    from tokenizers import Tokenizer

    path = Path(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise WorkloadError(
            f"{path}: no tokenizer there; give a tokenizer.json or the folder of a model"
        )
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise WorkloadError(f"{path}: not a tokenizer ({error})") from error
    loaded.no_truncation()
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)


def fetched(name: str) -> Path:
    """What is behind `hf:OWNER/NAME[/FILE]`, from the hub's cache or else from the hub: a file, or
    the folder of all its Parquet and JSON files where none is named and it is not ShareGPT.

    Raises:
        WorkloadError: not such a name, or it is not cached and cannot be fetched.
    """
    owner, _, rest = name.removeprefix(HUB_PREFIX).partition("/")
    dataset, _, file = rest.partition("/")
    if not owner or not dataset:
        raise WorkloadError(
            f"{name}: expected {HUB_PREFIX}OWNER/NAME or {HUB_PREFIX}OWNER/NAME/FILE"
        )
    # The hub's client is slow to import, and most workloads are no data sets of the hub.
    from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    repo, wanted = f"{owner}/{dataset}", file or SHAREGPT_FILE
    which = file or " ".join(f"--include '{pattern}'" for pattern in _DATA_FILES)
    remedy = (
        f"on a machine that is online, run: hf download {repo} {which} --repo-type dataset "
        f"--local-dir . and then give the path of the {'file' if file else 'folder'}"
    )
    endpoint = constants.ENDPOINT
    try:
        cached = try_to_load_from_cache(repo, wanted, repo_type="dataset")
        if isinstance(cached, str):
            return Path(cached)
        # Fails at once where there is no network: the hub's client would try for half a minute.
        httpx.head(endpoint, timeout=_REACH_TIMEOUT_S)
        hub = HfApi(endpoint)
        if not file and not hub.file_exists(repo, wanted, repo_type="dataset"):
            folder = hub.snapshot_download(repo, repo_type="dataset", allow_patterns=_DATA_FILES)
            return Path(folder)
        return Path(hf_hub_download(repo, wanted, repo_type="dataset", endpoint=endpoint))
    except (HFValidationError, HfHubHTTPError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise WorkloadError(f"{name}: the hub refused it ({first_line}); {remedy}") from error
    except (OSError, httpx.HTTPError) as error:
        raise WorkloadError(
            f"{name}: cannot reach {endpoint} ({type(error).__name__}); {remedy}"
        ) from error
