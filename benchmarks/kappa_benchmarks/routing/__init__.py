"""Where requests go: policies against each other, against hindsight, and against other routers."""
