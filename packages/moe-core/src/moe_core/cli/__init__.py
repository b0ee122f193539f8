"""The command line ``moe``.

``grammar`` declares the arguments. ``main`` parses them, runs a command of ``commands`` and formats errors as one
paragraph. Neither imports torch before the arguments are accepted. So help, completion and refused arguments respond at
once, and Ctrl-C during the import of torch prints one line.

Results go to stdout. Progress (on a terminal) and errors go to stderr. Exit codes: 0 success, 1 a comparison failed or
an installed package is broken, 2 the request cannot be served (one paragraph states why), 128 + n ended by signal n
(130: Ctrl-C, 141: the reader of stdout closed it, 143: SIGTERM).
"""
