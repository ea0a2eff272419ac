"""One module per family of ``kappa`` subcommands."""
