"""`kappa route`, and what it would save or has saved."""

from kappa_deploy.commands.route_report import report
from kappa_router.front.command import app

app.command()(report)
