"""The one error of this package: a file that cannot be used.

Every reader raises it, with the file, the line or row, and the reason, so that a command can print
the message as it is and stop with exit code 2.
"""


class WorkloadError(ValueError):
    """A workload file that cannot be used. The message names the file, the line and the reason."""
