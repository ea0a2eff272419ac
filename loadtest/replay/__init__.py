"""Load test over HTTP: replays a workload at any OpenAI endpoint and says what became of it.

`endpoint` sends one request, `runner` keeps the times of all of them, `journal` keeps what a run
did on disk, `record` is one request's outcome; `summary`, `slo`, `tables`, `plots` and `report`
turn records into answers. Called by `kappa replay`.
"""
