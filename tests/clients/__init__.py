"""Other people's clients, unchanged and from PyPI, against a real fleet.

Each client that pins other versions than ours has an environment of its own (`environments`), in which a
program of `programs` uses it as its own documentation says. `make test-clients` runs all of them.
"""
