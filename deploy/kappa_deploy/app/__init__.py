"""Where everything is wired: settings in, a running Ray Serve application out.

The only package that imports all others: the model on disk (`model`), what each worker must know
(`plan`), the Serve application (`build`), and a cluster started and stopped here (`cluster`).
"""
