"""The command line ``moe``.

``main`` reads the arguments, ``grammar`` declares them, ``execute`` runs a command of ``commands`` and turns errors
into one paragraph. ``main``, ``grammar`` and what they import do not import torch: help, completion and refused
arguments answer at once, and Ctrl-C during the import of torch ends in one line.

Results go to stdout, progress (on a terminal) and errors to stderr. Exit codes: 0 done, 1 a comparison failed or an
installed package is broken, 2 the request cannot be served (one paragraph says why), 128 + n ended by signal n (130:
Ctrl-C, 141: the reader of stdout is gone, 143: SIGTERM).
"""
