"""What settings that cannot be are told."""

import pytest

from kappa.settings.base import SettingsError
from kappa.settings.cluster import load_settings


def fault(path=None, **sections) -> str:
    """The message with which a cluster file, or sections without one, is refused."""
    with pytest.raises(SettingsError) as caught:
        load_settings(path, **sections)
    return str(caught.value)


def named(message, key, says) -> bool:
    """Whether a line of the message names the key and says so."""
    return any(line.startswith(f"  {key}: ") and says in line for line in message.splitlines())
