"""How a file of a workload is refused."""

import pytest

from kappa_workload.reading import WorkloadError


def check_refused(read, path, place, reason):
    """Reading is refused with the file, the place in it (": row 2: ") and the reason."""
    with pytest.raises(WorkloadError) as error:
        read(path)
    message = str(error.value)
    assert message.startswith(f"{path}{place}") and reason in message, message
