"""What keeps a cluster from starting, told apart by exit code."""


class StartError(RuntimeError):
    """The cluster could not be started; the message says why and what to do."""

    exit_code = 1


class PreflightError(StartError):
    """Found before anything was started: settings, model or machine are at fault."""

    exit_code = 2
