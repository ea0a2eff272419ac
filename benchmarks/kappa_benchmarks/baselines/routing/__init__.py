"""Other routers' policies, reimplemented from their sources behind our `Policy` interface.

One file per peer; `catalogue` has the table of all and makes one from its name.
"""
