"""The command line ``moe``: its grammar and :mod:`main <moe_core_cli.main>`, above :mod:`moe_core.cli`, which does the
work, and :mod:`moe_core_cli.terminal`, below it.

Apart from ``moe_core``, so that help, completion and refused arguments take no import of torch, and a Ctrl-C during
that import ends in a line as any other does.

Results go to stdout, progress (on a terminal) and errors to stderr.  Exit codes: 0 done, 1 a comparison failed or
something installed is broken, 2 what was asked for can't be done (one paragraph says why), 128 + n ended by signal n
(130: Ctrl-C, 141: whoever read stdout has gone, 143: SIGTERM).
"""
