"""Load test over HTTP: replays a workload at any OpenAI endpoint and says what became of it.

`asked` is what is to be sent, `endpoint` sends one request, `runner` keeps the times of all of
them, `journal` keeps what a run did on disk, `record` is one request's outcome, `play` ties them
together; `table`, `figures`, `slo`, `plots` and `report` turn records into answers. Called by
`kappa replay`.
"""
