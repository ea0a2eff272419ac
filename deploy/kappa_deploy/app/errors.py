"""Errors that keep a cluster from starting, with their exit codes."""


class StartError(RuntimeError):
    """The cluster could not be started; the message says why and what to do."""

    exit_code = 1


class PreflightError(StartError):
    """Found before anything was started: settings, model or machine are at fault."""

    exit_code = 2
